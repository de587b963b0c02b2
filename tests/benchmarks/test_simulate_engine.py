"""The simulator's engine decides what the product's scheduler decides, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.simulator.engine import EngineLimits, EngineModel, Sequence
from diptych.simulator.prefixes import Chain, PromptPart
from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import Request, StepResult
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import KVTransferParams, SamplingParams

BLOCK = 4


@dataclass(frozen=True)
class Ask:
    """A request, and in which step it comes."""

    step: int
    prompt: int
    output: int
    remote: bool = False
    load_steps: int = 0
    group: int = -1
    """Prompts of a group begin with the same two blocks."""
    path: tuple[int, ...] = ()
    """Prompts begin alike, block by block, as far as their paths do."""

    @property
    def chain(self) -> Chain:
        if self.group >= 0:
            return (PromptPart(self.group, 2 * BLOCK),)
        ends = range(1, min(len(self.path), self.prompt // BLOCK) + 1)
        keys = [int("".join(map(str, self.path[:end]))) for end in ends]
        return tuple(PromptPart(key, end * BLOCK) for key, end in zip(keys, ends, strict=True))


@dataclass
class Seen:
    """What an engine did: by step, tokens computed; by request, the step of its end."""

    tokens: list[int] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)


def by_scheduler(asks: list[Ask], limits: EngineLimits, *, caching: bool) -> Seen:
    """The product's scheduler, with a model that always samples token 7."""
    scheduler = Scheduler(
        BlockPool(limits.num_blocks), limits.block_size, limits.max_num_seqs,
        limits.max_num_batched_tokens, 1000, caching,
        enough_prompt_tokens=limits.enough_prompt_tokens,
    )  # fmt: skip
    seen = Seen()
    loads: dict[int, int] = {}
    for step in range(2000):
        for name, ask in enumerate(asks):
            if ask.step == step:
                scheduler.add(product_request(name, ask))
        for name in [n for n, due in loads.items() if due <= step]:
            del loads[name]
            assert scheduler.load_ended(str(name), ok=True) is None
        plan = scheduler.schedule()
        for order in scheduler.load_orders:
            loads[int(order.request_id)] = step + 1 + asks[int(order.request_id)].load_steps
        scheduler.load_orders.clear()
        seen.tokens.append(plan.num_tokens)
        sampling = [share.request for share in plan.scheduled if share.samples]
        outputs = scheduler.update(plan, StepResult([7] * len(sampling), None, None))
        for made in outputs:
            seen.first.setdefault(int(made.request.request_id), step)
            if made.request.finish_reason is not None:
                scheduler.finish(made.request, made.request.finish_reason)
                seen.ended[int(made.request.request_id)] = step
        if len(seen.ended) == len(asks):
            break
    assert scheduler.pool.num_free == limits.num_blocks
    return seen


def product_request(name: int, ask: Ask) -> Request:
    known = ask.prompt + ask.remote
    common = [10 + ask.group] * (2 * BLOCK) if ask.group >= 0 else []
    common += [100 + place for place in ask.path for _ in range(BLOCK)]
    tokens = [*common, *range(1000 + name * 500, 1000 + name * 500 + known)][:known]
    request = Request(
        str(name), b"", SamplingParams(ignore_eos=True), tokens, ask.prompt, None,
        known + ask.output, 0,
    )  # fmt: skip
    if ask.remote:
        request.kv_transfer = KVTransferParams(do_remote_prefill=True, remote_num_tokens=ask.prompt)
    return request


def owner_of(row: Sequence) -> int:
    """Which of the asked requests it is."""
    assert isinstance(row.owner, int)
    return row.owner


def by_model(asks: list[Ask], limits: EngineLimits) -> Seen:
    engine, seen = EngineModel(limits), Seen()
    loads: dict[int, tuple[int, Sequence]] = {}
    for step in range(2000):
        for name, ask in enumerate(asks):
            if ask.step == step:
                known = ask.prompt + ask.remote
                row = Sequence(known, ask.output, remote=ask.prompt * ask.remote, owner=name)
                row.chain = ask.chain
                engine.add(row)
        for name in [n for n, (due, _) in loads.items() if due <= step]:
            engine.received(loads.pop(name)[1])
        shape = engine.begin()
        for row in engine.loads:
            loads[owner_of(row)] = step + 1 + asks[owner_of(row)].load_steps, row
        engine.loads = []
        seen.tokens.append(shape.tokens if shape else 0)
        if shape is not None:
            result = engine.end()
            for row in result.sampled:
                seen.first.setdefault(owner_of(row), step)
            for row in result.finished:
                seen.ended[owner_of(row)] = step
        if len(seen.ended) == len(asks):
            break
    assert engine.free == limits.num_blocks
    assert (engine.rows, engine.context, sum(engine._due)) == (0, 0, 0)
    return seen


asks = st.builds(
    Ask,
    step=st.integers(0, 12),
    prompt=st.integers(1, 40),
    output=st.integers(1, 24),
    remote=st.booleans(),
    load_steps=st.integers(0, 3),
)
limits = st.builds(
    EngineLimits,
    num_blocks=st.integers(18, 60),  # one request always fits
    block_size=st.just(BLOCK),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 40),
    enough_prompt_tokens=st.one_of(st.just(math.inf), st.integers(1, 30)),
)


@settings(max_examples=150)
@given(st.lists(asks, min_size=1, max_size=8), limits)
def test_every_step_is_that_of_the_products_scheduler(
    wanted: list[Ask], given: EngineLimits
) -> None:
    real, modelled = by_scheduler(wanted, given, caching=False), by_model(wanted, given)
    assert modelled == real


paths = st.lists(st.integers(1, 2), max_size=6).map(tuple)
asks_with_paths = st.builds(
    Ask,
    step=st.integers(0, 12),
    prompt=st.integers(1, 40),
    output=st.integers(1, 24),
    remote=st.booleans(),
    load_steps=st.integers(0, 3),
    path=paths,
)


asks_of_groups = st.builds(
    Ask, st.integers(0, 12), st.integers(2 * BLOCK, 40), st.integers(1, 24), group=st.integers(0, 1)
)


@settings(max_examples=150)
@given(st.lists(asks_with_paths, min_size=2, max_size=8), limits)
def test_prompts_that_begin_alike_are_computed_as_by_the_product(
    wanted: list[Ask], given: EngineLimits
) -> None:
    """With room for all: which blocks are lost is the other tests' matter."""
    roomy = replace(given, num_blocks=400)
    assert by_model(wanted, roomy) == by_scheduler(wanted, roomy, caching=True)


@settings(max_examples=150)
@given(st.lists(st.one_of(asks_with_paths, asks_of_groups), min_size=2, max_size=8), limits)
def test_all_blocks_come_back_however_prompts_share_them(
    wanted: list[Ask], given: EngineLimits
) -> None:
    assert len(by_model(wanted, given).ended) == len(wanted)


def test_preemption_is_among_what_is_compared() -> None:
    wanted = [Ask(0, 8, 20), Ask(0, 8, 20), Ask(0, 8, 20)]
    tight = EngineLimits(14, BLOCK, 4, 32)
    engine = EngineModel(tight)
    for ask in wanted:
        engine.add(Sequence(ask.prompt, ask.output))
    while engine.begin():
        engine.end()
    assert engine.preemptions > 0
    assert by_model(wanted, tight) == by_scheduler(wanted, tight, caching=False)


@pytest.mark.parametrize("later", [1, 30])
def test_a_common_prefix_is_computed_once(later: int) -> None:
    """While somebody holds it, and when everybody has let go of it."""
    wanted = [Ask(0, 20, 6, group=0), Ask(later, 20, 6, group=0), Ask(later + 1, 17, 6, group=0)]
    roomy = EngineLimits(60, BLOCK, 4, 64)
    assert by_model(wanted, roomy) == by_scheduler(wanted, roomy, caching=True)
    assert sum(by_model(wanted, roomy).tokens) < sum(20 + 5 for _ in wanted)


def test_a_prefix_is_forgotten_when_its_blocks_are_needed() -> None:
    others = [Ask(30 + 10 * n, 30, 2) for n in range(4)]
    wanted = [Ask(0, 20, 6, group=0), *others, Ask(100, 20, 6, group=0)]
    tight = EngineLimits(18, BLOCK, 4, 64)
    modelled = by_model(wanted, tight)
    assert modelled == by_scheduler(wanted, tight, caching=True)
    assert modelled.tokens[100] == 20
