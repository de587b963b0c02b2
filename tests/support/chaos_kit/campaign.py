"""Runs: a fault under load, and what must be true after it.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_kit.agreement import disagreements
from chaos_kit.bad_news import Mischief
from chaos_kit.faults import ANYWHERE, ON_A_NETWORK, Fault, Scene
from chaos_kit.faulty_network import FaultyNetwork
from chaos_kit.load import Fate, Load
from chaos_kit.service import (
    LEAST_LOADED,
    NAMES,
    REST_S,
    Engine,
    Footprint,
    Service,
    Steering,
    running,
)
from model_kit.sensitive_model import Question, questions, save_sensitive_model
from waits import PATIENCE_S

CONCURRENCY = 8
WARM_UP_S, COOL_DOWN_S = 0.3, 0.3
TERMINATE_S = 45.0
"""Far above every deadline that a request may meet, so that only one that has none is beyond it."""
SPARE_DESCRIPTORS, SPARE_THREADS = 28, 2
"""How much more than at first a process may hold that has met new peers: seven descriptors for each
of three, to which it connects and which connect to it. Growth would exceed it within a few runs."""


@dataclass
class Report:
    """What one run was like."""

    seed: int
    fault: str
    script: list[str]
    fates: list[Fate]
    seconds: float
    problems: list[str]
    news: Counter[str]
    """What befell the messages in which engines tell of their prefixes."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.fault}", *self.script, *map(str, self.fates)]
        return "\n".join([*lines, "PROBLEMS:", *self.problems])


def fault_of(seed: int, among: Sequence[Fault]) -> tuple[Fault, random.Random]:
    """What the run of this seed does, and where its details come from."""
    rng = random.Random(seed)
    return rng.choice(among), rng


async def run_once(service: Service, asked: list[Question], seed: int, fault: Fault,
                   rng: random.Random) -> Report:  # fmt: skip
    """One run; the service is ready before it, and after it unless there are problems."""
    began = time.monotonic()
    load = Load(lambda: service.router, asked, seed)
    scene = Scene(service, load, rng)
    problems: list[str] = []
    gossip = random.Random(f"news {seed}")
    mischief = Mischief.drawn(gossip)
    service.news.begin(mischief, gossip)
    load.start(CONCURRENCY)
    try:
        await asyncio.sleep(WARM_UP_S + rng.random() * 0.5)
        await fault(scene)
        await asyncio.sleep(COOL_DOWN_S)
    except Exception as exc:
        problems.append(f"the fault itself failed: {type(exc).__name__}: {exc}")
    await load.finish(TERMINATE_S)
    service.news.end()
    if service.steering.follows:
        scene.note(f"news of prefixes until now: {mischief}; {dict(service.news.done)}")
    problems += [f"{fate.name}: {fate.wrong}" for fate in load.fates if fate.wrong]
    problems += await _aftermath(service)
    seconds = time.monotonic() - began
    news = service.news.done.copy()
    return Report(seed, fault.__name__, scene.script, load.fates, seconds, problems, news)


async def _aftermath(service: Service) -> list[str]:
    """What is wrong when the fault is over and nobody asks any more."""
    try:
        await service.ready()
    except Exception as exc:
        return [f"the service does not get well: {type(exc).__name__}: {exc}"]
    problems = await service.at_rest(REST_S) or await disagreements(service)
    return problems or await _footprints(service)


async def _footprints(service: Service) -> list[str]:
    """Descriptors and threads that were not there when an engine was at rest first."""
    with contextlib.suppress(TimeoutError):
        await settled(lambda: not any(map(_growth, service.engines)))
    grown = [text for engine in service.engines if (text := _growth(engine))]
    for engine in service.engines:
        engine.age += 1
    return grown


async def settled(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait for something that engines do by themselves. Raises `TimeoutError`."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.05)


def _growth(engine: Engine) -> str:
    now = Footprint.of(engine.pid)
    if engine.first is None:
        engine.first = now
    descriptors = now.descriptors - engine.first.descriptors
    threads = now.threads - engine.first.threads
    if descriptors <= SPARE_DESCRIPTORS and threads <= SPARE_THREADS:
        return ""
    return (
        f"{engine.name} has {descriptors} descriptors and {threads} threads more than "
        f"{engine.age} runs ago"
    )


# --- many runs ------------------------------------------------------------------------------------


@dataclass
class Campaign:
    """One service, and the runs that it has seen."""

    service: Service
    asked: list[Question]
    faults: Sequence[Fault]
    reports: list[Report] = field(default_factory=list)

    async def run(self, seed: int, fault: Fault | None = None) -> Report:
        """`fault`: instead of the one that the seed says."""
        chosen, rng = fault_of(seed, self.faults)
        report = await run_once(self.service, self.asked, seed, fault or chosen, rng)
        self.reports.append(report)
        gc.collect()
        return report


@contextlib.asynccontextmanager
async def campaign(
    folder: Path,
    *,
    networked: bool,
    names: Sequence[str] = NAMES,
    steering: Steering = LEAST_LOADED,
) -> AsyncIterator[Campaign]:
    """A service to play with; `networked`: on hosts of its own, with a network that can fail."""
    model = save_sensitive_model(folder / "model")
    asked = questions(model, 60)
    with contextlib.ExitStack() as stack:
        network = None
        if networked:
            network = stack.enter_context(FaultyNetwork(5, random.Random(folder.name)))
        async with running(model, folder, network, names, steering) as service:
            await warm_up(service, asked)
            yield Campaign(service, asked, ON_A_NETWORK if networked else ANYWHERE)


async def warm_up(service: Service, asked: list[Question]) -> None:
    """Let every prefill engine hand off to every decode engine."""
    load = Load(lambda: service.router, asked, 0)
    load.start(CONCURRENCY)
    await asyncio.sleep(1.0)
    await load.finish(TERMINATE_S)
    bad = [str(fate) for fate in load.fates if fate.wrong or fate.outcome != "answered"]
    bad += await service.at_rest(REST_S)
    if bad:
        raise RuntimeError("without any fault: " + "; ".join(bad))
    for engine in service.engines:
        engine.first = Footprint.of(engine.pid)


def summary(reports: Iterable[Report]) -> str:
    """A table: for each kind of fault, what became of the requests."""
    by_fault: dict[str, list[Report]] = {}
    for report in reports:
        by_fault.setdefault(report.fault, []).append(report)
    head = (
        "fault", "runs", "bad", "requests", "answered", "retried", "aborted", "failed", "slowest s",
    )  # fmt: skip
    rows = [_row(fault, of_fault) for fault, of_fault in sorted(by_fault.items())]
    rows.append(_row("all", [r for of_fault in by_fault.values() for r in of_fault]))
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                  for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in [head, *rows]
    )  # fmt: skip


def _row(name: str, reports: list[Report]) -> tuple[str, ...]:
    fates = [fate for report in reports for fate in report.fates]
    outcomes = Counter(fate.outcome for fate in fates)
    numbers = (
        len(reports),
        sum(bool(report.problems) for report in reports),
        len(fates),
        outcomes["answered"],
        sum(fate.attempts > 1 for fate in fates),
        outcomes["aborted"],
        outcomes["failed"],
    )
    slowest = max((fate.seconds for fate in fates), default=0.0)
    return (name, *map(str, numbers), f"{slowest:.2f}")


def failures(reports: Iterable[Report]) -> Counter[str]:
    """The errors of failed requests and how often each came, without names and numbers."""
    return Counter(
        "".join(c for c in fate.error if not c.isdigit())[:160]
        for report in reports
        for fate in report.fates
        if fate.outcome == "failed"
    )
