"""When the cores of a group step together: the front-end's side. Pure; after vLLM's coordinator.

It knows the newest wave, and whether the cores run it as far as anybody has said. See
`diptych_engine.serving.waves` for what a wave is, and for the cores' side.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WaveCoordinator:
    """Methods that return a pair ask for START_DP_WAVE(wave, exclude) to all cores."""

    wave: int = 0
    """What requests are stamped with."""
    running: bool = False

    def on_request(self, rank: int) -> tuple[int, int] | None:
        """A request goes to a core, stamped with `wave`; that starts the core itself."""
        if self.running:
            return None
        self.running = True
        return self.wave, rank

    def on_start_wave(self, wave: int, rank: int) -> tuple[int, int] | None:
        """A core has begun to run without having been told."""
        if wave < self.wave or (wave == self.wave and self.running):
            return None
        self.wave, self.running = wave, True
        return wave, rank

    def on_wave_complete(self, wave: int) -> None:
        """No core has anything left of a wave."""
        if wave >= self.wave:
            self.wave, self.running = wave + 1, False
