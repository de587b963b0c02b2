"""One step of the real model runner, with whatever rows one likes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.servers import KV_GIB

from diptych.simulator.engine import EngineLimits
from diptych_engine.scheduling.request import Request, ScheduledRequest, StepPlan
from diptych_engine.serving.build_core import build_core
from diptych_protocol import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from benchmarks.simulate.calibrate import Work

REPEATS = 3
LONG_S = 0.1
"""A step is not repeated any more after this many seconds in all."""


class Stepper:
    """Runs steps without a scheduler. KV is whatever stands in the cache: what numbers it holds
    does not change how long a step takes."""

    def __init__(self, model: str, threads: int) -> None:
        config = EngineConfig(model=model, num_threads=threads, kv_cache_bytes=KV_GIB << 30)
        self._core = build_core(config)
        self._block_size = config.block_size
        self.limits = EngineLimits(
            self._core.description.num_blocks, config.block_size, config.max_num_seqs,
            config.max_num_batched_tokens, self._core.scheduler.enough_prompt_tokens,
        )  # fmt: skip
        self._names = itertools.count()

    def seconds(self, work: Work) -> float:
        """Seconds that such a step takes, as the median of a few runs. The decode rows are known
        from the step before; the prompt, if there is one, is new."""
        blocks = itertools.count()
        rows = [self._request(work.context, 1, blocks) for _ in range(work.rows)]
        decodes = [ScheduledRequest(row, work.context, 1, samples=True) for row in rows]
        gone: list[str] = []
        if decodes:
            self._core.runner.launch(StepPlan(decodes, len(decodes), gone))()
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < LONG_S:
            shares, tokens = list(decodes), len(decodes) + work.chunk
            if work.chunk:
                prompt = self._request(work.before + work.chunk, 0, blocks)
                shares.append(ScheduledRequest(prompt, work.before, work.chunk, samples=True))
            started = time.perf_counter()
            self._core.runner.launch(StepPlan(shares, tokens, gone))()
            times.append(time.perf_counter() - started)
            gone = [share.request.request_id for share in shares[len(decodes) :]]
            blocks = itertools.count(sum(len(row.block_ids) for row in rows))
        gone += [row.request_id for row in rows]
        self._core.runner.launch(StepPlan([], 0, gone))()
        return statistics.median(times)

    def _request(self, prompt: int, generated: int, blocks: Iterator[int]) -> Request:
        """A request with all its tokens known, and blocks for them. Generated tokens are computed
        with other weights than tokens of a prompt."""
        tokens = prompt + generated
        count = -(-tokens // self._block_size)
        return Request(
            f"step-{next(self._names)}", b"", SamplingParams(temperature=0, ignore_eos=True),
            [token % 997 + 3 for token in range(tokens)], prompt, None, tokens + 1, 0,
            block_ids=list(itertools.islice(blocks, count)),
        )  # fmt: skip

    def close(self) -> None:
        self._core.close()
