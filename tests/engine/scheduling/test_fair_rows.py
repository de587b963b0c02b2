"""No tenant holds all rows or all blocks while another wants some, and none is starved."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from engine_kit.toy_engine import ToyRunner, expected, make_request, make_scheduler, run, step
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import Request, StepResult
from diptych_engine.scheduling.scheduler import CREDIT_STEPS, Scheduler
from diptych_frontend.fair_share import OUTPUT_WEIGHT
from diptych_protocol import FinishReason

PROMPT = [1, 2, 3, 4, 5]


def ask(scheduler: Scheduler, tenant: str, number: int, max_tokens: int, **how: int) -> Request:
    made = make_request(f"{tenant}{number}", [*PROMPT, number], max_tokens, tenant=tenant, **how)
    scheduler.add(made)
    return made


def rows(scheduler: Scheduler) -> Counter[str]:
    return Counter(request.tenant for request in scheduler.running)


def greedy(num_blocks: int = 400, **changes: object) -> tuple[Scheduler, ToyRunner]:
    """100 answers of one tenant, as n=100 asks for: all rows are taken for long."""
    scheduler = make_scheduler(num_blocks, max_num_batched_tokens=32, **changes)
    runner = ToyRunner(scheduler.max_num_seqs)
    for number in range(100):
        ask(scheduler, "g", number, 60)
    for _ in range(10):
        step(scheduler, runner)
    assert len(scheduler.running) == scheduler.max_num_seqs
    return scheduler, runner


def test_another_s_4_tokens_do_not_wait_for_100_answers() -> None:
    scheduler, runner = greedy()
    other = ask(scheduler, "o", 1, 4)
    for _ in range(4):
        step(scheduler, runner)
    assert other.finished
    assert scheduler.stats.num_preemptions == 1
    run(scheduler, runner)
    assert scheduler.stats.num_preemptions == 1, "who gave way has come back, and that is all"


def test_rows_are_shared_and_then_nothing_goes_to_and_fro() -> None:
    scheduler, runner = greedy()
    others = [ask(scheduler, "o", number, 40) for number in range(50)]
    for _ in range(20):
        step(scheduler, runner)
    assert rows(scheduler) == {"g": 6, "o": 2}
    assert scheduler.stats.num_preemptions == 2
    run(scheduler, runner)
    assert scheduler.stats.num_preemptions <= 15, "one for ten requests: rows come as others end"
    assert all(request.token_ids == expected([*PROMPT, n], 40) for n, request in enumerate(others))


def test_blocks_are_shared_as_rows_are() -> None:
    """The rows would do, but all memory is one tenant's."""
    scheduler, runner = make_scheduler(24), ToyRunner()
    for number in range(3):
        scheduler.add(make_request(f"g{number}", [number] * 26, 9, tenant="g"))
    while len(scheduler.running) < 3 or scheduler.pool.num_free > 1:
        step(scheduler, runner)
    assert scheduler.stats.num_preemptions == 0
    other = ask(scheduler, "o", 1, 4)
    step(scheduler, runner)
    assert (scheduler.stats.num_preemptions, other.num_output_tokens) == (1, 1)
    run(scheduler, runner)


def test_a_request_above_its_tenant_s_part_takes_nobody_s_blocks() -> None:
    scheduler, runner = make_scheduler(24, max_num_batched_tokens=32), ToyRunner()
    for number in range(3):
        scheduler.add(make_request(f"g{number}", [number] * 22, 9, tenant="g"))
    for _ in range(3):
        step(scheduler, runner)
    scheduler.add(make_request("o", [7] * 60, 4, tenant="o"))
    run(scheduler, runner)
    assert scheduler.stats.num_preemptions == 0


def test_what_is_more_urgent_gives_no_way() -> None:
    scheduler = make_scheduler(400, policy="priority")
    runner = ToyRunner()
    for number in range(20):
        ask(scheduler, "g", number, 20, priority=-1)
    for _ in range(12):
        step(scheduler, runner)
    other = ask(scheduler, "o", 1, 4)
    urgent = ask(scheduler, "o", 2, 4, priority=-1)
    for _ in range(5):
        step(scheduler, runner)
    assert urgent.finished
    assert other.num_output_tokens == 0
    assert scheduler.stats.num_preemptions == 1


def test_one_tenant_s_rows_are_nobody_else_s_affair() -> None:
    """Without API keys all requests are of one tenant: nobody gives way, as ever."""
    scheduler, runner = greedy()
    for number in range(20):
        ask(scheduler, "g", 100 + number, 4)
    for _ in range(20):
        step(scheduler, runner)
    assert scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("cache", [True, False])
def test_what_is_computed_again_is_charged_once(cache: bool) -> None:
    scheduler = make_scheduler(8, enable_prefix_caching=cache)
    runner = ToyRunner()
    made = [ask(scheduler, "g", number, 12) for number in range(3)]
    account = made[0].account
    run(scheduler, runner)
    assert scheduler.stats.num_preemptions > 0
    cached = sum(request.num_cached_tokens or 0 for request in made) if cache else 0
    prompts = 3 * (len(PROMPT) + 1)
    assert account.served <= prompts + OUTPUT_WEIGHT * 36
    assert account.served >= prompts - cached + OUTPUT_WEIGHT * 36
    assert len(scheduler.tenants) == 0


def test_an_aborted_request_costs_what_it_was_served() -> None:
    scheduler, runner = make_scheduler(40), ToyRunner()
    request = ask(scheduler, "g", 1, 12)
    account = request.account
    for _ in range(4):
        step(scheduler, runner)
    scheduler.finish(request, FinishReason.ABORT)
    assert account.served == len(PROMPT) + 1 + OUTPUT_WEIGHT * 4
    assert account.num_open == 0


class TestQueue:
    """`max_num_waiting` is for all, and one tenant's requests do not shut others out."""

    def full(self) -> Scheduler:
        scheduler = make_scheduler(40, max_num_waiting=10)
        for number in range(10):
            ask(scheduler, "g", number, 4)
        return scheduler

    def test_the_newest_of_who_has_most_makes_room(self) -> None:
        scheduler = self.full()
        assert not scheduler.can_add("g")
        refused = []
        for number in range(20):
            if not scheduler.can_add("o"):
                break
            ask(scheduler, "o", number, 4)
            surplus = scheduler.surplus()
            assert surplus is not None
            scheduler.finish(surplus, FinishReason.ERROR)
            refused.append(surplus.request_id)
            assert scheduler.num_waiting == 10
        assert refused == ["g9", "g8", "g7", "g6", "g5"]
        assert not scheduler.can_add("g"), "as many are the other's"
        assert scheduler.can_add("third")

    def test_nobody_is_refused_while_there_is_room(self) -> None:
        scheduler = make_scheduler(40, max_num_waiting=10)
        ask(scheduler, "g", 1, 4)
        assert scheduler.can_add("g")
        assert scheduler.surplus() is None

    def test_who_was_told_something_already_stays(self) -> None:
        scheduler, runner = make_scheduler(40, max_num_waiting=2, max_num_seqs=2), ToyRunner(2)
        running = [ask(scheduler, "g", number, 9) for number in range(2)]
        for _ in range(2):
            step(scheduler, runner)
        scheduler.preempt_all()
        ask(scheduler, "o", 1, 4)
        assert scheduler.surplus() is None
        run(scheduler, runner)
        assert all(request.finish_reason is FinishReason.LENGTH for request in running)


@dataclass
class Crowd:
    """Tenants who ask again and again, each with so many requests open."""

    scheduler: Scheduler
    kinds: dict[str, tuple[int, int, int]]
    """Tenant -> requests open at a time, tokens of a prompt, tokens of an answer."""
    made: Counter[str] = field(default_factory=Counter)

    def refill(self) -> None:
        for tenant, (count, prompt, output) in self.kinds.items():
            while self.scheduler.tenants.num_open(tenant) < count:
                self.made[tenant] += 1
                number = self.made[tenant]
                tokens = [ord(tenant), *divmod(number, 200), *([number % 7] * (prompt - 3))]
                name = f"{tenant}{number}"
                self.scheduler.add(make_request(name, tokens, output, tenant=tenant))


def advance(scheduler: Scheduler) -> None:
    """A step of a model that always samples 7: what matters is who is served."""
    plan = scheduler.schedule()
    sampling = sum(share.samples for share in plan.scheduled)
    for made in scheduler.update(plan, StepResult([7] * sampling, None, None)):
        if made.request.finish_reason is not None:
            scheduler.finish(made.request, made.request.finish_reason)


kind = st.tuples(st.integers(9, 30), st.integers(3, 30), st.integers(1, 12))


@settings(max_examples=30)
@given(st.lists(kind, min_size=2, max_size=4), st.sampled_from([4, 8]), st.sampled_from([6, 100]))
def test_service_of_those_who_always_wait_differs_by_a_bounded_amount(
    kinds: list[tuple[int, int, int]], num_rows: int, enough: int
) -> None:
    """The bound of the paper: twice what is greater, a prompt or all that fits in a batch; and the
    credit. It does not grow with time."""
    budget = 16
    scheduler = make_scheduler(
        400, max_num_seqs=num_rows, max_num_batched_tokens=budget, enable_prefix_caching=False
    )
    scheduler.enough_prompt_tokens = enough
    crowd = Crowd(scheduler, dict(zip("abcd", kinds, strict=False)))
    accounts = [scheduler.tenants.open(tenant) for tenant in crowd.kinds]
    longest = max(prompt for _, prompt, _ in kinds)
    batch = OUTPUT_WEIGHT * num_rows * max(output for _, _, output in kinds)
    bound = 2 * max(longest, batch) + CREDIT_STEPS * budget
    for _ in range(300):
        crowd.refill()
        advance(scheduler)
        served = [account.served for account in accounts]
        assert max(served) - min(served) <= bound
    assert min(served) > 100, "nobody starves"


@settings(max_examples=30)
@given(st.integers(3, 40), st.integers(1, 12), st.integers(1, 8), st.booleans())
def test_who_asks_now_and_then_has_a_first_token_soon(
    prompt: int, output: int, num_rows: int, cache: bool
) -> None:
    """However many requests of another's wait: in the steps that the prompt takes alone, of four
    tokens each, and those until a row is free, where there is only one."""
    scheduler = make_scheduler(
        400, max_num_seqs=num_rows, max_num_batched_tokens=num_rows + 15,
        enable_prefix_caching=cache, max_num_waiting=1000,
    )  # fmt: skip
    scheduler.enough_prompt_tokens = 8
    crowd = Crowd(scheduler, {"g": (60, prompt, output)})
    alone, until_a_row = 20 // 4 + 1, 0 if num_rows > 1 else output + 3 + prompt // 4
    for now in range(1, 121):
        crowd.refill()
        advance(scheduler)
        if now % 30:
            continue
        asked = make_request(f"o{now}", [now] * 20, 2, tenant="o")
        scheduler.add(asked)
        for _ in range(alone + until_a_row):
            crowd.refill()
            advance(scheduler)
        assert asked.num_output_tokens


@pytest.mark.parametrize("length", [128, 200, 512, 1024])
def test_1000_requests_of_another_add_at_most_half_to_the_first_token(length: int) -> None:
    """In virtual time, on a prefill engine on CPUs, where every token of a prompt takes as long.
    Who asks comes while a step runs: there always is one."""
    scheduler = Scheduler(BlockPool(4000), 16, 64, 512, 2000)
    scheduler.enough_prompt_tokens = 256
    for number in range(1000):
        tokens = [number] * 200
        scheduler.add(make_request(f"g{number}", tokens, 1, tenant="greedy"))
    random, clock = Random(length), 0.0
    delays: list[float] = []
    due, asked = 3000.0, None
    while len(delays) < 30:
        before = clock
        plan = scheduler.schedule()
        clock += plan.num_tokens + STEP_COST
        sampling = sum(share.samples for share in plan.scheduled)
        for made in scheduler.update(plan, StepResult([7] * sampling, None, None)):
            scheduler.finish(made.request, FinishReason.LENGTH)
            if made.request is asked:
                delays.append(clock - due)
                asked, due = None, clock + random.uniform(1500, 4500)
        if asked is None and due <= clock:
            due = max(due, before)
            asked = make_request(f"o{due}", [random.randrange(9) for _ in range(length)], 1)
            asked.tenant = "other"
            scheduler.add(asked)
    assert scheduler.num_waiting > 100, "else it was alone"
    alone = length + STEP_COST * -(-length // 128)
    assert statistics.mean(delays) <= 1.5 * alone + STEP_COST


STEP_COST = 4.0
"""What a step takes besides its tokens, in tokens of a prompt."""
