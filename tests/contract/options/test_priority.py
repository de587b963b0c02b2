"""Who goes first, and who gives way."""

from __future__ import annotations

import math

import pytest
from engine_kit.toy_engine import ToyRunner, expected, make_request, make_scheduler, run, step
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.scheduling.request import Request
from diptych_engine.scheduling.waiting_queue import make_queue, turn
from diptych_engine.serving.build_core import build_core
from diptych_frontend.fair_share import FairShare
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineConfig,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    SchedulingPolicy,
)

arrivals = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(0, 3).map(float)), min_size=1, max_size=12
)


def requests_of(arrived: list[tuple[int, float]]) -> list[Request]:
    return [
        make_request(f"{i:02}", [1], 1, priority=priority, arrival_time=time)
        for i, (priority, time) in enumerate(arrived)
    ]


@given(arrivals)
def test_contract_B08_admission_is_by_priority_then_arrival_then_id(
    arrived: list[tuple[int, float]],
) -> None:
    scheduler = make_scheduler(64, max_num_seqs=1, policy="priority")
    requests = requests_of(arrived)
    for request in requests:
        scheduler.add(request)
    order = run(scheduler, ToyRunner())
    assert order == [r.request_id for r in sorted(requests, key=turn)]


@given(arrivals)
def test_contract_B08_fcfs_serves_in_the_order_of_arrival_here(
    arrived: list[tuple[int, float]],
) -> None:
    scheduler = make_scheduler(64, max_num_seqs=1)
    for request in requests_of(arrived):
        scheduler.add(request)
    order = run(scheduler, ToyRunner())
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("policy", "victim"),
    [
        ("priority", "least"),  # the largest (priority, arrival) of all, wherever it stands
        ("fcfs", "last"),  # whoever was admitted last
    ],
)
def test_contract_B08_the_victim_of_a_preemption(policy: SchedulingPolicy, victim: str) -> None:
    scheduler, runner = make_scheduler(6, max_num_batched_tokens=32, policy=policy), ToyRunner()
    urgent = make_request("urgent", [1] * 4, 9, priority=0, arrival_time=3.0)
    least = make_request("least", [2] * 4, 9, priority=9, arrival_time=1.0)
    last = make_request("last", [3] * 4, 9, priority=0, arrival_time=4.0)
    for request in (urgent, least, last):  # `least` comes to run before `last`
        scheduler.add(request)
        step(scheduler, runner)
    for _ in range(12):
        if not scheduler.stats.num_preemptions:
            step(scheduler, runner)
    assert [r.request_id for r in scheduler.waiting] == [victim]
    run(scheduler, runner)
    for request in (urgent, least, last):
        assert request.token_ids == expected(request.token_ids[:4], 9)


@settings(max_examples=100)
@given(arrivals, st.integers(3, 8), st.integers(1, 4))
def test_contract_B08_any_priorities_finish_with_the_tokens_they_would_have_alone(
    arrived: list[tuple[int, float]], num_blocks: int, seqs: int
) -> None:
    scheduler = make_scheduler(num_blocks, max_num_seqs=seqs, policy="priority")
    runner, requests = ToyRunner(), []
    for i, (priority, time) in enumerate(arrived):
        request = make_request(str(i), [i] * 5, 6, priority=priority, arrival_time=time)
        requests.append(request)
        scheduler.add(request)
        step(scheduler, runner)
        assert sorted(scheduler.running, key=turn) == scheduler.running
    run(scheduler, runner)
    for i, request in enumerate(requests):
        assert request.token_ids == expected([i] * 5, 6)
    assert scheduler.pool.num_free == num_blocks


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_contract_B08_a_request_leaves_the_queue_once(policy: SchedulingPolicy) -> None:
    queue = make_queue(policy, FairShare(0.0))
    a, b = requests_of([(0, 0.0), (0, 0.0)])
    queue.push(a)
    queue.push(b)
    queue.remove(a)
    assert list(queue) == list(reversed(queue)) == [b]
    with pytest.raises(ValueError, match=r"."):
        queue.remove(a)
    assert queue.peek() is b
    queue.remove(b)
    with pytest.raises(IndexError):
        queue.peek()


def test_contract_B08_a_time_that_cannot_be_ordered_is_refused() -> None:
    message = EngineCoreRequest(
        "r", [1], None, SamplingParams(), None, None, math.nan, None, None, None
    )
    core = build_core(EngineConfig("dummy://?num_hidden_layers=1&hidden_size=16", num_blocks=4))
    core.add(message, b"client")
    ((output,),) = core.take_outputs().values()
    assert output.finish_reason is FinishReason.ERROR
    assert "arrival_time" in (output.error or "")


@pytest.fixture(scope="module")
def renderer() -> TextRenderer:
    return TextRenderer(resolve_model("dummy://?num_hidden_layers=1&hidden_size=16"))


@pytest.mark.parametrize(
    ("policy", "priority", "served"),
    [("fcfs", 0, True), ("fcfs", 1, False), ("fcfs", -1, False), ("priority", 5, True)],
)
def test_contract_Q19_a_priority_needs_the_policy(
    renderer: TextRenderer, policy: SchedulingPolicy, priority: int, served: bool
) -> None:
    inputs = InputProcessor(renderer, max_model_len=64, vocab_size=512, scheduling_policy=policy)
    if served:
        request = inputs.process("r", [1], SamplingParams(), priority=priority)
        assert request.priority == priority
        return
    with pytest.raises(InvalidRequestError, match="scheduling_policy") as refused:
        inputs.process("r", [1], SamplingParams(), priority=priority)
    assert refused.value.param == "priority"


def test_contract_Q19_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        EngineConfig("dummy://", scheduling_policy="lottery").check()  # type: ignore[arg-type]


def test_contract_B08_an_aborted_request_leaves_any_queue() -> None:
    for policy in ("fcfs", "priority"):
        scheduler = make_scheduler(8, policy=policy)
        request = make_request("r", [1], 1)
        scheduler.add(request)
        scheduler.finish(request, FinishReason.ABORT)
        assert not scheduler.has_work
