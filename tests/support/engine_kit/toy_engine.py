"""A scheduler with a model that is a pure function of the tokens whose KV it is shown.

It keeps, for every block slot, the token written there, and derives the next token from all of
them in order. A wrong block table, a stale slot or a lost position therefore changes the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_kit.block_checks import check_blocks

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import Request, StepPlan, StepResult
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import SamplingParams

BLOCK = 4


def next_token(tokens: list[int]) -> int:
    return hashlib.blake2b(bytes(t % 256 for t in tokens), digest_size=1).digest()[0]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """The prompt and what a greedy request makes of it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class ToyRunner:
    """Writes tokens into block slots and reads them back through the block table."""

    num_rows: int = 8
    model: Callable[[list[int]], int] = next_token
    slots: dict[int, int] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    """The requests that hold one, as the model runner keeps them."""
    computed: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.rows.difference_update(plan.removed)
        sampled = []
        for share in plan.scheduled:
            request = share.request
            self.rows.add(request.request_id)
            for position in range(share.start, share.start + share.num_tokens):
                known = request.token_ids[position] if share.guess is None else share.guess
                self.slots[self.slot(request, position)] = known
                self.computed += 1
            if share.samples:
                end = share.start + share.num_tokens
                sampled.append(self.model([self.slots[self.slot(request, p)] for p in range(end)]))
        assert len(self.rows) <= self.num_rows, "more requests hold rows than there are"
        return StepResult(sampled, None, None)

    @staticmethod
    def slot(request: Request, position: int) -> int:
        return request.block_ids[position // BLOCK] * BLOCK + position % BLOCK


def make_request(name: str, prompt: list[int], max_tokens: int, **kwargs: object) -> Request:
    return Request(
        request_id=name,
        client=b"",
        params=SamplingParams(max_tokens=max_tokens, temperature=0),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        eos_token_id=None,
        max_total_tokens=len(prompt) + max_tokens,
        seed=0,
        **kwargs,  # type: ignore[arg-type]
    )


def make_scheduler(num_blocks: int, **changes: object) -> Scheduler:
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "max_num_waiting": 100,
        **changes,
    }
    return Scheduler(BlockPool(num_blocks), BLOCK, **settings)  # type: ignore[arg-type]


def step(scheduler: Scheduler, runner: ToyRunner) -> list[str]:
    """One step, as the engine core makes it. Returns the requests that had a share."""
    plan = scheduler.schedule()
    assert plan.num_tokens <= scheduler.max_num_batched_tokens
    for made in scheduler.update(plan, runner.execute(plan)):
        if made.request.finish_reason is not None:
            scheduler.finish(made.request, made.request.finish_reason)
    check_blocks(scheduler.pool)
    return [share.request.request_id for share in plan.scheduled]


def run(scheduler: Scheduler, runner: ToyRunner, max_steps: int = 2000) -> list[str]:
    """Steps until there is nothing to do. Returns the shares of all of them, in order."""
    shares: list[str] = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return shares
        shares += step(scheduler, runner)
    raise AssertionError(f"not finished after {max_steps} steps")
