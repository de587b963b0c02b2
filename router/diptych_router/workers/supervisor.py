"""Keeps a router's processes running, and speaks for all of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.exposition import choose_encoder

from diptych_frontend.observability.metrics import PREFIX, EngineStatsCollector
from diptych_frontend.openai.server import Site, listen, reserve_port, serve_sites
from diptych_protocol import RouterConfig, SchedulerStats
from diptych_protocol.admin import Explanation, RequestList, RouterReport
from diptych_router.page.panels import Panels, panels_of_all
from diptych_router.process.admin import admin_app
from diptych_router.process.program import drain_timeout_s
from diptych_router.workers.channel import AnswerTo, Channel, ChannelError
from diptych_router.workers.messages import (
    Exposition,
    Family,
    Listening,
    Look,
    Newest,
    ToWorker,
    Why,
    WorkerReport,
    encode,
    explanation_of,
    panels_of,
    report_of,
    requests_of,
    to_parent,
)
from diptych_router.workers.states import explanation_of_all, newest_of_all, state_of_all
from diptych_router.workers.sums import Families, added_up, families_of, what_stays

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 1.0
"""Who is asked for metrics or state waits so long for a process, and then takes its last report."""
LOOK_S: Final = 5.0
"""Every process is asked for a report at this interval, and may take as long. What it counted after
its last one is lost if it is killed."""
SILENT_S: Final = 30.0
"""A process that gives no report for so long is killed, and started again."""
PANELS_AGE_S: Final = 0.25
"""What pages are shown of the pools may be so old, so that many pages at many processes ask no more
often than a few."""
START_S: Final = 180.0
"""The same for one that has not begun to serve: it may have to fetch the tokenizer first."""
STEADY_S: Final = 60.0
"""Who lived so long did not end for the reason for which it was started."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LAST_WORDS_S: Final = 8.0
"""How long processes that were told to end at once may take for that."""


async def supervise(config: RouterConfig, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Serve with several processes until SIGTERM. Exits with the code of the first process that
    ends if none of them could ever serve: its reason would be that of the others, too."""
    reserved = reserve_port(args.host, args.port)
    port = reserved.getsockname()[1]
    workers = Workers(config, port, argv)
    sites = []
    if args.admin_port is not None:
        admin_listener = listen(args.admin_host or args.host, args.admin_port)
        sites.append(Site(admin_app(workers.state, workers, args.keys), admin_listener))
    serving = asyncio.create_task(
        serve_sites(
            *sites,
            drain=workers.drain,
            drain_timeout_s=drain_timeout_s(config, args) + LAST_WORDS_S,
        )
    )
    keeping = asyncio.create_task(workers.keep())
    try:
        await asyncio.wait((serving, keeping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await workers.end()
        keeping.cancel()
        serving.cancel()
        await asyncio.wait((serving, keeping))
        reserved.close()
    for task in (serving, keeping):
        if not task.cancelled():
            task.result()
    if workers.failed is not None:
        raise SystemExit(workers.failed)


def pause_s(lived_s: float, pause_before_s: float) -> float:
    """How long to wait before a process is started again; `pause_before_s`: before this life, 0 if
    it was the first."""
    if lived_s >= STEADY_S or not pause_before_s:
        return FIRST_PAUSE_S
    return min(2 * pause_before_s, LONGEST_PAUSE_S)


class Worker:
    """One process of this moment."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.listening = False
        self.report: WorkerReport | None = None
        """Its newest."""
        self.answered_at = time.monotonic()
        self._channel: Channel | None = None

    async def converse(self, end: socket.socket, answer_to: AnswerTo) -> None:
        """Until the process is gone."""
        self._channel = await Channel.over(end, answer_to)
        await self._channel.run()

    async def ask(self, timeout_s: float) -> None:
        """Bring `report` up to date, if the process serves, and answers in time."""
        if self._channel is None or not self.listening:
            return
        with contextlib.suppress(ChannelError, TimeoutError):
            self.report = report_of(await self._channel.ask(b"", timeout_s))
            self.answered_at = time.monotonic()

    async def answer(self, question: ToWorker) -> bytes | None:
        """None: it does not serve, or does not answer in time."""
        if self._channel is None or not self.listening:
            return None
        with contextlib.suppress(ChannelError, TimeoutError):
            return await self._channel.ask(encode(question), ANSWER_TIMEOUT_S)
        return None

    def begins_to_serve(self) -> None:
        """It has said so."""
        self.listening, self.answered_at = True, time.monotonic()

    @property
    def hangs(self) -> bool:
        patience_s = SILENT_S if self.listening else START_S
        return time.monotonic() - self.answered_at > patience_s


class Workers:
    """All of them."""

    def __init__(self, config: RouterConfig, port: int, argv: Sequence[str]) -> None:
        self.failed: int | None = None
        """The exit code of a process that ended before any of them could serve."""
        self._config = config
        self._port = port
        self._argv = argv
        self._now: dict[int, Worker] = {}
        """By index; without those that wait for their next start."""
        self._counted: list[Family] = []
        """By processes that have ended."""
        self._served = False
        """Some process has listened."""
        self._leaving = asyncio.Event()
        self._looking = asyncio.Lock()
        self._looked = -math.inf, panels_of_all([])
        """When the pools were last looked at for pages, and what was seen."""
        self._own = CollectorRegistry()
        ProcessCollector(registry=self._own)
        self._restarts = Counter(
            f"{PREFIX}router_process_restarts",
            "Processes of the router that ended by themselves and were started again.",
            ("model_name",),
            registry=self._own,
        ).labels(config.name)

    # --- life and death -----------------------------------------------------------------------

    async def keep(self) -> None:
        """Until `drain` or `end`, or until it is clear that none can serve."""
        keepers = [asyncio.create_task(self._keep(i)) for i in range(self._config.processes)]
        watching = asyncio.create_task(self._watch())
        try:
            while keepers and self.failed is None:
                done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
                for keeper in done:
                    keepers.remove(keeper)
                    keeper.result()
        finally:
            for task in (watching, *keepers):
                task.cancel()

    async def _keep(self, index: int) -> None:
        pause = 0.0
        while not self._leaving.is_set():
            begun = time.monotonic()
            code = await self._one_life(index)
            lived = time.monotonic() - begun
            if self._leaving.is_set():
                return
            if not self._served:
                self.failed = code if code > 0 else 128 - code
                return
            pause = pause_s(lived, pause)
            self._restarts.inc()
            log.error(
                "process %d ended with code %d after %.0f s; it starts again in %g s",
                *(index, code, lived, pause),
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause)

    async def _one_life(self, index: int) -> int:
        """Returns the exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "diptych_router.workers.worker"),
                *(str(index), str(self._port), *self._argv),
                stdin=theirs.fileno(),
            )
        worker = self._now[index] = Worker(process)

        async def answer_to(question: bytes) -> bytes:
            asked = to_parent(question)
            if isinstance(asked, Listening):
                worker.begins_to_serve()
                self._served = True
                return b""
            if isinstance(asked, Look):
                return encode(await self.panels())
            if isinstance(asked, Why):
                return encode(await self.explained(asked.request_id))
            return encode(await self.exposition(asked.accept))

        reading = asyncio.create_task(worker.converse(ours, answer_to))
        try:
            return await process.wait()
        finally:
            reading.cancel()
            if process.returncode is None:
                process.kill()
            del self._now[index]
            if worker.report is not None:
                self._counted = added_up((self._counted, what_stays(worker.report.metrics)))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._reports(LOOK_S)
            for index, worker in self._now.items():
                if worker.hangs and worker.process.returncode is None:
                    log.error("process %d gives no report: it is killed", index)
                    worker.process.kill()

    async def drain(self) -> None:
        """Let every process leave in its own good order, and wait for that."""
        self._leaving.set()
        self._tell_all("terminate")
        await self._all_gone()

    async def end(self) -> None:
        """Let none of them be left, whatever they still do."""
        self._leaving.set()
        self._tell_all("terminate")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._all_gone()
        self._tell_all("kill")
        await self._all_gone()

    def _tell_all(self, what: str) -> None:
        for worker in self._now.values():
            if worker.process.returncode is None:
                getattr(worker.process, what)()

    async def _all_gone(self) -> None:
        if self._now:
            await asyncio.wait(
                [asyncio.create_task(worker.process.wait()) for worker in self._now.values()]
            )

    # --- what they say together ---------------------------------------------------------------

    async def state(self) -> RouterReport:
        """What the processes that serve say together."""
        return state_of_all([report.state for report in await self._reports()])

    async def explained(self, request_id: str) -> Explanation:
        """See `RequestMemory.explained`."""
        parts = [explanation_of(answer) for answer in await self._answers(Why(request_id))]
        return explanation_of_all(parts, self._config.policy, self._config.disaggregate)

    async def newest(self, limit: int) -> RequestList:
        """See `RequestMemory.newest`."""
        parts = [requests_of(answer) for answer in await self._answers(Newest(limit))]
        return newest_of_all(parts, limit)

    async def panels(self) -> Panels:
        """What all processes see of the pools."""
        async with self._looking:
            when, panels = self._looked
            if time.monotonic() - when >= PANELS_AGE_S:
                panels = panels_of_all([panels_of(part) for part in await self._answers(Look())])
                self._looked = time.monotonic(), panels
            return panels

    async def _answers(self, question: ToWorker) -> list[bytes]:
        """What the processes that serve answer."""
        answers = await asyncio.gather(*(each.answer(question) for each in self._now.values()))
        return [answer for answer in answers if answer is not None]

    async def exposition(self, accept: str) -> Exposition:
        """The sums over all processes, also those that have ended, and what engines say."""
        reports = await self._reports()
        registry = CollectorRegistry()
        registry.register(EngineStatsCollector(self._config.name, lambda: _newest(reports)))
        parts = (families_of(self._own), self._counted, *(each.metrics for each in reports))
        registry.register(Families(added_up(parts)))
        encode_text, content_type = choose_encoder(accept)
        return Exposition(encode_text(registry), content_type)

    async def _reports(self, timeout_s: float = ANSWER_TIMEOUT_S) -> list[WorkerReport]:
        """Each process's newest."""
        await asyncio.gather(*(worker.ask(timeout_s) for worker in self._now.values()))
        return [worker.report for worker in self._now.values() if worker.report is not None]


def _newest(reports: Sequence[WorkerReport]) -> dict[str, SchedulerStats]:
    """Each engine's statistics from the process to which it spoke last."""
    newest: dict[str, SchedulerStats] = {}
    for name, stats in (item for report in reports for item in report.engines.items()):
        known = newest.get(name)
        if known is None or stats.steps > known.steps:
            newest[name] = stats
    return newest
