"""Two real vLLM servers, one prefill and one decode, over our connector."""

from __future__ import annotations

import functools
import json
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from model_kit.sensitive_model import ANSWER_TOKENS, HIDDEN, Question, questions
from vllm_kit.environment import START_S, needs_vllm
from vllm_server import MODEL, VllmServer, connector_config, save_model_for_vllm
from waits import Deadline, wait_until

pytestmark = [*needs_vllm, pytest.mark.timeout(1200)]
SETTINGS = {"lease_seconds": 60, "load_timeout_s": 60}
"""Long enough for a busy machine, and shorter than a wait of the tests."""
BLOCK = 32
CHUNK = 3 * BLOCK
CHUNKS = ("--max-num-batched-tokens", str(CHUNK))
"""A prompt of 600 tokens is computed in seven steps."""
BLOCK_BYTES = 2 * 2 * BLOCK * HIDDEN * 4
"""Keys and values of two layers."""
REMEMBERED = 2 * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_for_vllm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(model: str) -> list[Question]:
    """Prompts of one to twenty blocks, with the answers that our own engine gives."""
    return questions(model, 200, shortest=24, longest=600)


@pytest.fixture(scope="module")
def servers(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("logs")
    started = [
        VllmServer(model, folder / name, connector_config(**SETTINGS), *CHUNKS)
        for name in ("p", "d")
    ]
    try:
        for server in started:
            server.wait_until_ready()
        yield started
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def p(servers: list[VllmServer]) -> VllmServer:
    return servers[0]


@pytest.fixture
def d(servers: list[VllmServer]) -> VllmServer:
    return servers[1]


def handed_over(p: VllmServer, d: VllmServer, question: Question) -> list[int] | None:
    """The tokens of an answer whose prompt P computes."""
    return d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=p.prefill(question.prompt))


def test_one_prefill_and_one_decode_answer_as_one_engine_does(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    """Some prompts twice: the second time both engines have a part of it in their prefix caches."""
    before = d.metric("vllm:external_prefix_cache_hits_total")
    order = [*asked, *asked[:40]]
    with ThreadPoolExecutor(4) as users:
        answers = list(users.map(lambda question: handed_over(p, d, question), order))
    assert answers == [question.answer for question in order]
    fetched = d.metric("vllm:external_prefix_cache_hits_total") - before
    assert fetched >= sum(len(question.prompt) for question in asked)
    wait_until(p.holds_nothing)
    wait_until(d.holds_nothing)


def test_vllm_s_metrics_have_what_was_moved_and_what_was_refused(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    question, salt = asked[0], {"cache_salt": "nobody has this prompt"}
    before = {server: server.figures() for server in (p, d)}
    _, params = p.begin(question.prompt, **salt)
    assert d.answer(question.prompt, 1, kv_transfer_params=params, **salt) is not None
    num_blocks = -(-len(question.prompt) // BLOCK)
    assert d.figures()["blocks_received"] - before[d]["blocks_received"] == num_blocks
    assert d.answer(question.prompt, 1, kv_transfer_params=params, **salt) is None

    moved = {"blocks": num_blocks, "bytes": num_blocks * BLOCK_BYTES}
    sent = {f"{what}_sent": number for what, number in moved.items()}
    received = {f"{what}_received": number for what, number in moved.items()}
    expected = {
        p: {"leases_granted": 1, "leases_released": 1, **sent},
        d: {"loads_completed": 1, "references_refused": 1, **received},
    }
    for server, grown in expected.items():
        wait_until(functools.partial(_has_grown, server, before[server], grown), str(grown))


def _has_grown(server: VllmServer, before: dict[str, float], grown: dict[str, int]) -> bool:
    now = server.figures()
    return now == {name: total + grown.get(name, 0) for name, total in before.items()}


def test_a_reference_serves_one_answer_of_several(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    params = p.prefill(asked[0].prompt)
    response = d.post(asked[0].prompt, 4, n=2, temperature=1.0, kv_transfer_params=params)
    assert response.status_code == 500
    assert "the reference was used here before; prefill again" in d.log
    wait_until(d.holds_nothing)
    wait_until(p.holds_nothing)


@pytest.fixture(scope="module")
def at_borders(model: str) -> list[Question]:
    """Prompts that end right before, at and right behind the end of a block."""
    return [
        questions(model, 1, shortest=length - 1, longest=length - 1, seed=length)[0]
        for length in (BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1)
    ]


@pytest.mark.parametrize("remembers", [False, True], ids=["nothing", "two blocks"])
def test_p_s_token_goes_on_at_d(
    p: VllmServer, d: VllmServer, at_borders: list[Question], remembers: bool
) -> None:
    """D gets the prompt and P's token, with the reference of the prompt, of which it remembers
    nothing or two blocks. Then it is asked alone, with the KV of both in its prefix cache."""
    fields: dict[str, Any] = {"cache_salt": f"remembers {remembers}"}
    for question in at_borders:
        num_tokens = len(question.prompt)
        if remembers:
            d.answer([*question.prompt[:REMEMBERED], 9], 1, **fields)
        fetched = d.metric("vllm:external_prefix_cache_hits_total")
        first, params = p.begin(question.prompt, **fields)
        prompt = question.prompt + first
        rest = d.answer(prompt, ANSWER_TOKENS - 1, kv_transfer_params=params, **fields)
        assert first + (rest or []) == question.answer
        here = min(num_tokens // BLOCK * BLOCK, REMEMBERED) if remembers else 0
        fetched = d.metric("vllm:external_prefix_cache_hits_total") - fetched
        assert fetched == num_tokens - here

        remembered = d.metric("vllm:prefix_cache_hits_total")
        for known in (0, 1, ANSWER_TOKENS - 1):
            prompt = question.prompt + question.answer[:known]
            assert d.answer(prompt, ANSWER_TOKENS - known, **fields) == question.answer[known:]
        remembered = d.metric("vllm:prefix_cache_hits_total") - remembered
        assert remembered >= (num_tokens - 1) // BLOCK * BLOCK
    wait_until(p.holds_nothing)
    wait_until(d.holds_nothing)


def test_a_reference_of_a_longer_prompt_or_another_beginning_is_an_error(
    p: VllmServer, d: VllmServer, at_borders: list[Question]
) -> None:
    question = at_borders[-1]
    for prompt in (question.prompt[:-1], [9, *question.prompt[1:], 9]):
        assert d.answer(prompt, 1, kv_transfer_params=p.prefill(question.prompt)) is None


@pytest.mark.slow
def test_a_configuration_that_was_not_tested_ends_the_start_with_a_sentence(
    model: str, tmp_path: Path
) -> None:
    transfer = connector_config() | {"kv_load_failure_policy": "recompute"}
    server = VllmServer(model, tmp_path / "refused", transfer)
    try:
        wait_until(lambda: server.process.poll() is not None, "the server ends", START_S)
    finally:
        server.kill()
    assert server.process.returncode != 0
    sentence = "kv_load_failure_policy is 'recompute', and only 'fail' was tested"
    assert f"the Diptych connector: {sentence}" in server.log


@pytest.mark.slow
def test_engines_that_guess_from_the_prompt_hand_over_and_answer_as_others(
    model: str, asked: list[Question], at_borders: list[Question], tmp_path: Path
) -> None:
    """vLLM's own guesses, nearly all wrong: their slots lie behind the blocks that are fetched."""
    guesses = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
    guesses["prompt_lookup_max"] = 3
    arguments = (*CHUNKS, "--speculative-config", json.dumps(guesses))
    pair = [
        VllmServer(model, tmp_path / name, connector_config(**SETTINGS), *arguments)
        for name in ("p", "d")
    ]
    try:
        for server in pair:
            server.wait_until_ready()
        p, d = pair
        order = [*at_borders, *asked[:40]]
        with ThreadPoolExecutor(4) as users:
            answers = list(users.map(lambda question: handed_over(p, d, question), order))
        assert answers == [question.answer for question in order]
        assert d.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        assert d.metric("vllm:external_prefix_cache_hits_total") > 0
        wait_until(p.holds_nothing)
        wait_until(d.holds_nothing)
    finally:
        for server in pair:
            server.kill()


def announced(p: VllmServer, question: Question, lease_id: str) -> dict[str, Any]:
    """What a router says of the KV of a prompt that P has not computed yet."""
    known = p.prefill([1, 2, 3])
    p.reject(known)
    assert known["announcing"]["min_tokens"] == CHUNK + 1
    engine = ("remote_engine_id", "remote_host", "remote_port", "epoch", "compat", "tp_size")
    return {name: known[name] for name in engine} | {
        "do_remote_prefill": True,
        "lease_id": lease_id,
        "remote_num_tokens": len(question.prompt),
        "proof": known["announcing"]["proof"],
    }


def long_ones(asked: list[Question]) -> list[Question]:
    return [question for question in asked if len(question.prompt) > 5 * CHUNK]


def test_d_fetches_what_p_has_not_been_asked_to_compute_yet(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    """D has the request first. Then P computes the prompt in steps."""
    before = p.figures()
    questions = long_ones(asked)[:20]
    for number, question in enumerate(questions):
        salt = {"cache_salt": "early"}
        lease_id = f"{number:032x}"
        params = announced(p, question, lease_id)
        with ThreadPoolExecutor(1) as user:
            answer = user.submit(
                d.answer, question.prompt, ANSWER_TOKENS, kv_transfer_params=params, **salt
            )
            wait_until(lambda: not d.holds_nothing(), "D has blocks for it")
            _, reference = p.begin(question.prompt, lease_id=lease_id, **salt)
            assert reference["lease_id"] == lease_id
            assert answer.result() == question.answer
        assert d.answer(question.prompt, ANSWER_TOKENS, **salt) == question.answer
    wait_until(p.holds_nothing)
    wait_until(d.holds_nothing)
    assert d.log.count("fetches its KV before prefill has answered") == len(questions)
    released = len(questions) + p.figures()["leases_revoked"] - before["leases_revoked"]
    assert p.figures()["leases_granted"] - before["leases_granted"] == released


def test_a_lease_outlives_what_was_announced_and_failed(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    question, other = long_ones(asked)[-2:]
    lease_id = "c" * 32
    params = announced(p, question, lease_id)
    with ThreadPoolExecutor(1) as user:
        answer = user.submit(d.answer, other.prompt, ANSWER_TOKENS, kv_transfer_params=params)
        wait_until(lambda: not d.holds_nothing(), "D has blocks for it")
        _, reference = p.begin(question.prompt, lease_id=lease_id)
        assert answer.result() is None, "P lends for the prompt that it has computed"
    assert d.answer(other.prompt, ANSWER_TOKENS) == other.answer
    tokens = d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=reference)
    assert tokens == question.answer
    wait_until(p.holds_nothing)
    wait_until(d.holds_nothing)


@pytest.mark.parametrize("change", [{"proof": "0" * 32}, {"remote_host": "192.0.2.1"}])
def test_what_p_has_not_signed_is_not_fetched(
    p: VllmServer, d: VllmServer, asked: list[Question], change: dict[str, Any]
) -> None:
    params = announced(p, asked[0], "d" * 32) | change
    assert d.answer(asked[0].prompt, 1, kv_transfer_params=params) is None
    wait_until(d.holds_nothing)


def edited(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda params: params | changes


@pytest.mark.parametrize(
    "change",
    [
        edited(remote_block_ids=[[1, 2, 3]]),
        edited(lease_id="0" * 32),
        edited(remote_num_tokens=33),
        edited(proof="0" * 64),
        edited(remote_host="192.0.2.1"),
        edited(epoch="another"),
        lambda params: {"do_remote_prefill": True, "remote_block_ids": [[1]]},
    ],
    ids=["blocks", "lease", "tokens", "proof", "host", "epoch", "as other connectors have it"],
)
def test_a_forged_reference_is_an_error_and_poisons_nothing(
    p: VllmServer,
    d: VllmServer,
    asked: list[Question],
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    victim, forger = asked[0], asked[1]
    params = p.prefill(victim.prompt)
    forged = change(params)
    assert d.answer(forger.prompt, ANSWER_TOKENS, kv_transfer_params=forged) is None
    assert d.answer(victim.prompt, ANSWER_TOKENS, kv_transfer_params=forged) is None
    for question in (victim, forger):
        assert d.answer(question.prompt, ANSWER_TOKENS) == question.answer
    p.reject(params)  # so that nobody has to wait for the lease's end
    wait_until(p.holds_nothing)
    wait_until(d.holds_nothing)


def test_a_reference_serves_once_and_only_its_own_prompt(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    question, other = asked[2], asked[3]
    params = p.prefill(question.prompt)
    assert d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params) == question.answer
    assert d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params) is None
    assert d.answer(other.prompt, ANSWER_TOKENS, kv_transfer_params=params) is None
    live = p.prefill(question.prompt)
    assert d.answer(other.prompt, ANSWER_TOKENS, kv_transfer_params=live) is None
    assert d.answer(other.prompt, ANSWER_TOKENS) == other.answer
    p.reject(live)
    wait_until(p.holds_nothing)


@pytest.mark.slow
def test_a_stale_reference_is_an_error_and_its_blocks_were_freed(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    params = p.prefill(asked[4].prompt)
    assert not p.holds_nothing()
    wait_until(p.holds_nothing, "the lease expires")
    assert d.answer(asked[4].prompt, ANSWER_TOKENS, kv_transfer_params=params) is None
    assert d.answer(asked[4].prompt, ANSWER_TOKENS) == asked[4].answer


@pytest.mark.parametrize("at", ["decode", "prefill"])
def test_a_refused_request_frees_its_prefill(
    p: VllmServer, d: VllmServer, asked: list[Question], at: str
) -> None:
    """vLLM's front-end refuses it, so it never reaches the scheduler."""
    server = d if at == "decode" else p
    params = p.prefill(asked[5].prompt)
    assert not p.holds_nothing()
    before = p.log.count("its lease was revoked")
    refused = server.post(asked[5].prompt, 4, model="another", kv_transfer_params=params)
    assert refused.status_code == 404
    wait_until(p.holds_nothing)
    assert p.log.count("its lease was revoked") == before + 1, "not because it expired"


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_rejections_free_p_at_once(
    p: VllmServer, d: VllmServer, asked: list[Question], at: str
) -> None:
    """Prints how long it took from the rejection to when `/metrics` said that P holds nothing."""

    def given_back() -> int:
        """Before P's worker has begun to lend, a lease is withdrawn instead of revoked."""
        log = p.log
        return log.count("its lease was revoked") + log.count("its lease was withdrawn")

    server = p if at == "prefill" else d
    before, given_back_before = p.figures(), given_back()
    seconds = []
    for question in asked:
        params = p.prefill(question.prompt)
        assert not p.holds_nothing()
        began = time.perf_counter()
        server.reject(params)
        deadline = Deadline("P frees the blocks")
        while not p.holds_nothing():
            deadline.check()
        seconds.append(time.perf_counter() - began)
    wait_until(lambda: given_back() - given_back_before == len(asked))
    assert p.figures()["leases_expired"] == before["leases_expired"]
    median, p99 = (statistics.quantiles(seconds, n=100)[number] for number in (49, 98))
    print(
        f"rejected at {at}: free after {1e3 * median:.1f} ms, p99 {1e3 * p99:.1f}, "
        f"max {1e3 * max(seconds):.1f}"
    )


def test_what_cannot_be_rejected_harms_nobody(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    """No call ends the core, frees what it does not name, or is answered by anything else."""
    kept = p.prefill(asked[11].prompt)
    used = p.prefill(asked[12].prompt)
    assert d.answer(asked[12].prompt, 4, kv_transfer_params=used) is not None
    given_back = p.prefill(asked[13].prompt)
    p.reject(given_back)
    changes: tuple[dict[str, Any], ...] = (
        {"lease_id": "0" * 32}, {"proof": "0" * 128}, {"remote_host": "192.0.2.1"},
        {"epoch": "another"}, {"proof": None}, {"lease_id": [1]},
    )  # fmt: skip
    for server in (p, d):
        for params in (*(kept | change for change in changes), {}, used, given_back):
            server.reject(params)
    assert not p.holds_nothing(), "a lease that nobody has named is kept"
    question = asked[11]
    assert d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=kept) == question.answer
    wait_until(p.holds_nothing)


@pytest.mark.slow
def test_a_lease_that_has_expired_is_nothing_to_reject(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    params = p.prefill(asked[14].prompt)
    wait_until(p.holds_nothing, "the lease expires")
    for server in (p, d):
        server.reject(params)
    assert handed_over(p, d, asked[14]) == asked[14].answer


@pytest.mark.parametrize("after", [b"", b"data:"], ids=["at once", "after its first token"])
def test_a_client_that_goes_leaves_nothing_behind(
    p: VllmServer, d: VllmServer, asked: list[Question], after: bytes
) -> None:
    params = p.prefill(asked[6].prompt)
    request = d.client.build_request(
        "POST",
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": asked[6].prompt,
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "kv_transfer_params": params,
        },
    )
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection(("127.0.0.1", d.port)) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode())
        connection.sendall(request.read())
        heard = b""
        while after not in heard:
            heard += connection.recv(4096)
    wait_until(d.holds_nothing)
    wait_until(p.holds_nothing)
    assert handed_over(p, d, asked[6]) == asked[6].answer


@pytest.mark.slow
def test_a_prefill_engine_that_stands_still_costs_a_request_and_its_time(
    p: VllmServer, d: VllmServer, asked: list[Question]
) -> None:
    params = p.prefill(asked[7].prompt)
    p.signal(signal.SIGSTOP)
    try:
        assert d.answer(asked[7].prompt, ANSWER_TOKENS, kv_transfer_params=params) is None
        wait_until(d.holds_nothing)
        assert d.answer(asked[7].prompt, ANSWER_TOKENS) == asked[7].answer
    finally:
        p.signal(signal.SIGCONT)
    wait_until(p.holds_nothing)
    assert handed_over(p, d, asked[7]) == asked[7].answer


@pytest.mark.slow
def test_a_reference_of_a_prefill_engine_that_was_restarted_is_an_error(
    p: VllmServer, d: VllmServer, servers: list[VllmServer], asked: list[Question], model: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The last of this file: P is another one afterwards, at the same address."""
    first, second = p.prefill(asked[8].prompt), p.prefill(asked[9].prompt)
    p.kill()
    assert d.answer(asked[8].prompt, ANSWER_TOKENS, kv_transfer_params=first) is None
    settings = SETTINGS | {"listen_port": first["remote_port"]}
    transfer = connector_config(**settings) | {"engine_id": first["remote_engine_id"]}
    again = VllmServer(model, tmp_path / "p", transfer, *CHUNKS)
    servers[0] = again
    again.wait_until_ready()
    again.prefill(asked[10].prompt)
    assert d.answer(asked[9].prompt, ANSWER_TOKENS, kv_transfer_params=second) is None
    assert handed_over(again, d, asked[9]) == asked[9].answer
