"""Packs a model's projections while their tensors are read from the file."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from diptych_engine.models.groups import Groups
from diptych_engine.models.interface import Packable
from diptych_engine.models.packed import PackedMatrix


class Packer:
    """Takes quantised tensors in any order, from any thread, and packs a projection as soon as
    all of its parts are there: nothing else of the file is kept in memory."""

    def __init__(self, packables: Sequence[Packable]) -> None:
        """What was packed before is dropped."""
        self._parts: list[dict[str, Groups]] = [{} for _ in packables]
        self._place = {
            name: (packable, parts)
            for packable, parts in zip(packables, self._parts, strict=True)
            for name in packable.published
        }
        self._lock = threading.Lock()
        drop_packed(packables)

    def take(self, name: str, groups: Groups) -> None:
        """A published tensor, or this rank's share of it, laid out as the model has it."""
        if name not in self._place:
            return
        packable, parts = self._place[name]
        with self._lock:
            parts[name] = groups
            if len(parts) < len(packable.published):
                return
        packable.linear.packed = PackedMatrix.of([parts[name] for name in packable.published])
        parts.clear()


def drop_packed(packables: Sequence[Packable]) -> None:
    """Compute with the plain weights from now on."""
    for packable in packables:
        packable.linear.packed = None
