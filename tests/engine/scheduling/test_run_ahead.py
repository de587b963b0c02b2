"""Steps are launched before the results of those before them are known, where nothing depends on
those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_kit.block_checks import check_blocks
from engine_kit.core import core_request, make_core, run, tokens
from engine_kit.toy_engine import BLOCK, ToyRunner, make_request, make_scheduler, step

from diptych_engine.control.core import EngineCore
from diptych_engine.scheduling.request import Pending, StepPlan, StepResult
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import EngineConfig, InvalidRequestError, KVTransferParams

PROMPT = [1, 2, 3]
FETCHING = KVTransferParams(do_remote_prefill=True, remote_num_tokens=3)


def decoding(num_blocks: int = 16, *, steps: int = 1, **options: int) -> Scheduler:
    """Two requests have got so many tokens; the next plan holds one more for each."""
    scheduler, runner = make_scheduler(num_blocks, **options), ToyRunner()
    for name in "ab":
        scheduler.add(make_request(name, [*PROMPT, ord(name)], 9))
    for _ in range(steps):
        step(scheduler, runner)
    return scheduler


def ahead_of(scheduler: Scheduler) -> list[tuple[str, int, int]] | None:
    """Shares of the step after the next."""
    plan = scheduler.plan_ahead(scheduler.schedule())
    if plan is None:
        return None
    assert plan.ahead
    assert not plan.removed
    assert all(share.samples for share in plan.scheduled)
    return [(share.request.request_id, share.start, share.num_tokens) for share in plan.scheduled]


def test_every_request_is_taken_to_go_on_and_has_room_for_it() -> None:
    scheduler = decoding()
    assert ahead_of(scheduler) == [("a", 5, 1), ("b", 5, 1)]
    assert [len(request.block_ids) * BLOCK for request in scheduler.running] == [8, 8]
    assert [request.num_tokens for request in scheduler.running] == [5, 5]


def test_a_request_that_will_have_its_last_token_is_left_out() -> None:
    scheduler = decoding()
    scheduler.running[0].max_total_tokens = 6
    assert ahead_of(scheduler) == [("b", 5, 1)]


def test_a_step_that_completes_prompts_may_be_followed() -> None:
    scheduler = make_scheduler(16)
    scheduler.add(make_request("a", PROMPT, 9))
    assert ahead_of(scheduler) == [("a", 3, 1)]


def wait_for_room(scheduler: Scheduler) -> None:
    scheduler.add(make_request("c", PROMPT, 9))


def wait_for_kv(scheduler: Scheduler) -> None:
    scheduler.add(make_request("c", PROMPT, 9, kv_transfer=FETCHING))


def freeze(scheduler: Scheduler) -> None:
    scheduler.pause("keep")


def no_news(scheduler: Scheduler) -> None:
    """Nothing happens."""


@pytest.mark.parametrize(
    ("options", "happens", "runs_ahead"),
    [
        pytest.param({}, no_news, True, id="nothing in the way"),
        pytest.param(
            {"max_num_seqs": 2}, wait_for_room, True, id="a request waits, all rows are taken"
        ),
        pytest.param({"max_num_seqs": 3}, wait_for_room, False, id="a request may get a row"),
        pytest.param({"max_num_seqs": 2}, wait_for_kv, False, id="a request needs no row yet"),
        pytest.param({}, freeze, False, id="a pause"),
        pytest.param({"num_blocks": 4, "max_num_seqs": 2}, no_news, True, id="just enough blocks"),
    ],
)
def test_it_is_planned_only_when_nothing_else_could_be(
    options: dict[str, Any], happens: Callable[[Scheduler], None], *, runs_ahead: bool
) -> None:
    scheduler = decoding(**options)
    plan = scheduler.schedule()
    happens(scheduler)
    assert (scheduler.plan_ahead(plan) is not None) == runs_ahead


def test_it_is_not_planned_while_a_prompt_has_tokens_left() -> None:
    scheduler = decoding(max_num_seqs=3)
    scheduler.add(make_request("long", list(range(20)), 9))
    plan = scheduler.schedule()
    assert len(plan.scheduled) == 3
    assert scheduler.plan_ahead(plan) is None


def test_it_takes_no_blocks_from_others() -> None:
    scheduler = decoding(num_blocks=5, steps=4)
    plan = scheduler.schedule()  # the eighth tokens; the ninth need a block each, and one is free
    assert scheduler.pool.num_free == 1
    assert scheduler.plan_ahead(plan) is None
    assert scheduler.stats.num_preemptions == 0
    check_blocks(scheduler.pool)


REQUESTS = [
    core_request("greedy", [1, 2, 3], max_tokens=12, ignore_eos=True),
    core_request("short", [4, 5], max_tokens=3, ignore_eos=True),
    core_request("random", [6, 7, 8, 9], max_tokens=14, temperature=1.0, top_p=0.9, seed=3),
    core_request("filtered", [9, 9], max_tokens=10, temperature=0.7, top_k=5, min_p=0.01, seed=4),
]


def launches(core: EngineCore) -> list[StepPlan]:
    """The plans that the core's runner gets from now on."""
    plans: list[StepPlan] = []
    launch = core.runner.launch

    def note(plan: StepPlan) -> Pending:
        plans.append(plan)
        return launch(plan)

    core.runner.launch = note  # type: ignore[method-assign]
    return plans


def test_answers_are_those_of_steps_one_after_the_other() -> None:
    plain, ahead = make_core(), make_core(async_scheduling=True)
    plans = launches(ahead)
    expected, made = run(plain, *REQUESTS), run(ahead, *REQUESTS)
    assert {name: tokens(outputs) for name, outputs in made.items()} == {
        name: tokens(outputs) for name, outputs in expected.items()
    }
    assert sum(plan.ahead for plan in plans) >= 10
    assert ahead.scheduler.stats.tokens_generated == plain.scheduler.stats.tokens_generated
    assert not ahead.has_work
    check_blocks(ahead.scheduler.pool)


def test_the_next_step_is_launched_before_a_step_is_waited_for() -> None:
    core = make_core(async_scheduling=True)
    plans = launches(core)
    core.add(REQUESTS[0], b"")
    for launched in (2, 3, 4):
        started = core.start_step()
        assert [plan.ahead for plan in plans] == [False] + [True] * (launched - 1)
        core.finish_step(*started)


@pytest.mark.parametrize(("ahead", "launched"), [(False, 1), (True, 2)])
def test_a_call_finds_the_device_at_rest(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool, launched: int
) -> None:
    """It may free blocks and have others write to them, which a step under way still does."""
    core = make_core(async_scheduling=ahead)
    launch, under_way = core.runner.launch, list[StepPlan]()

    def slow(plan: StepPlan) -> Pending:
        pending = launch(plan)
        under_way.append(plan)

        def wait() -> StepResult:
            while plan in under_way:  # a device computes in the order of launches
                under_way.pop(0)
            return pending()

        return wait

    monkeypatch.setattr(core.runner, "launch", slow)
    core.add(REQUESTS[0], b"")
    started = core.start_step()
    assert len(under_way) == launched
    core.call("stats", [])
    assert not under_way
    core.finish_step(*started)


@pytest.mark.parametrize("option", [{"logprobs": 1}, {"frequency_penalty": 1.0}], ids=str)
def test_what_the_host_must_know_is_waited_for(option: dict[str, Any]) -> None:
    core = make_core(async_scheduling=True)
    plans = launches(core)
    special = core_request("special", [1, 2], max_tokens=4, ignore_eos=True, **option)
    expected = run(make_core(), special)
    assert tokens(run(core, special)["special"]) == tokens(expected["special"])
    assert not any(plan.ahead for plan in plans)


def test_an_aborted_request_leaves_nothing_behind() -> None:
    core = make_core(async_scheduling=True)
    for request in REQUESTS[::2]:
        core.add(request, b"")
    core.finish_step(*core.start_step())
    core.abort(["greedy"])
    core.take_outputs()
    made = []
    while core.has_work:
        core.finish_step(*core.start_step())
        made += core.take_outputs().get(b"", [])
    assert {output.request_id for output in made} == {"random"}
    assert core.scheduler.pool.num_free == core.description.num_blocks
    check_blocks(core.scheduler.pool)


@pytest.mark.parametrize("fields", [{"tensor_parallel_size": 2}, {"data_parallel_lockstep": True}])
def test_ranks_that_step_together_do_not_run_ahead(fields: dict[str, Any]) -> None:
    assert not EngineConfig("m", **fields).runs_ahead(on_gpu=True)
    with pytest.raises(InvalidRequestError, match="async_scheduling"):
        EngineConfig("m", async_scheduling=True, **fields).check()


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_a_gpu_runs_ahead_unless_told_otherwise(*, wanted: bool | None, on_gpu: bool) -> None:
    expected = on_gpu if wanted is None else wanted
    assert EngineConfig("m", async_scheduling=wanted).runs_ahead(on_gpu=on_gpu) == expected
