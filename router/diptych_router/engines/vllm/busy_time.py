"""For how long an engine has been at work, which a vLLM server does not tell. Pure."""

from __future__ import annotations


class BusyTime:
    """The time in which requests of this router were open there, and that between two reports that
    both say that requests run, whoever sent them. Time is passed in."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counted_to = 0.0
        self._num_open = 0
        self._runs = False
        """The last report said that requests run."""

    def opened(self, now: float) -> None:
        """A request went there."""
        self._count(now)
        self._num_open += 1

    def ended(self, now: float) -> None:
        """One of these requests is over."""
        self._count(now)
        self._num_open -= 1

    def reported(self, now: float, runs: bool) -> float:
        """A report came; runs: it says that requests run. Returns the seconds up to now."""
        self._count(now, runs and self._runs)
        self._runs = runs
        return self._seconds

    def _count(self, now: float, works: bool = False) -> None:
        if self._num_open > 0 or works:
            self._seconds += max(0.0, now - self._counted_to)
        self._counted_to = now
