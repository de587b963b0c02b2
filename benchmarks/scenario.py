"""What a scenario is, and the runner that lets systems take turns."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from benchmarks.figures import Record
from benchmarks.load import Load, drive
from benchmarks.servers import NotStartedError, Running, System, running
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WARM_UP = (Load(1, 16, 8, requests=2), Load(4, 128, 8))
BUSY_WHEN_IDLE = 0.05


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
    """Only those that begin so."""
    logarithmic: bool = True
    """Of both axes."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    about: str
    """What is done, in a few sentences under the title."""
    columns: tuple[Column, ...]
    run: Callable[[Options, Reporter], list[Record]]
    versus: tuple[str, ...] = ()
    """Figures of which the table of ratios tells."""
    first_is_baseline: bool = False
    """Ratios are the others' over the first system's, not its over theirs."""
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
        """One of the total."""
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


Measure = Callable[[Running, Load, int], Coroutine[None, None, dict[str, float]]]
"""Of a running system, under a load, with a seed."""


async def plain(server: Running, load: Load, seed: int) -> dict[str, float]:
    """The load alone."""
    return await drive(server.url, server.system.model, load, seed)


def compare(
    systems: Sequence[System],
    loads: dict[str, Load],
    options: Options,
    reporter: Reporter,
    *,
    once: frozenset[str] = frozenset(),
    measure: Measure = plain,
) -> list[Record]:
    """All systems stay up, and take turns in each case and repetition; who begins changes.

    once: cases that take too long for more.
    A peer that does not start is left out with a note; `systems[0]`, ours, must.
    """
    chosen = {case: load for case, load in loads.items() if options.wants(case)}
    times = {case: 1 if case in once else options.times for case in chosen}
    records: list[Record] = []
    with ExitStack() as stack:
        servers = _start(stack, systems, reporter)
        with reporter.counting("measuring", sum(times.values()) * len(servers)):
            for case, load in chosen.items():
                for repetition in range(times[case]):
                    seed = seed_of(case, repetition)
                    for server in rotated(servers, repetition):
                        figures = asyncio.run(measure(server, load, seed))
                        record = Record(case, server.system.name, repetition, figures)
                        records.append(record)
                        reporter.done(record, ("ttft_ms", "tpot_ms", "tokens_per_s"))
    return records


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


def rotated(servers: Sequence[Running], by: int) -> list[Running]:
    """Each begins in its turn, so that none has always the same neighbour."""
    by %= len(servers)
    return [*servers[by:], *servers[:by]]


def seed_of(case: str, repetition: int) -> int:
    """The same for all systems; another in each repetition, so that no cache remembers a prompt."""
    return zlib.crc32(f"{case}#{repetition}".encode())
