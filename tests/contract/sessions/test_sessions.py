"""What the core does with a prompt that comes in pieces, step by step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_kit.block_checks import check_blocks
from engine_kit.toy_engine import (
    BLOCK,
    ToyRunner,
    expected,
    make_request,
    make_scheduler,
    next_token,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.scheduling.request import Request, RequestStatus
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_engine.scheduling.sessions import check_piece, go_on
from diptych_protocol import (
    EngineCoreRequest,
    EngineDescription,
    FinishReason,
    InvalidRequestError,
    PoolingParams,
    SamplingParams,
)

LIMITS = EngineDescription(
    engine_id="e", epoch="1", model="m", max_model_len=64, vocab_size=256, block_size=BLOCK,
    num_blocks=16, dtype="float32", compat={}, max_num_seqs=8, pid=1,
)  # fmt: skip


def message(prompt: list[int] | None, max_tokens: int = 1, **changes: Any) -> EngineCoreRequest:
    made = EngineCoreRequest(
        "session", prompt, None, SamplingParams(max_tokens=max_tokens), None, None, 0.0,
        None, None, None, resumable=prompt is not None,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def open_session(
    scheduler: Scheduler, prompt: list[int], name: str = "session", n: int = 1
) -> Request:
    session = make_request(name, prompt, n, resumable=True)
    scheduler.add(session)
    return session


def steps(scheduler: Scheduler, runner: ToyRunner) -> None:
    """As `run`, but sessions wait for their next piece, as in the engine core."""
    for _ in range(500):
        if not scheduler.has_work:
            return
        plan = scheduler.schedule()
        for made in scheduler.update(plan, runner.execute(plan)):
            request = made.request
            if request.finish_reason is not None and request.resumable:
                scheduler.suspend(request)
            elif request.finish_reason is not None:
                scheduler.finish(request, request.finish_reason)
        check_blocks(scheduler.pool)
    pytest.fail("not finished")


pieces_of = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=2, max_size=5)


@settings(max_examples=100)
@given(pieces_of, st.booleans(), st.booleans())
def test_contract_B09_a_session_of_pieces_is_the_one_shot_prompt(
    pieces: list[list[int]], cache: bool, disturbed: bool
) -> None:
    scheduler = make_scheduler(32, enable_prefix_caching=cache, max_num_batched_tokens=16)
    runner = ToyRunner()
    session = open_session(scheduler, pieces[0])
    steps(scheduler, runner)
    for piece in pieces[1:]:
        assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        if disturbed:  # somebody took its blocks meanwhile
            scheduler.preempt_all()
        assert go_on(scheduler, session, message(piece), b"", LIMITS) is None
        steps(scheduler, runner)
    prompt = [token for piece in pieces for token in piece]
    assert session.token_ids == [*prompt, next_token(prompt)]
    assert session.num_prompt_tokens == len(prompt)
    last = go_on(scheduler, session, message(None), b"", LIMITS)
    assert last is not None
    assert last.finish_reason is FinishReason.STOP
    assert scheduler.pool.num_free == 32
    assert not scheduler.requests


def test_contract_B09_kv_is_kept_between_pieces_and_only_the_new_tokens_are_computed() -> None:
    scheduler, runner = make_scheduler(16, enable_prefix_caching=False), ToyRunner()
    session = open_session(scheduler, list(range(7)), n=3)
    steps(scheduler, runner)
    kept = session.token_ids[:-1]  # all but the token sampled last
    assert runner.computed == len(kept) == 9
    assert scheduler.pool.num_free == 13
    assert "session" in runner.rows, "it keeps its row"
    go_on(scheduler, session, message([1, 2], max_tokens=2), b"", LIMITS)
    steps(scheduler, runner)
    assert runner.computed == 9 + 2 + 1
    assert session.token_ids == expected([*kept, 1, 2], 2)


def test_contract_B09_idle_sessions_give_way_the_longest_idle_first() -> None:
    scheduler = make_scheduler(8, enable_prefix_caching=False)
    runner = ToyRunner()
    old, new = open_session(scheduler, [1] * 8, "old"), open_session(scheduler, [2] * 8, "new")
    steps(scheduler, runner)
    assert scheduler.snapshot().num_waiting_for_input == 2
    assert scheduler.pool.num_free == 4
    scheduler.add(make_request("third", [3] * 16, 3))  # five blocks
    steps(scheduler, runner)
    assert not old.block_ids
    assert len(new.block_ids) == 2
    assert scheduler.stats.num_preemptions == 1
    go_on(scheduler, old, message([4]), b"", LIMITS)
    steps(scheduler, runner)
    assert old.token_ids == expected([*[1] * 8, 4], 1)


def test_contract_B09_idle_sessions_hold_rows_and_give_them_back() -> None:
    scheduler, runner = make_scheduler(32, max_num_seqs=2), ToyRunner(num_rows=2)
    sessions = [open_session(scheduler, [i] * 4, str(i)) for i in range(2)]
    steps(scheduler, runner)
    requests = [make_request(f"r{i}", [i] * 5, 4) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    steps(scheduler, runner)
    for i, request in enumerate(requests):
        assert request.token_ids == expected([i] * 5, 4)
    for session in sessions:
        go_on(scheduler, session, message([9]), b"", LIMITS)
    steps(scheduler, runner)
    assert [session.num_tokens for session in sessions] == [6, 6]


def test_contract_B09_a_running_request_gets_the_blocks_of_an_idle_session() -> None:
    scheduler, runner = make_scheduler(4, enable_prefix_caching=False), ToyRunner()
    session = open_session(scheduler, [1] * 4)
    steps(scheduler, runner)
    other = make_request("other", [2] * 4, 12)
    scheduler.add(other)
    steps(scheduler, runner)
    assert other.token_ids == expected([2] * 4, 12)
    assert not session.block_ids


def test_contract_B09_one_idle_session_too_many_names_the_one_to_end() -> None:
    scheduler, runner = make_scheduler(32, max_idle_sessions=2), ToyRunner()
    sessions = [open_session(scheduler, [i] * 4, str(i)) for i in range(3)]
    steps(scheduler, runner)
    assert len(scheduler.idle) == 3  # nobody ended one: that is the core's part
    scheduler.running.append(late := open_late(scheduler))
    assert scheduler.suspend(late) is sessions[0]


def open_late(scheduler: Scheduler) -> Request:
    late = make_request("late", [1], 1, resumable=True)
    late.become(RequestStatus.RUNNING)
    scheduler.requests["late"] = late
    return late


def test_contract_B09_the_end_of_a_prompt_that_is_being_answered_ends_with_the_answer() -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    session = open_session(scheduler, [1] * 4, n=3)
    assert go_on(scheduler, session, message(None), b"", LIMITS) is None
    run(scheduler, runner)
    assert session.finish_reason is FinishReason.LENGTH
    assert scheduler.pool.num_free == 16


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt_token_ids": []}, "token ids"),
        ({"prompt_token_ids": [256]}, "0..255"),
        ({"prompt_token_ids": [1] * 63}, "leave no room"),
        ({"sampling_params": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"generated_token_ids": [1]}, "generated_token_ids"),
    ],
)
def test_contract_B09_a_bad_piece_ends_the_session_and_frees_its_blocks(
    changes: dict[str, Any], word: str
) -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    session = open_session(scheduler, [1] * 4)
    steps(scheduler, runner)
    last = go_on(scheduler, session, message([1], **changes), b"", LIMITS)
    assert last is not None
    assert last.finish_reason is FinishReason.ERROR
    assert word in (last.error or "")
    assert scheduler.pool.num_free == 16


def test_contract_B09_a_piece_before_the_answer_to_the_last_ends_the_session() -> None:
    scheduler = make_scheduler(16)
    session = open_session(scheduler, [1] * 4)
    scheduler.schedule()
    last = go_on(scheduler, session, message([1]), b"", LIMITS)
    assert last is not None
    assert "before the one ahead" in (last.error or "")
    assert scheduler.pool.num_free == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling_params": PoolingParams()},
        {"generated_token_ids": [1]},
        {"sampling_params": SamplingParams(prompt_logprobs=1)},
        {"sampling_params": SamplingParams(extra_args={"kv_transfer_params": {}})},
    ],
)
def test_contract_B09_the_core_refuses_what_no_session_can_do(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        check_piece(message([1], **changes), LIMITS)


def test_contract_B09_a_piece_that_comes_during_a_pause_waits_for_its_end() -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    session = open_session(scheduler, [1] * 4)
    steps(scheduler, runner)
    scheduler.gate.close("wait", scheduler.waiting)
    go_on(scheduler, session, message([2]), b"", LIMITS)
    assert not scheduler.has_work
    scheduler.preempt_all()  # as a sleep does
    scheduler.pool.forget_all()
    runner.slots.clear()
    scheduler.gate.open(scheduler.waiting)
    steps(scheduler, runner)
    assert session.token_ids == expected([1, 1, 1, 1, 2], 1)
