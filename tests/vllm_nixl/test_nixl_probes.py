"""What vLLM's NixlConnector does with references that are not good, and when peers or clients fail.

These tests demand nothing: they record what was seen with real servers. The table, with what our
router does about each row, is in benchmarks/results/vllm_nixl.md. A test that fails after an
upgrade of vLLM or NIXL says that a row of the table is no longer true.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port
from model_kit.sensitive_model import ANSWER_TOKENS, Question, questions
from vllm_kit.environment import START_S, needs_nixl
from vllm_nixl import NOBODY, Counters, NixlEngine, Pair
from vllm_server import MODEL, VllmServer, save_model_for_vllm
from waits import wait_until

pytestmark = [*needs_nixl, pytest.mark.slow, pytest.mark.timeout(2 * START_S + 600)]
LEASE_S = 15
"""On a busy machine, the first hand-over between two engines may take longer than 12 s."""
SMALL = ("--num-gpu-blocks-override", "64")
"""So few blocks that P soon takes freed ones again."""
P = NixlEngine("kv_producer", LEASE_S, "prefill-engine", SMALL)
D = NixlEngine("kv_consumer", LEASE_S)
NOTHING = Counters()
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_for_vllm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fresh(model: str) -> Iterator[Question]:
    """Questions of 200 tokens, seven blocks, that end in the same token; each is asked in one test
    only, so that no prefix cache has it."""
    return iter(questions(model, 80, shortest=199, longest=199))


@pytest.fixture(scope="module")
def side_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def pair(model: str, side_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("logs")
    started = Pair(P.start(model, logs / "p", side_port), D.start(model, logs / "d"))
    try:
        started.p.wait_until_ready()
        started.d.wait_until_ready()
        warm_up(started)
        yield started
    finally:
        started.p.kill()
        started.d.kill()


def warm_up(pair: Pair) -> None:
    """The engines' hand-shake, and vLLM's first steps, which are slow."""
    for _ in range(2):
        params = pair.p.prefill(NOBODY)
        pair.d.answer(NOBODY, ANSWER_TOKENS, kv_transfer_params=params)


def handed_over(pair: Pair, question: Question) -> list[int] | None:
    params = pair.p.prefill(question.prompt)
    return pair.d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params)


def used_again(pair: Pair, fresh: Iterator[Question]) -> None:
    """P computes other prompts in all blocks that it had freed."""
    for _ in range(12):
        pair.p.answer(next(fresh).prompt, 1)


def refused(engine: VllmServer, params: dict[str, Any]) -> httpx.Response:
    """A request that parses and is refused, which has vLLM's front-end tell P."""
    return engine.post([1], 1, model="no-such", kv_transfer_params=params)


# --- references that are not good ---------------------------------------------------------------


def test_nixl_answers_a_good_reference_with_the_right_text(
    pair: Pair, fresh: Iterator[Question]
) -> None:
    question = next(fresh)
    with pair.counts(Counters(transfers=1)):
        assert handed_over(pair, question) == question.answer
        wait_until(pair.p.holds_nothing)


def test_nixl_answers_a_consumed_reference_with_the_text_of_the_prompt_that_it_was_for(
    pair: Pair, fresh: Iterator[Question]
) -> None:
    """And the wrong KV stays in D's prefix cache, for whoever asks the same next."""
    first, second = next(fresh), next(fresh)
    with pair.counts(Counters(transfers=2, after_expiry=1)):
        params = pair.p.prefill(first.prompt)
        once = pair.d.answer(first.prompt, ANSWER_TOKENS, kv_transfer_params=params)
        twice = pair.d.answer(second.prompt, ANSWER_TOKENS, kv_transfer_params=params)
        later = pair.d.answer(second.prompt, ANSWER_TOKENS)
    assert once == first.answer
    assert twice == first.answer
    assert later is not None
    assert later != second.answer


def test_nixl_answers_a_reference_of_another_prompt_with_that_prompts_text(
    pair: Pair, fresh: Iterator[Question]
) -> None:
    """No counter shows it."""
    victim, other = next(fresh), next(fresh)
    with pair.counts(Counters(transfers=1)):
        params = pair.p.prefill(victim.prompt)
        answer = pair.d.answer(other.prompt, ANSWER_TOKENS, kv_transfer_params=params)
    assert answer == victim.answer


def test_nixl_answers_a_forged_reference_to_a_victims_blocks_with_the_victims_text(
    pair: Pair, fresh: Iterator[Question]
) -> None:
    victim, forger = next(fresh), next(fresh)
    with pair.counts(Counters(transfers=2, after_expiry=1)):
        params = pair.p.prefill(victim.prompt)
        forged = params | {"remote_request_id": "invented"}
        answer = pair.d.answer(forger.prompt, ANSWER_TOKENS, kv_transfer_params=forged)
        assert answer == victim.answer
        right = pair.d.answer(victim.prompt, ANSWER_TOKENS, kv_transfer_params=params)
        assert right == victim.answer


def test_nixl_ends_a_reference_to_blocks_that_do_not_exist_with_status_500(
    pair: Pair, fresh: Iterator[Question], record_property: Record
) -> None:
    """And D's front-end tells P, because the route is that of completions."""
    question = next(fresh)
    with pair.counts(Counters(failed=1)):
        params = pair.p.prefill(question.prompt)
        forged = params | {"remote_block_ids": [[10**6 + i for i in range(7)]]}
        assert pair.d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=forged) is None
        record_property("s until free", pair.seconds_until(pair.p.holds_nothing))
    assert pair.d.answer(question.prompt, ANSWER_TOKENS) == question.answer


def test_a_read_that_fails_behind_generate_frees_nothing(
    pair: Pair, fresh: Iterator[Question], record_property: Record
) -> None:
    question = next(fresh)
    with pair.counts(Counters(failed=1, expired=1)):
        params = pair.p.prefill(question.prompt)
        forged = params | {"remote_block_ids": [[10**6 + i for i in range(7)]]}
        answer = pair.generate(question.prompt, 1, kv_transfer_params=forged)
        assert answer.status_code == 500
        record_property("s until free", pair.seconds_until(pair.p.holds_nothing))


def test_nixl_answers_a_stale_reference_with_wrong_text(
    pair: Pair, fresh: Iterator[Question]
) -> None:
    question = next(fresh)
    with pair.counts(Counters(transfers=1, expired=1, after_expiry=1)):
        params = pair.p.prefill(question.prompt)
        wait_until(pair.p.holds_nothing, "the lease ends")
        used_again(pair, fresh)
        answer = pair.d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params)
    assert answer is not None
    assert answer != question.answer


def test_nixl_answers_with_wrong_text_when_the_lease_ends_while_d_stands_still(
    pair: Pair, fresh: Iterator[Question]
) -> None:
    """D's leg began in time."""
    question = next(fresh)
    with (
        pair.counts(Counters(transfers=1, expired=1, after_expiry=1)),
        ThreadPoolExecutor(1) as one,
    ):
        params = pair.p.prefill(question.prompt)
        pair.d.signal(signal.SIGSTOP)
        try:
            asked = one.submit(
                pair.d.answer, question.prompt, ANSWER_TOKENS, kv_transfer_params=params
            )
            wait_until(pair.p.holds_nothing, "the lease ends")
            used_again(pair, fresh)
        finally:
            pair.d.signal(signal.SIGCONT)
        answer = asked.result()
    assert answer is not None
    assert answer != question.answer


def test_nixl_counts_a_late_read_only_when_p_next_computes(
    pair: Pair, fresh: Iterator[Question]
) -> None:
    question = next(fresh)
    name = "vllm:nixl_num_notifications_after_expiry_total"
    params = pair.p.prefill(question.prompt)
    wait_until(pair.p.holds_nothing, "the lease ends")
    before = pair.p.metric(name)
    pair.d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params)
    pair.d.answer(question.prompt, 200)
    assert pair.p.metric(name) == before
    pair.counters()
    wait_until(lambda: pair.p.metric(name) == before + 1)


# --- requests that are refused, and clients that go ----------------------------------------------


def test_a_refusal_of_completions_at_d_frees_p(
    pair: Pair, fresh: Iterator[Question], record_property: Record
) -> None:
    with pair.counts(NOTHING):
        params = pair.p.prefill(next(fresh).prompt)
        assert not pair.p.holds_nothing()
        assert refused(pair.d, params).status_code == 404
        record_property("s until free", pair.seconds_until(pair.p.holds_nothing))


def test_a_refusal_of_completions_at_p_frees_nothing(
    pair: Pair, fresh: Iterator[Question], record_property: Record
) -> None:
    with pair.counts(Counters(expired=1)):
        params = pair.p.prefill(next(fresh).prompt)
        assert refused(pair.p, params).status_code == 404
        record_property("s until free", pair.seconds_until(pair.p.holds_nothing))


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"model": "no-such"}, 404), ({"token_ids": [9] * 1100}, 400)],
    ids=["unknown model", "too long"],
)
def test_a_refusal_of_generate_frees_nothing(
    pair: Pair, fresh: Iterator[Question], fields: dict[str, Any], status: int,
    record_property: Record,
) -> None:  # fmt: skip
    with pair.counts(Counters(expired=1)):
        params = pair.p.prefill(next(fresh).prompt)
        answer = pair.generate(next(fresh).prompt, 1, kv_transfer_params=params, **fields)
        assert answer.status_code == status
        record_property("s until free", pair.seconds_until(pair.p.holds_nothing))


def send(engine: VllmServer, prompt: list[int], max_tokens: int, **fields: Any) -> socket.socket:
    """A streamed request, on a connection of its own."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    request = engine.client.build_request(
        "POST", "/v1/completions", json={**body, "stream": True, **fields}
    )
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection = socket.create_connection(("127.0.0.1", engine.port))
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.read())
    return connection


def test_a_client_that_goes_between_the_legs_costs_the_whole_lease(
    pair: Pair, fresh: Iterator[Question], record_property: Record
) -> None:
    with pair.counts(Counters(expired=1)):
        pair.p.prefill(next(fresh).prompt)
        record_property("s until free", pair.seconds_until(pair.p.holds_nothing))


def test_a_client_that_goes_while_p_computes_frees_p(
    pair: Pair, fresh: Iterator[Question], record_property: Record
) -> None:
    with pair.counts(NOTHING):
        params = {"do_remote_decode": True}
        with send(pair.p, next(fresh).prompt, 800, kv_transfer_params=params) as connection:
            assert b"data:" in connection.recv(4096) or b"data:" in connection.recv(4096)
        record_property("s until free", pair.seconds_until(pair.p.holds_nothing))


@pytest.mark.parametrize("after", [b"", b"data:"], ids=["at once", "after its first token"])
def test_a_client_that_goes_in_ds_leg_frees_both(
    pair: Pair, fresh: Iterator[Question], after: bytes, record_property: Record
) -> None:
    question = next(fresh)
    params = pair.p.prefill(question.prompt)
    with send(pair.d, question.prompt, 800, kv_transfer_params=params) as connection:
        heard = b""
        while after not in heard:
            heard += connection.recv(4096)
    record_property("s until P is free", pair.seconds_until(pair.p.holds_nothing))
    record_property("more s until D is free", pair.seconds_until(pair.d.holds_nothing))
    assert pair.d.answer(question.prompt, ANSWER_TOKENS) == question.answer


# --- a prefill engine that stands still, dies, and comes again -----------------------------------


def test_d_waits_without_end_for_a_p_that_stands_still_and_keeps_the_blocks_of_a_client_that_went(
    pair: Pair, fresh: Iterator[Question], record_property: Record
) -> None:
    """P goes on behind the end of the lease, and finds that end or D's notification first."""
    question = next(fresh)
    late = Counters(transfers=1, expired=1, after_expiry=1)
    with pair.counts(late, Counters(transfers=1)):
        params = pair.p.prefill(question.prompt)
        pair.p.signal(signal.SIGSTOP)
        try:
            with send(pair.d, question.prompt, 1, kv_transfer_params=params) as connection:
                connection.settimeout(2 * LEASE_S)
                head = connection.recv(4096)
                with pytest.raises(TimeoutError):
                    connection.recv(4096)
                assert b"data:" not in head
            held = pair.d.metric("vllm:kv_cache_usage_perc")
            assert held > 0
            other = next(fresh)
            assert pair.d.answer(other.prompt, ANSWER_TOKENS) == other.answer
            assert pair.d.metric("vllm:kv_cache_usage_perc") == held
        finally:
            pair.p.signal(signal.SIGCONT)
        record_property("s until D is free", pair.seconds_until(pair.d.holds_nothing))
        wait_until(pair.p.holds_nothing)


def started_again(pair: Pair, engine: NixlEngine, model: str, log: Path, side_port: int) -> None:
    """P is killed, and another one starts in its place."""
    pair.p.kill()
    pair.p = engine.start(model, log, side_port)
    pair.p.wait_until_ready()


def test_a_p_that_was_started_again_under_its_name_never_hands_over_to_the_same_d_again(
    pair: Pair, fresh: Iterator[Question], model: str, side_port: int, tmp_path: Path,
) -> None:  # fmt: skip
    """D keeps the dead connection of that name. What it does not read stays with P for the lease,
    and of such leases any number may end meanwhile."""
    started_again(pair, P, model, tmp_path / "p", side_port)
    failed = [Counters(failed=2, failed_notifications=1, expired=ended) for ended in range(5)]
    for _ in range(4):
        with pair.counts(*failed):
            assert handed_over(pair, next(fresh)) is None
    question = next(fresh)
    assert pair.d.answer(question.prompt, ANSWER_TOKENS) == question.answer


def test_a_p_that_was_started_again_under_another_name_hands_over_and_old_references_are_errors(
    pair: Pair, fresh: Iterator[Question], model: str, side_port: int, tmp_path: Path,
) -> None:  # fmt: skip
    question, new = next(fresh), next(fresh)
    params = pair.p.prefill(question.prompt)
    started_again(pair, NixlEngine("kv_producer", LEASE_S), model, tmp_path / "p", side_port)
    assert pair.d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params) is None
    assert handed_over(pair, new) == new.answer
