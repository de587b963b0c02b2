"""A number of pods for each of the two pools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """A number of pods for each pool; true if there is any."""

    prefill: int
    decode: int

    def of(self, role: str) -> int:
        return self.prefill if role == "prefill" else self.decode

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.prefill + other.prefill, self.decode + other.decode)

    def __bool__(self) -> bool:
        return self.prefill > 0 or self.decode > 0


NOTHING = Counts(0, 0)
