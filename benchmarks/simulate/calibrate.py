"""Measures what the simulator needs to know of this machine, with the real engine.

A process for each role runs an `EngineCore` with the threads that a laptop's service gives it, and
is asked for the time of one step after another. What two engines do to each other is measured by
letting the other one compute meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.servers import MODEL, diptych_pair, running
from benchmarks.simulate.calibration import Calibration
from benchmarks.simulate.fitting import fit
from benchmarks.simulate.service import PROBE_OUTPUT, PROBE_TOKENS, ServiceTimes, probe

from diptych.laptop.pods import DECODE_NICENESS
from diptych.simulator.costs import StepCost, StepShape
from diptych.simulator.engine import EngineLimits
from diptych.simulator.plan import Overheads

ANSWER_TIMEOUT_S = 120.0
HEAD_START_S = 0.05
"""Seconds to wait until a neighbour computes."""
KV_TOKEN_S = 45 * 1024 / 13e9
"""45 KiB of float32 KV at 13 GB/s, which results/handoff.md has for 16 blocks and more."""
CHUNKS = ((1, 0), (16, 0), (64, 0), (128, 0), (256, 0), (512, 0), (512, 512))
"""Chunks of a prompt: (tokens, tokens of the prompt before them)."""
DECODES = ((1, 64), (1, 768), (2, 256), (4, 256), (8, 256), (16, 64), (16, 512))
"""Decode rows: (rows, context of each)."""
MIXED = ((1, 256, 128), (8, 256, 56))
"""(rows, context of each, tokens of a prompt in the same step)."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of step."""

    rows: int = 0
    context: int = 0
    chunk: int = 0
    before: int = 0
    """Number of earlier tokens of the same prompt, whose KV is in the cache already."""

    @property
    def shape(self) -> StepShape:
        pairs = self.chunk * (self.before + (self.chunk + 1) / 2)
        sampled = self.rows + bool(self.chunk)
        return StepShape(self.rows + self.chunk, sampled, pairs, self.rows * (self.context + 1))


GRID = {
    "prefill": [Work(chunk=chunk, before=before) for chunk, before in CHUNKS],
    "decode": [Work(rows, context) for rows, context in DECODES],
}
GRID["decode"] += [Work(rows, context, chunk) for rows, context, chunk in MIXED]
GRID["decode"] += [Work(chunk=chunk) for chunk in (64, 128)]
KNOTS = {"prefill": (1, 16, 64, 128, 256, 512), "decode": (1, 2, 4, 8, 16, 64, 128)}
TYPICAL = {"prefill": Work(chunk=256), "decode": Work(8, 256)}


class Bench:
    """A real core in a process of its own that times single steps."""

    def __init__(self, threads: int, niceness: int = 0) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, threads, niceness), daemon=True
        )
        self._process.start()

    def limits(self) -> EngineLimits:
        """What the engine is configured to. Waits until it is up."""
        return self._ask(None)  # type: ignore[no-any-return]

    def seconds(self, work: Work) -> float:
        """Seconds that one such step takes."""
        return float(self._ask(work))

    @contextmanager
    def busy_with(self, work: Work) -> Iterator[None]:
        """Inside, such steps are run one after the other."""
        self._pipe.send(("repeat", work))
        try:
            yield
        finally:
            self._ask(None)

    def _ask(self, work: Work | None) -> Any:
        self._pipe.send(("once", work))
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection[Any, Any], threads: int, niceness: int) -> None:
    """The process's life: steps as asked, until nobody asks any more."""
    from benchmarks.simulate.one_step import Stepper  # torch is loaded here, and nowhere else

    os.setsid()  # as pods do: Linux may weigh sessions, not processes, against each other
    os.nice(niceness)
    with contextlib.suppress(OSError):  # a system without autogroups
        Path("/proc/self/autogroup").write_text(str(niceness))
    stepper = Stepper(MODEL, threads)
    try:
        while True:
            kind, work = pipe.recv()
            if kind == "repeat":
                while not pipe.poll():
                    stepper.seconds(work)
            else:
                pipe.send(stepper.limits if work is None else stepper.seconds(work))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        stepper.close()


@contextmanager
def benches() -> Iterator[dict[str, Bench]]:
    """One of each role, with the threads and the niceness that `diptych up` gives to one of each:
    all cores to prefill, half of them to decode, which gives way."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        started = {"prefill": Bench(cores), "decode": Bench(max(1, cores // 2), DECODE_NICENESS)}
        for bench in started.values():
            stack.callback(bench.close)
        for bench in started.values():
            bench.limits()
        yield started


@dataclass(slots=True)
class Round:
    """What was measured at about the same time."""

    seconds: dict[str, dict[Work, float]]
    """By role and kind of step."""
    slowdown: dict[str, float]
    service: ServiceTimes

    @classmethod
    def measure(cls, engines: dict[str, Bench], url: str, seed: int) -> Round:
        """With nobody else at work: steps of both roles one after the other, what these do to each
        other, and a service that is up at `url`."""
        seconds = {
            role: {work: bench.seconds(work) for work in GRID[role]}
            for role, bench in engines.items()
        }
        return cls(seconds, measure_slowdown(engines), asyncio.run(probe(url, seed)))


def measure_slowdown(engines: dict[str, Bench]) -> dict[str, float]:
    """How many times as long a typical step of each role takes while the other role computes."""
    slowdown = {}
    for role, other in itertools.permutations(engines, 2):
        step = TYPICAL[role]
        before = engines[role].seconds(step)
        with engines[other].busy_with(TYPICAL[other]):
            time.sleep(HEAD_START_S)
            beside = engines[role].seconds(step)
        slowdown[role] = max(1.0, 2 * beside / (before + engines[role].seconds(step)))
    return slowdown


def conclude(rounds: Sequence[Round], limits: EngineLimits) -> Calibration:
    """The model that fits the medians of what was measured in these rounds."""
    fits = {}
    for role, works in GRID.items():
        medians = [statistics.median(each.seconds[role][work] for each in rounds) for work in works]
        fits[role] = fit([work.shape for work in works], medians, KNOTS[role])
    slowdown = {role: statistics.median(each.slowdown[role] for each in rounds) for role in GRID}
    return Calibration(
        machine=machine(),
        prefill=fits["prefill"].cost,
        decode=fits["decode"].cost,
        slowdown=slowdown,
        overheads=_overheads(rounds, fits["prefill"].cost, fits["decode"].cost),
        limits=limits,
        one_machine=True,
        errors={role: list(found.errors) for role, found in fits.items()},
    )


def _overheads(rounds: Sequence[Round], prefill: StepCost, decode: StepCost) -> Overheads:
    """What the service takes beyond its steps, seen with one short request at a time."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(each.service, name) for each in rounds))

    prompt = prefill.seconds(Work(chunk=PROBE_TOKENS).shape)
    row = decode.seconds(Work(1, PROBE_TOKENS + PROBE_OUTPUT // 2).shape)
    step_s = max(0.0, median("gap_s") - row)
    return Overheads(
        request_s=max(0.0, median("ttft_s") - prompt - step_s),
        hand_off_s=max(0.0, median("first_gap_s") - row - step_s),
        kv_token_s=KV_TOKEN_S,
        step_s=step_s,
    )


def calibrate(rounds: int) -> Calibration:
    """Measure this machine from nothing."""
    with benches() as engines, running(diptych_pair()) as service:
        measured = [Round.measure(engines, service.url, seed) for seed in range(rounds)]
        return conclude(measured, engines["decode"].limits())
