"""How prompts share a step: short ones enter beside long ones, and a lone one loses nothing."""

from __future__ import annotations

from cases import each
from engine_kit.toy_engine import ToyRunner, expected, make_request, make_scheduler, run, step
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import Request, StepPlan, StepResult
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import SchedulingPolicy

BUDGET = 512
LONG = 100_000
TOKENS = list(range(LONG))


def product_scheduler(enough: float, **changes: object) -> Scheduler:
    """One of the sizes that engines have by default, with room for long prompts."""
    scheduler = Scheduler(BlockPool(40_000), 16, 64, BUDGET, 1024, **changes)  # type: ignore[arg-type]
    scheduler.enough_prompt_tokens = enough
    return scheduler


def advance(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    sampling = sum(share.samples for share in plan.scheduled)
    for made in scheduler.update(plan, StepResult([7] * sampling, None, None)):
        if made.request.finish_reason is not None:
            scheduler.finish(made.request, made.request.finish_reason)
    return plan


def steps_to_first_token(scheduler: Scheduler, request: Request) -> int:
    for count in range(1, 2000):
        advance(scheduler)
        if request.num_output_tokens:
            return count
    raise AssertionError("it has no token")


@each("enough", [256, BUDGET], ids=["cpu", "gpu"])
@each("num_long", [1, 3])
@each("policy", ["fcfs", "priority"])
def test_a_prompt_of_50_tokens_beside_long_ones_waits_at_most_3_steps(
    enough: int, num_long: int, policy: SchedulingPolicy
) -> None:
    scheduler = product_scheduler(enough, policy=policy)
    for number in range(num_long):
        scheduler.add(make_request(f"a{number}", TOKENS[number:], 4))
    for _ in range(5):
        advance(scheduler)
    short = make_request("b", TOKENS[-50:], 4)
    scheduler.add(short)
    assert steps_to_first_token(scheduler, short) <= 3
    before = short.num_output_tokens
    advance(scheduler)
    assert short.num_output_tokens == before + 1, "nor do its further tokens wait"


def test_a_lone_long_prompt_has_the_whole_of_every_step() -> None:
    scheduler = product_scheduler(256)
    scheduler.add(make_request("a", TOKENS[: 4 * BUDGET], 4))
    assert [advance(scheduler).num_tokens for _ in range(4)] == [BUDGET] * 4


def test_a_long_prompt_has_half_of_every_step_however_many_short_ones_come() -> None:
    scheduler = product_scheduler(256)
    long = make_request("a", TOKENS[: 20 * BUDGET], 1)
    scheduler.add(long)
    for number in range(400):
        scheduler.add(make_request(f"b{number}", TOKENS[number + 1 : number + 51], 1))
    for count in range(1, 20):
        assert advance(scheduler).num_tokens == BUDGET
        assert long.num_computed_tokens >= count * BUDGET // 2


def test_a_second_long_prompt_waits_for_the_first_one_and_then_has_its_turn() -> None:
    scheduler = product_scheduler(256)
    first, second = (make_request(n, TOKENS[: 5 * BUDGET + ord(n)], 1) for n in "xy")
    scheduler.add(first)
    scheduler.add(second)
    while not first.finished:
        advance(scheduler)
        assert second.num_computed_tokens <= BUDGET
        scheduler.add(make_request(f"s{scheduler.stats.steps}", [scheduler.stats.steps] * 9, 1))
    for _ in range(12):
        advance(scheduler)
    assert second.finished


def test_short_prompts_leave_a_long_one_the_blocks_that_it_lacks() -> None:
    scheduler, runner = make_scheduler(13), ToyRunner()
    long = make_request("long", [1] * 40, 4)
    scheduler.add(long)
    step(scheduler, runner)
    for name in "abc":
        scheduler.add(make_request(name, [2, 3, ord(name)], 4))
    shares = run(scheduler, runner)
    assert scheduler.stats.num_preemptions == 0
    assert long.token_ids == expected([1] * 40, 4)
    assert shares.index("b") > shares.index("a") + 1, "there were blocks for one of them only"


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, 20)), max_size=8),
    st.integers(12, 30),
    st.integers(1, 8),
    st.integers(0, 16),
    st.sampled_from([2, 5, 100]),
    st.sampled_from(["fcfs", "priority"]),
)
def test_shares_change_nothing_about_what_is_generated(
    work: list[tuple[int, int, int]],
    num_blocks: int,
    rows: int,
    extra: int,
    enough: int,
    policy: SchedulingPolicy,
) -> None:
    """Whatever comes when, with however little room, and of however many tenants."""
    scheduler = make_scheduler(
        num_blocks, max_num_seqs=rows, max_num_batched_tokens=rows + extra, policy=policy
    )
    scheduler.enough_prompt_tokens = enough
    runner = ToyRunner(rows)
    requests = []
    for index, (prompt, count, at) in enumerate(work):
        tokens = [(index * 7 + place) % 5 for place in range(prompt)]
        tenant, priority = "xyz"[index % 3], index % 2 if policy == "priority" else 0
        request = make_request(str(index), tokens, count, tenant=tenant, priority=priority)
        requests.append((at, request, expected(tokens, count)))
    for now in range(21):
        for at, request, _ in requests:
            if at == now:
                scheduler.add(request)
        step(scheduler, runner)
    run(scheduler, runner)
    for _, request, wanted in requests:
        assert request.token_ids == wanted
    assert scheduler.pool.num_free == num_blocks
    assert len(scheduler.tenants) == 0


def test_what_is_more_urgent_goes_first_however_much_its_tenant_was_served() -> None:
    scheduler = product_scheduler(BUDGET, policy="priority")
    long = make_request("a", TOKENS, 4, tenant="light", priority=5)
    scheduler.add(long)
    for _ in range(5):
        advance(scheduler)
    urgent = make_request("b", TOKENS[-50:], 4, tenant="heavy", priority=-10)
    scheduler.add(urgent)
    urgent.account.served = long.account.served + 90_000
    assert steps_to_first_token(scheduler, urgent) <= 3
