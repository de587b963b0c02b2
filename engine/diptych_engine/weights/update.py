"""The replacement of weights as a state machine. Pure.

    READY ──start──▶ OPEN ──finish──▶ READY
                      │ an update fails
                      ▼
                    FAILED ──start──▶ OPEN        any ──reload──▶ READY

Nothing is generated but in READY. An update that fails after others have changed tensors leaves
weights that never belonged together: they are *torn*, and finishing needs all tensors then.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych_protocol import DiptychError, InvalidRequestError


class Phase(enum.Enum):
    READY = enum.auto()
    OPEN = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True)
class WeightUpdate:
    """What has become of one engine's weights."""

    phase: Phase = Phase.READY
    is_checkpoint_format: bool = True
    """Names and shapes are those of the published checkpoint, else those of the model's memory."""
    updated: set[str] = field(default_factory=set)
    """Names of the tensors that this update has replaced."""
    torn: bool = False
    """Some tensors are from an update that failed."""
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
        """Raises `DiptychError` if the weights are not fit for requests that come now. While they
        are being replaced requests wait; after a failure that might be for ever."""
        if self.phase is Phase.FAILED:
            raise DiptychError(f"nothing can be generated: {self.obstacle}")

    def start(self, is_checkpoint_format: bool) -> None:
        """Raises `InvalidRequestError` if one is under way."""
        if self.phase is Phase.OPEN:
            raise InvalidRequestError("a weight update is under way already", status=409)
        self.phase = Phase.OPEN
        self.is_checkpoint_format = is_checkpoint_format
        self.updated = set()

    def require_open(self) -> None:
        """Raises `InvalidRequestError` outside an update."""
        if self.phase is not Phase.OPEN:
            raise InvalidRequestError(
                self.obstacle or "no weight update is under way: start one first", status=409
            )

    def fail(self, reason: str, *, changed: bool) -> None:
        """An update went wrong; `changed` if it may have replaced something before."""
        self.phase = Phase.FAILED
        self.failure = reason
        self.torn = self.torn or changed or bool(self.updated)

    def finish(self, all_names: Iterable[str]) -> None:
        """Raises `InvalidRequestError` if weights are torn and not all of them were replaced."""
        self.require_open()
        missing = sorted(set(all_names) - self.updated)
        if self.torn and missing:
            raise InvalidRequestError(
                f"after an update that failed, all tensors must be replaced: {missing[0]} was not "
                f"({len(missing)} in all)",
                status=409,
            )
        self.reset()

    def reset(self) -> None:
        """The weights are whole again."""
        self.phase = Phase.READY
        self.updated = set()
        self.torn = False
        self.failure = ""
