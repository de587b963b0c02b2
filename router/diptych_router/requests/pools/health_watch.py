"""Sends canaries through engines: through new ones before users' requests go there, and through
those that fail too often before they get requests again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from diptych_protocol.admin import CanaryReport
from diptych_router.engines.engine_link import EngineLink
from diptych_router.engines.engine_table import ROLES
from diptych_router.engines.health_book import Failure, left_out
from diptych_router.requests.pools.canary import Release, probe, run_canary
from diptych_router.requests.pools.trials import Candidate, Trial, TrialBook

log = logging.getLogger(__name__)

MAX_REPORTS = 64


class HealthWatch:
    """Runs the trials of new engines, and leaves out those at which too many requests fail."""

    def __init__(
        self,
        links: Mapping[str, EngineLink],
        usable: Callable[[EngineLink], bool],
        *,
        release: Release,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_change: Callable[[], None],
        verifies: bool,
    ) -> None:
        """links: the present engines by their keys. usable: whether an engine may get requests,
        apart from its health. spawn: runs a coroutine in the background. on_change: called when a
        trial has ended, and when an engine may be well again. verifies: there are trials of new
        engines; otherwise those that fail get no partner either (see `probe`)."""
        self._links, self._usable = links, usable
        self._release, self._spawn, self._on_change = release, spawn, on_change
        self._verifies = verifies
        self._trials = TrialBook()
        self.reports: dict[tuple[str, str], CanaryReport] = {}
        """The newest of the trials of each pair (prefill, decode), newest last."""

    def verified(self, link: EngineLink) -> bool:
        """Whether a trial went through this engine since it started."""
        return self._trials.verified(link.epoch)

    def trusted(self, link: EngineLink) -> bool:
        """See `TrialBook.trusted`."""
        return self._trials.trusted(link.epoch)

    def went_badly(self, key: str, failure: Failure) -> None:
        """Record that an engine failed at a request and is at fault."""
        link = self._links.get(key)
        if link is None:
            return
        link.breaker.failures[failure] += 1
        if link.breaker.badly(time.monotonic()):
            log.warning("%s engine %s fails too often (%s)", link.role, link.name, failure)
            self._sort_out()

    def look(self, now: float) -> None:
        """Send the canaries that are due. Call it every second, and when engines come or go."""
        if self._verifies:
            self._begin_trials(now)
        for link in self._links.values():
            if link.open_to_work and not link.silent and link.breaker.canary_due(now):
                link.breaker.begin_canary()
                self._spawn(self._prove(link))
        self._sort_out()

    # --- new engines --------------------------------------------------------------------------

    def _begin_trials(self, now: float) -> None:
        self._trials.keep({link.epoch: link.former for link in self._links.values()}, now)
        by_epoch = {link.epoch: link for link in self._links.values() if link.open_to_work}
        candidates = [
            Candidate(epoch, link.role, link.fingerprint, link.open_tokens)
            for epoch, link in by_epoch.items()
        ]
        for trial in self._trials.due(candidates, now):
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

    # --- engines that fail --------------------------------------------------------------------

    def _sort_out(self) -> None:
        """Leave engines out whose breakers are open, or take them in again."""
        usable = [link for link in self._links.values() if link.up and self._usable(link)]
        pools = ({x.key: x.breaker for x in usable if x.role == role} for role in ROLES)
        out = {key for pool in pools for key in left_out(pool)}
        for link in self._links.values():
            link.keep_out(link.key in out)

    async def _prove(self, link: EngineLink) -> None:
        error = "it was not finished"
        others = [x for x in self._links.values() if x.open_to_work and not x.is_bad]
        try:
            error = await probe(link, others, self._release, pairs=self._verifies)
        finally:
            link.breaker.canary_ended(time.monotonic(), ok=not error)
        what = f"fails still: {error}" if error else "is well again"
        log.warning("%s engine %s %s", link.role, link.name, what)
        self._on_change()
