"""Runs as many schedules as asked, on all cores, and says what they reached.

    python tests/simulation/explore.py --count 100000
    python tests/simulation/explore.py --seed 1234        # one schedule again, with its trace

Exits with 1 if a schedule broke a property (its seed is printed), or if a kind of fault never
happened in a run that was long enough for all of them.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1] / "support"))
from sim_schedule import run_schedule
from sim_table import missing, table

CHUNK = 100
"""Schedules that a process runs at a time."""
MAX_FAILURES = 10
ENOUGH_FOR_ALL = 100_000
"""A run of so many schedules must have reached all that there is a name for."""


@dataclass(slots=True)
class Report:
    """What some schedules reached."""

    schedules: int = 0
    events: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    states: set[int] = field(default_factory=set)
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what was wrong)"""

    def add(self, other: Report) -> None:
        self.schedules += other.schedules
        self.events += other.events
        self.seen += other.seen
        self.states |= other.states
        self.failures += other.failures


def run_many(seeds: range) -> Report:
    """Run schedules one after the other."""
    report = Report()
    for seed in seeds:
        try:
            world = run_schedule(seed)
        except Exception as exc:
            place = traceback.extract_tb(exc.__traceback__)[-1]
            what = f"{type(exc).__name__} in {place.name}: {exc}"
            report.failures.append((seed, what[:300]))
        else:
            report.events += world.clock.events
            report.seen += world.seen
            report.states |= world.states
        report.schedules += 1
    return report


def explore(first: int, count: int, processes: int) -> Report:
    """Run `count` schedules from a seed on."""
    chunks = [
        range(start, min(start + CHUNK, first + count))
        for start in range(first, first + count, CHUNK)
    ]
    total = Report()
    with tqdm(total=count, unit=" schedules", smoothing=0.05) as progress:
        for report in _reports(chunks, processes):
            total.add(report)
            for seed, what in report.failures:
                progress.write(f"FAILED seed {seed}: {what}\n    make simulate SEED={seed}")
            progress.update(report.schedules)
            progress.set_postfix(states=len(total.states), failures=len(total.failures))
            if len(total.failures) >= MAX_FAILURES:
                break
    return total


def _reports(chunks: list[range], processes: int) -> Iterator[Report]:
    if processes == 1:
        yield from map(run_many, chunks)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_be_quiet) as pool:
        yield from pool.imap_unordered(run_many, chunks)


def _be_quiet() -> None:
    logging.disable(logging.CRITICAL)


def replay(seed: int) -> int:
    """Run one schedule and print what happens."""
    logging.basicConfig(format="          log: %(message)s", stream=sys.stdout, level=logging.INFO)
    try:
        run_schedule(seed, print)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    print("nothing is wrong")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=100_000, help="schedules to run")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seed", type=int, help="run only this one, with its trace")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.seed is not None:
        return replay(args.seed)
    _be_quiet()
    began = time.monotonic()
    report = explore(args.first, args.count, args.processes)
    seconds = time.monotonic() - began
    print("\n".join(table(report.seen)))
    print(
        f"{report.schedules} schedules in {seconds:.0f} s ({report.schedules / seconds:.0f}/s), "
        f"{report.events} events, {len(report.states)} distinct states"
    )
    for seed, what in report.failures:
        print(f"FAILED seed {seed}: {what}\n    make simulate SEED={seed}")
    never = missing(report.seen) if args.count >= ENOUGH_FOR_ALL else []
    if never:
        print(f"never happened: {', '.join(never)}")
    return 1 if report.failures or never else 0


if __name__ == "__main__":
    sys.exit(main())
