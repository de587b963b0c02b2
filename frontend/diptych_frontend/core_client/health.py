"""The health of an AsyncLLM's cores: their statistics, their liveness, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from diptych_frontend.core_client.async_engine import AsyncEngine
from diptych_frontend.core_client.group import CoreGroup
from diptych_frontend.observability.stat_loggers import StatLoggerManager
from diptych_protocol import EngineDeadError, EngineOverloadedError, SchedulerStats
from diptych_protocol.admin import DrainReport

STALL_LIMIT_S = 60.0
"""A core that has work and makes no step for this long counts as stalled. It must exceed the
longest step on the slowest machine."""
DRAIN_POLL_S = 0.1


class CoreHealth(AsyncEngine):
    """A mixin for a client that owns its engine cores."""

    _cores: CoreGroup
    logger_manager: StatLoggerManager | None
    """None: statistics are neither kept nor logged."""
    _stall_limit_s: float
    _long_calls = 0
    """Calls under way that keep the core too busy to answer."""
    _draining = False

    # --- statistics ---------------------------------------------------------------------------

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        return self._cores.stats_by_engine()

    async def refresh_stats(self) -> SchedulerStats:
        """Ask every core for its present statistics; return the first one's."""
        await self._cores.refresh_stats()
        return self._cores.members[0].stats

    async def do_log_stats(self) -> None:
        if self.logger_manager is None:
            return
        for member in self._cores.members:
            self.logger_manager.record(member.stats, None, engine_idx=member.rank)
        self.logger_manager.log()

    # --- is it well? --------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise if the engine is dead, stalled or draining."""
        self._check_usable()
        if self._draining or self._cores.draining:
            raise EngineOverloadedError("draining")
        await self.check_live()

    async def check_live(self) -> None:
        """Raise if the core is dead or stalled: it has work, or does not even report that it has
        none, and made no step within the limit."""
        self._check_usable()
        doubtful = self._cores.doubtful_s()
        if doubtful > self._stall_limit_s and not self._long_calls:
            raise EngineDeadError(f"stalled: the engine core made no step for {doubtful:.0f} s")

    @contextlib.contextmanager
    def silence_expected(self) -> Iterator[None]:
        """During the block, the core may be too busy to answer, and yet be well."""
        self._long_calls += 1
        try:
            yield
        finally:
            self._long_calls -= 1
            self._cores.excuse_silence()

    # --- leaving ------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> DrainReport:
        """Tell all clients of the core that it is about to end, and wait until it may.

        Nothing is refused meanwhile, because a router may have sent a request before it knew. After
        `timeout_s`, the report says what still keeps the engine.

        Raises:
            EngineOverloadedError: the core did not answer in time.
            EngineDeadError: it died.
        """
        self._draining = True
        deadline = time.monotonic() + timeout_s
        report = await self._cores.ask_to_drain("drain", self._stall_limit_s)
        drained_before = False
        # Twice: what was sent before its sender knew has arrived by the second time.
        while not (report.drained and drained_before) and time.monotonic() < deadline:
            drained_before = report.drained
            await asyncio.sleep(DRAIN_POLL_S)
            report = await self._cores.ask_to_drain("drain_report", self._stall_limit_s)
        return report

    async def drain_report(self) -> DrainReport:
        """Return what keeps the engine from ending; changes nothing. Raises as `drain`."""
        return await self._cores.ask_to_drain("drain_report", self._stall_limit_s)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until the core has no request left from any client; refuse none meanwhile.

        Raises `TimeoutError` if that takes longer than `drain_timeout` seconds.
        """
        await self._connect()
        deadline = time.monotonic() + drain_timeout
        while (report := await self.drain_report()).num_running + report.num_waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{report.num_running} requests run and {report.num_waiting} wait still "
                    f"after {drain_timeout:g} s"
                )
            await asyncio.sleep(DRAIN_POLL_S)
