"""The replacement of weights as a state machine.

    READY ──start──▶ OPEN ──finish──▶ READY
                      │ an update fails
                      ▼
                    FAILED ──start──▶ OPEN        any ──reload──▶ READY

Only READY generates. An update that fails after others have changed tensors leaves weights that
never belonged together: they are *torn*, and finishing then needs all tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from diptych_protocol import DiptychError, InvalidRequestError


class Phase(enum.Enum):
    READY = enum.auto()
    OPEN = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True)
class WeightUpdate:
    """The state of one engine's weights."""

    phase: Phase = Phase.READY
    is_checkpoint_format: bool = True
    """Whether names and shapes are those of the published checkpoint, instead of those of the
    model's memory."""
    updated: dict[str, int] = field(default_factory=dict)
    """The tensors that this update has replaced, with the checksums of their values."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Those that updates have replaced since the model's source was read."""
    source: str = ""
    """Names what the model's source had when it was read: see `weights_sample`."""
    name: str = ""
    """Names the weights by what was read and replaced. Engines with different weights must not use
    each other's KV, as when one of them was started anew."""
    torn: bool = False
    """Whether some tensors are from a failed update."""
    failure: str = ""

    @property
    def obstacle(self) -> str | None:
        """Why nothing can be generated now; None if it can."""
        match self.phase:
            case Phase.READY:
                return None
            case Phase.OPEN:
                return "a weight update is under way"
            case Phase.FAILED:
                return f"the last weight update failed ({self.failure}); finish one, or reload"

    def require_whole(self) -> None:
        """Raise `DiptychError` if new requests cannot use the weights. While weights are being
        replaced, requests wait; after a failure they might wait for ever."""
        if self.phase is Phase.FAILED:
            raise DiptychError(f"nothing can be generated: {self.obstacle}")

    def start(self, is_checkpoint_format: bool) -> None:
        """Begin an update. Raises `InvalidRequestError` if one is running."""
        if self.phase is Phase.OPEN:
            raise InvalidRequestError("a weight update is under way already", status=409)
        self.phase = Phase.OPEN
        self.is_checkpoint_format = is_checkpoint_format
        self.updated = {}

    def require_open(self) -> None:
        """Raise `InvalidRequestError` outside an update."""
        if self.phase is not Phase.OPEN:
            raise InvalidRequestError(
                self.obstacle or "no weight update is under way: start one first", status=409
            )

    def fail(self, reason: str, *, changed: bool) -> None:
        """Record a failed update; `changed` if it may have replaced something before."""
        self.phase = Phase.FAILED
        self.failure = reason
        self.torn = self.torn or changed or bool(self.updated)

    def finish(self, all_names: Iterable[str]) -> None:
        """End the update. Raises `InvalidRequestError` if weights are torn and not all of them were
        replaced."""
        self.require_open()
        missing = sorted(set(all_names) - self.updated.keys())
        if self.torn and missing:
            raise InvalidRequestError(
                f"after an update that failed, all tensors must be replaced: {missing[0]} was not "
                f"({len(missing)} in all)",
                status=409,
            )
        replaced = self.replaced | self.updated
        self.reset(self.source)
        self.replaced = replaced
        named = self.source + repr(sorted(replaced.items()))
        self.name = blake2b(named.encode(), digest_size=16).hexdigest()

    def reset(self, source: str) -> None:
        """Record that the weights are those of the source, which has this name."""
        self.phase = Phase.READY
        self.updated, self.replaced = {}, {}
        self.name = self.source = source
        self.torn = False
        self.failure = ""
