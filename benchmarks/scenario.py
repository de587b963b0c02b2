"""What a scenario is, and the runner that lets systems take turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

import httpx
from benchmarks.figures import Record
from benchmarks.load import Load, drive
from benchmarks.servers import BUSY_WHEN_IDLE, NotStartedError, Running, System, running
from benchmarks.traces.replay import Replay
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WARM_UP = (Load(1, 16, 8, requests=2), Load(4, 128, 8))
PATIENCE_S = 20
"""A system that took more than this many seconds for a case is not measured in that case again."""
LIMIT_S = 120
"""A case that would take a system more than this many seconds is left out for that system."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    repetitions: int = 3
    only: tuple[str, ...] = ()
    """Patterns of the cases that are measured; none: all."""
    quick: bool = False
    """Fewer cases, and each once."""
    peers: dict[str, str] = field(default_factory=dict)
    """Interpreters of other projects' environments, by the peer's name."""
    replay: Replay = field(default_factory=Replay)
    """Which trace is replayed, and how."""

    @property
    def times(self) -> int:
        return 1 if self.quick else self.repetitions

    def wants(self, case: str) -> bool:
        return not self.only or any(fnmatchcase(case, pattern) for pattern in self.only)


@dataclass(frozen=True, slots=True)
class Column:
    """A figure in a table."""

    figure: str
    heading: str
    digits: int = 1


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a figure over another, a line for each system."""

    title: str
    x: str
    y: str
    cases: str = ""
    """Only cases whose names begin with this are plotted."""
    logarithmic: bool = True
    """Whether both axes are logarithmic."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    about: str
    """What is done, in a few sentences under the title."""
    columns: tuple[Column, ...]
    run: Callable[[Options, Reporter], list[Record]]
    versus: tuple[str, ...] = ()
    """The figures that the table of ratios shows."""
    first_is_baseline: bool = False
    """Whether ratios are the figures of the others over those of the first system, instead of the
    reverse."""
    panels: tuple[Panel, ...] = ()


class Reporter:
    """Says what is going on: a line for each measurement, and a bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self.notes: list[str] = []
        """What readers of the results must know."""

    @contextlib.contextmanager
    def counting(self, name: str, total: int) -> Iterator[None]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeRemainingColumn(), console=self._console) as self._bar:
            self._bar.add_task(name, total=total)
            yield
        self._bar = None

    def done(self, record: Record, columns: Sequence[str]) -> None:
        """Report that one measurement of the total is done."""
        figures = ", ".join(
            f"{name} {record.figures[name]:.4g}" for name in columns if name in record.figures
        )
        where = f"{record.case} · {record.system} · {record.repetition + 1}"
        self._console.print(f"{where}: {figures}", highlight=False)
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._console.print(text, style="yellow", highlight=False)


Item = TypeVar("Item")
Measure = Callable[[Running, Load, int], Coroutine[None, None, dict[str, float]]]
"""Measures a running system under a load, whose prompts a seed decides; returns figures by name."""


async def plain(server: Running, load: Load, seed: int) -> dict[str, float]:
    """The load alone."""
    return await drive(server.url, server.system.model, load, seed)


@dataclass(slots=True)
class Contestant:
    """A system that runs, and how fast it gets through its cases."""

    server: Running
    tokens_per_s: float = 0.0
    """Tokens per second, of prompts and answers, in the case measured last; 0: there was none."""
    slow: set[str] = field(default_factory=set)
    """Cases that took longer than `PATIENCE_S`."""

    @property
    def name(self) -> str:
        return self.server.system.name

    def expected_s(self, load: Load) -> float:
        return load.tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    def measured(self, case: str, load: Load, repetition: int, measure: Measure) -> Record:
        started = time.perf_counter()
        figures = asyncio.run(measure(self.server, load, seed_of(case, repetition)))
        self.took(case, load, time.perf_counter() - started)
        return Record(case, self.name, repetition, figures)

    def took(self, case: str, load: Load, seconds: float) -> None:
        self.tokens_per_s = load.tokens / seconds
        if seconds > PATIENCE_S:
            self.slow.add(case)


def compare(
    systems: Sequence[System],
    loads: dict[str, Load],
    options: Options,
    reporter: Reporter,
    measure: Measure = plain,
) -> list[Record]:
    """All systems stay up, and take turns in each case and repetition; who begins changes. Each
    has come to rest before the next one begins.

    A peer that does not start, or fails in a case, is left out there with a note; `systems[0]`,
    ours, must not.
    """
    chosen = {case: load for case, load in loads.items() if options.wants(case)}
    records: list[Record] = []
    with ExitStack() as stack:
        contestants = [Contestant(server) for server in _start(stack, systems, reporter)]
        with reporter.counting("measuring", len(chosen) * options.times * len(contestants)):
            for case, load in chosen.items():
                able = _able(contestants, case, load, reporter)
                for repetition in range(options.times):
                    for contestant in rotated(able, repetition):
                        if case in contestant.slow:
                            continue
                        try:
                            record = contestant.measured(case, load, repetition, measure)
                        except (httpx.HTTPError, RuntimeError, ExceptionGroup) as exc:
                            if contestant is contestants[0]:
                                raise
                            reporter.note(f"{case}: {contestant.name} failed: {exc!r}")
                            contestant.slow.add(case)
                            continue
                        contestant.server.rest()
                        records.append(record)
                        reporter.done(record, ("ttft_ms", "tpot_ms", "tokens_per_s"))
    return records


def _able(
    contestants: Sequence[Contestant], case: str, load: Load, reporter: Reporter
) -> list[Contestant]:
    """The contestants that are expected to get through a case in time; a note tells of the
    others."""
    able = []
    for contestant in contestants:
        if contestant.expected_s(load) <= LIMIT_S:
            able.append(contestant)
        else:
            reporter.note(f"{case}: {contestant.name} would take over {LIMIT_S} s")
    return able


def _start(stack: ExitStack, systems: Sequence[System], reporter: Reporter) -> list[Running]:
    servers: list[Running] = []
    for system in systems:
        try:
            server = stack.enter_context(running(system))
        except NotStartedError as exc:
            if not servers:
                raise
            reporter.note(f"left out: {exc}")
            continue
        for load in WARM_UP:
            asyncio.run(drive(server.url, system.model, load, seed=1))
        servers.append(server)
    for server in servers if len(servers) > 1 else ():
        if (busy := server.idle_load()) > BUSY_WHEN_IDLE:
            name = server.system.name
            reporter.note(f"{name} uses {busy:.2f} processors when idle, beside the others")
    return servers


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The items, rotated by `by` places, so that each of them begins in turn."""
    by %= max(1, len(items))
    return [*items[by:], *items[:by]]


def seed_of(case: str, repetition: int) -> int:
    """The same for all systems; another in each repetition, so that no cache remembers a prompt."""
    return zlib.crc32(f"{case}#{repetition}".encode())
