"""Verifies new engines: a canary goes through each of them before users' requests do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from diptych_protocol.admin import CanaryReport
from diptych_router.engines.engine_link import EngineLink
from diptych_router.requests.pools.canary import Release, run_canary
from diptych_router.requests.pools.trials import Candidate, Trial, TrialBook

log = logging.getLogger(__name__)

MAX_REPORTS = 64


class Verification:
    """Runs the trials that `TrialBook` requests, and keeps their results."""

    def __init__(
        self,
        release: Release,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_change: Callable[[], None],
    ) -> None:
        """spawn: runs a coroutine in the background. on_change: called when a trial has ended."""
        self.reports: dict[tuple[str, str], CanaryReport] = {}
        """The newest of each pair (prefill, decode), newest last."""
        self._trials = TrialBook()
        self._release, self._spawn, self._on_change = release, spawn, on_change

    def verified(self, link: EngineLink) -> bool:
        """Whether a canary went through this engine since it started."""
        return self._trials.verified(link.epoch)

    def keep(self, links: Iterable[EngineLink]) -> None:
        self._trials.keep({link.epoch for link in links})

    def begin(self, links: Iterable[EngineLink]) -> None:
        """Begin the trials that are due among these engines."""
        by_epoch = {link.epoch: link for link in links if link.open_to_work}
        candidates = [
            Candidate(epoch, link.role, link.fingerprint, link.open_tokens)
            for epoch, link in by_epoch.items()
        ]
        for trial in self._trials.due(candidates, time.monotonic()):
            self._spawn(self._try(trial, by_epoch[trial.prefill], by_epoch[trial.decode]))

    async def _try(self, trial: Trial, prefill: EngineLink, decode: EngineLink) -> None:
        ok = False
        try:
            report = await run_canary(prefill, decode, self._release)
            ok = report.ok
        finally:
            self._trials.ended(trial, ok=ok, now=time.monotonic())
        pair = f"canary from {report.prefill} to {report.decode}"
        if ok:
            log.info("%s: %d blocks in %.0f ms", pair, report.blocks, report.milliseconds)
        else:
            log.warning("%s failed: %s", pair, report.error)
        self.reports.pop((report.prefill, report.decode), None)
        self.reports[report.prefill, report.decode] = report
        while len(self.reports) > MAX_REPORTS:
            del self.reports[next(iter(self.reports))]
        self._on_change()
