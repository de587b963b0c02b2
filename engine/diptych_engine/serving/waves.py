"""Decides when the cores of a group make steps together: one core's side, after vLLM's
data-parallel waves.

Cores that share layers (mixtures of experts) wait for each other inside of them, so while one works
all have to make steps. From a first request until nothing is left anywhere they run a **wave**;
between two waves they sleep.

    idle ──a request, START, or work of its own──▶ running ──agreed: nothing is left──▶ idle
                                                      │
    paused ◀──agreed: nothing is left, all shall pause┘        paused ──resume──▶ running

A running core without work runs dummy batches. Every few steps all cores add up what they know:
that is a barrier, and the only place where a wave ends, so it ends for all of them at once. So does
a pause: the wave that ends while all cores are to pause, by the same call, leaves them paused.

The danger is that a core sleeps while others wait for it at the barrier. So a core that starts to
run unasked announces it, unless the front-end has done so with the request; a late START is
recognised by its number; and the end of a pause is a START.

The other side is `diptych_frontend.core_client.group`; tests explore both with three
cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class WaveMember:
    """The state of one core. Methods that return a wave number ask the caller to announce it."""

    rank: int
    size: int
    steps_between_sums: int
    wave: int = 0
    """The wave that runs, or the next one."""
    running: bool = False
    paused: bool = False
    """All cores have agreed to stop."""
    pausing: bool = False
    """This core has to pause."""
    steps: int = 0
    """Steps since the last sum, or since the wave began."""
    turns: int = 0
    """How often this core was told to pause or to resume."""

    # --- what starts a wave -------------------------------------------------------------------

    def on_request(self, request_wave: int) -> int | None:
        """Record a request, for the wave that its front-end knew of.

        If that wave ended before, the front-end believed all cores to be running.
        """
        if self.paused or self.running:
            return None
        stale = request_wave < self.wave
        self.wave = max(self.wave, request_wave)
        self._run()
        return self.wave if stale else None

    def on_start(self, wave: int, exclude: int) -> None:
        """Handle START_DP_WAVE: some core has work. `exclude` runs already."""
        if wave < self.wave or self.paused or exclude == self.rank:
            return
        self.wave = wave
        if not self.running:
            self._run()

    def on_work(self) -> int | None:
        """Record that this core is about to work, for any reason."""
        if self.running or self.paused:
            return None
        self._run()
        return self.wave

    def on_pause(self, pausing: bool) -> int | None:
        """Record that generation is to be paused here, or no longer. Repeating it is harmless."""
        if pausing == self.pausing:
            return None
        self.pausing = pausing
        self.turns += 1
        if pausing:
            return self.on_work()  # it takes a sum to agree on a pause
        if self.paused:
            self.paused = False
            self._run()
        return None

    def _run(self) -> None:
        self.running = True
        self.steps = 0

    # --- what ends it -------------------------------------------------------------------------

    def on_step(self) -> None:
        """Record a step, or a dummy batch."""
        self.steps += 1

    @property
    def sum_due(self) -> bool:
        """Whether it is time to add up with the others, who wait for it."""
        return self.running and self.steps >= self.steps_between_sums

    def term(self, working: bool) -> tuple[int, int, int, int]:
        """Return what this core adds to the sum."""
        return int(working), int(self.pausing), self.turns, self.turns**2

    def on_sum(self, total: Sequence[int]) -> int | None:
        """Apply the sum of all cores' terms.

        Returns the wave that is complete, if this core is the one to report it.
        """
        self.steps = 0
        num_working, num_pausing, turns, squares = total
        if num_working:
            return None
        complete = self.wave
        self.wave += 1
        self.running = False
        # Equal numbers have no variance: all speak of the same pause, none of the one before.
        self.paused = num_pausing == self.size and self.size * squares == turns**2
        return complete if self.rank == 0 else None
