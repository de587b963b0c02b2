"""Real vLLM servers that answer the wire: what they say over it is what they say over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_kit.sensitive_model import ANSWER_TOKENS, Question, questions
from span_collector import Received, span_collector
from vllm_kit.environment import PYTHONPATH, VENV, needs_nixl, needs_vllm
from vllm_kit.wired import LENDS, Wired, handed_over, sent, started_servers, tokens_of, wired
from vllm_server import MODEL, VllmServer, connector_config, save_model_for_vllm
from waits import FOR_EVER_S

from diptych_protocol import (
    FinishReason,
    KVTransferParams,
    PoolingParams,
    fingerprint,
)
from diptych_protocol.block_hashes import extend_block_hashes, root_hash, salted
from diptych_protocol.kv_transfer_params import PARAM
from diptych_protocol.wire import FOLLOW_HEARTBEAT, FOLLOW_PREFIXES, PREFIX_KEY_BYTES, ErrorKind

pytestmark = [*needs_vllm, pytest.mark.timeout(1800)]

Eventually = Callable[[Callable[[], Any]], Awaitable[None]]
BLOCK = 32
CHUNKS = ("--max-num-batched-tokens", str(3 * BLOCK))
UNUSED = {"kv_connector": "DiptychConnector", "kv_connector_module_path": "diptych_vllm.connector",
          "kv_role": "kv_both", "kv_load_failure_policy": "fail"}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_for_vllm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(model: str) -> list[Question]:
    """Prompts of one to twenty blocks, with the answers that our own engine gives."""
    return questions(model, 20, shortest=24, longest=600)


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, list[Received]]]:
    with span_collector() as made:
        yield made


@pytest.fixture(scope="module")
def ours(
    model: str, collector: tuple[str, list[Received]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[VllmServer, int]]]:
    settings = connector_config(lease_seconds=60, load_timeout_s=60)
    folder, traces = tmp_path_factory.mktemp("ours"), ("--otlp-traces-endpoint", collector[0])
    yield from started_servers(
        model, folder, [settings, settings], *CHUNKS, "--scheduling-policy", "priority", *traces,
        environment={
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100",
        },
    )  # fmt: skip


@pytest.fixture
async def pair(ours: list[tuple[VllmServer, int]]) -> AsyncIterator[list[Wired]]:
    """A prefill and a decode engine, over our connector."""
    clients = await wired(ours)
    yield clients
    for each in clients:
        each.client.close()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 11},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "min_p": 0.1},
        {"logit_bias": {50: 5.0}},
        {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": [50]},
    ],
)
async def test_answers_are_those_of_http(
    pair: list[Wired], asked: list[Question], fields: dict[str, Any]
) -> None:
    engine, question = pair[0], asked[0]
    http = await asyncio.to_thread(
        engine.server.answer, question.prompt, ANSWER_TOKENS, **_as_http(fields)
    )
    assert tokens_of(await engine.run(question.prompt, **fields)) == http


def _as_http(fields: dict[str, Any]) -> dict[str, Any]:
    bias = fields.get("logit_bias")
    named = {} if bias is None else {"logit_bias": {str(token): x for token, x in bias.items()}}
    return {**fields, **named}


def test_outputs_of_the_core_pass_vllm_s_own_processor_and_are_counted_there() -> None:
    script = Path(__file__).parents[1] / "support" / "vllm_kit" / "raw_outputs.py"
    ran = subprocess.run(
        [VENV / "bin" / "python", script], env=os.environ | {"PYTHONPATH": PYTHONPATH},
        check=True, stdout=subprocess.PIPE, timeout=FOR_EVER_S,
    )  # fmt: skip
    assert json.loads(ran.stdout) == {
        "whole": {
            "name": "raw-1", "taken": [[[7], None], [[9], "stop"]], "received": 1, "other": [8],
            "was_open": True, "counted": [2, 1], "left": ["other-1"],
        },
        "aborted": [["raw-1"], []],
        "failed": ["the core has died", "token 7", "[8]"],
    }  # fmt: skip


async def test_vllm_counts_what_it_generates_for_the_wire(pair: list[Wired]) -> None:
    server = pair[0].server
    name = "vllm:generation_tokens_total"
    before = await asyncio.to_thread(server.metric, name)
    await pair[0].run([1, 2, 3], max_tokens=5)
    assert await asyncio.to_thread(server.metric, name) == before + 5


async def test_a_priority_decides_who_is_computed_first(pair: list[Wired]) -> None:
    """A step has room for one of the prompts."""
    engine = pair[0]
    await engine.client.call("pause_generation", "keep", False)
    late, urgent = (
        sent([number] * (3 * BLOCK - 1), priority=number, max_tokens=1) for number in (9, 1)
    )
    for request in (late, urgent):
        engine.client.add(request)
    await engine.client.call("resume_generation")
    await engine.run([4], max_tokens=1, priority=10)
    ended = [x.request_id for message in engine.heard for x in message.outputs if x.finished]
    assert ended[:2] == [urgent.request_id, late.request_id]
    assert engine.about.scheduling_policy == "priority"


async def test_vllm_s_span_is_in_the_caller_s_trace(
    pair: list[Wired], collector: tuple[str, list[Received]], eventually: Eventually
) -> None:
    assert pair[0].about.tracing_enabled
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    await pair[0].run(
        [1, 2, 3], max_tokens=2, trace_headers={"traceparent": f"00-{trace}-{parent}-01"}
    )
    await eventually(
        lambda: (
            ("llm_request", parent)
            in [(span.name, span.parent_id) for span in collector[1] if span.trace_id == trace]
        )
    )


async def test_an_answer_goes_on_where_another_engine_stopped(
    pair: list[Wired], asked: list[Question]
) -> None:
    question = asked[1]
    rest = await pair[0].run(question.prompt, generated_token_ids=question.answer[:2])
    assert tokens_of(rest) == question.answer[2:]


async def test_log_probabilities_begin_with_the_token_that_is_there(
    pair: list[Wired], asked: list[Question]
) -> None:
    prompt = asked[0].prompt
    first, *_ = outputs = await pair[0].run(prompt, logprobs=3, prompt_logprobs=2)
    told = first.new_prompt_logprobs_tensors
    assert told is not None
    assert told.logprob_token_ids.shape == (len(prompt) - 1, 3)
    assert [row[0] for row in told.logprob_token_ids.tolist()] == prompt[1:]
    for output in outputs:
        assert output.new_logprobs is not None
        for token, row in zip(
            output.new_token_ids, output.new_logprobs.logprob_token_ids, strict=True
        ):
            assert row[:2] == [token, token], "greedy: it is the likeliest"
            assert len(row) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": -1.0}, "temperature"), ({"logprobs": 100}, "logprobs")],
)
async def test_vllm_refuses_in_its_own_words(
    pair: list[Wired], fields: dict[str, Any], param: str
) -> None:
    [output] = await pair[0].run([1, 2, 3], **fields)
    assert (output.finish_reason, output.error_kind) == (FinishReason.ERROR, ErrorKind.REFUSED)
    assert output.error_param == param


async def test_an_abort_ends_a_request_in_the_core(
    pair: list[Wired], eventually: Eventually
) -> None:
    request = sent([1, 2, 3], max_tokens=900)
    pair[0].client.add(request)
    await eventually(lambda: len(pair[0].outputs(request.request_id)) > 2)
    pair[0].client.abort([request.request_id])
    stats = await pair[0].client.fetch_stats()
    total = stats.blocks_total

    async def is_free() -> bool:
        await pair[0].run([4], max_tokens=1)  # vLLM reports only after a step
        return await pair[0].blocks_free() >= total - 1

    await eventually(is_free)
    assert not any(x.finished for x in pair[0].outputs(request.request_id))


async def test_a_prompt_that_p_computes_is_answered_by_d(
    pair: list[Wired], asked: list[Question]
) -> None:
    p, d = pair
    assert fingerprint(p.about.compat) == fingerprint(d.about.compat)
    before = (await d.client.fetch_stats()).kv_transfer
    assert before is not None
    blocks = before.blocks_received
    for question in asked[:8]:
        answer, received = await handed_over(p, d, question, cache_salt="whole")
        assert (answer, received) == (question.answer, len(question.prompt))
        blocks += -(-len(question.prompt) // BLOCK)
    after = (await d.client.fetch_stats()).kv_transfer
    assert after is not None
    assert after.blocks_received == blocks


async def test_an_announced_prompt_is_there_when_its_request_comes(
    pair: list[Wired], asked: list[Question], eventually: Eventually
) -> None:
    p, d = pair
    question = next(x for x in asked if len(x.prompt) > 12 * BLOCK)
    lease_id, about = secrets.token_hex(16), p.about
    lends = KVTransferParams(
        do_remote_prefill=True, remote_engine_id=about.engine_id, epoch=about.epoch,
        remote_host=about.kv_transfer_host, remote_port=about.kv_transfer_port,
        compat=fingerprint(about.compat), remote_block_size=about.block_size, lease_id=lease_id,
        proof=about.kv_transfer_proof, remote_num_tokens=len(question.prompt),
    )  # fmt: skip
    coming = sent(question.prompt, transfer=lends.to_dict(), cache_salt="early")
    free = await d.blocks_free()
    d.client.tell("announce_kv_transfer", coming)

    async def is_begun() -> bool:
        return await d.blocks_free() < free

    await eventually(is_begun)
    lent = await p.run(
        question.prompt, max_tokens=1, transfer={**LENDS, "lease_id": lease_id}, cache_salt="early"
    )
    known = tokens_of(lent)
    rest = await d.run(
        question.prompt,
        request_id=coming.request_id,
        transfer=lent[-1].kv_transfer_params,
        generated_token_ids=known,
        cache_salt="early",
    )
    assert known + tokens_of(rest) == question.answer
    assert sum(output.num_received_tokens for output in rest) == len(question.prompt)


async def test_a_rejection_frees_what_p_holds(
    pair: list[Wired], asked: list[Question], eventually: Eventually
) -> None:
    p, _ = pair
    lent = await p.run(asked[2].prompt, max_tokens=1, transfer=LENDS, cache_salt="rejected")
    held = (await p.client.fetch_stats()).kv_transfer
    assert held is not None
    await p.client.call("reject_kv_transfer", "r", lent[-1].kv_transfer_params)

    async def is_free() -> bool:
        await p.run([4], max_tokens=1)
        now = (await p.client.fetch_stats()).kv_transfer
        return now is not None and now.leases_revoked == held.leases_revoked + 1

    await eventually(is_free)


async def test_a_router_hears_what_the_engine_remembers(
    pair: list[Wired], asked: list[Question], eventually: Eventually
) -> None:
    d, prompt = pair[1], asked[3].prompt
    d.client.tell(FOLLOW_HEARTBEAT)
    d.client.tell(FOLLOW_PREFIXES)
    await d.run(prompt, cache_salt="news")
    chain = [root_hash(salted("news"))]
    extend_block_hashes(chain, [0] * BLOCK + prompt, BLOCK, None)
    expected = {mine[:PREFIX_KEY_BYTES] for mine in chain[1:]}

    def told() -> set[bytes]:
        added = b"".join(x.prefix_changes.added for x in d.heard if x.prefix_changes is not None)
        width = PREFIX_KEY_BYTES
        return {added[at : at + width] for at in range(0, len(added), width)}

    await eventually(lambda: expected <= told())
    await eventually(lambda: any(x.heartbeat is not None for x in d.heard))


async def test_control_calls_reach_vllm(pair: list[Wired]) -> None:
    client = pair[0].client
    await client.call("pause_generation", "keep", False)
    assert await client.call("is_paused")
    assert (await client.fetch_stats()).paused
    await client.call("resume_generation")
    assert not await client.call("is_paused")
    assert await client.call("reset_prefix_cache", False, False)


def with_nixl(test: Any) -> Any:
    """Marks a test of vLLM's own connector for NIXL."""
    for mark in (*needs_nixl, pytest.mark.slow):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def of_nixl(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[VllmServer, int]]]:
    transfers = [
        {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": 60},
        }
        for role in ("kv_producer", "kv_consumer")
    ]
    yield from started_servers(model, tmp_path_factory.mktemp("nixl"), transfers, *CHUNKS)


@with_nixl
async def test_p_and_d_answer_as_one_engine_over_nixl(
    of_nixl: list[tuple[VllmServer, int]], asked: list[Question]
) -> None:
    p, d = await wired(of_nixl)
    assert not d.about.abilities.checks_kv, "its answers are compared instead"
    for question in asked[:8]:
        answer, received = await handed_over(p, d, question, cache_salt="whole")
        assert (answer, received) == (question.answer, len(question.prompt))
    moved = (await d.client.fetch_stats()).kv_transfer
    assert moved is not None
    assert moved.blocks_received == sum(-(-len(x.prompt) // BLOCK) for x in asked[:8])

    lent = await p.run(asked[9].prompt, max_tokens=1, transfer=LENDS)
    reference = lent[-1].kv_transfer_params
    assert tokens_of(await d.run(asked[9].prompt, transfer=reference)) == asked[9].answer
    [again] = await d.run(asked[9].prompt, transfer=reference)
    assert (again.error, again.error_param) == (
        "the reference to its KV was used before", PARAM,
    )  # fmt: skip
    p.client.close()
    d.client.close()


@with_nixl
async def test_a_rejection_at_d_frees_what_p_holds(
    of_nixl: list[tuple[VllmServer, int]],
    asked: list[Question],
    eventually: Eventually,
) -> None:
    p, d = await wired(of_nixl)
    lent = await p.run(asked[10].prompt, max_tokens=1, transfer=LENDS)
    total = (await p.client.fetch_stats()).blocks_total
    await d.client.call("reject_kv_transfer", "r", lent[-1].kv_transfer_params)

    async def is_free() -> bool:
        await p.run([4], max_tokens=1)
        return await p.blocks_free() == total

    await eventually(is_free)
    p.client.close()
    d.client.close()


@pytest.fixture(scope="module")
def of_vectors(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[VllmServer, int]]]:
    folder = tmp_path_factory.mktemp("vectors")
    yield from started_servers(model, folder, [UNUSED], "--runner", "pooling", "--convert", "embed")


@pytest.mark.slow
async def test_vectors_are_those_of_http(
    of_vectors: list[tuple[VllmServer, int]], asked: list[Question]
) -> None:
    [engine] = await wired(of_vectors)
    assert engine.about.tasks == ("embed", "token_embed")
    prompt = asked[0].prompt
    body = {"model": MODEL, "input": prompt}
    http = await asyncio.to_thread(engine.server.client.post, "/v1/embeddings", json=body)
    wanted = {"sampling_params": None, "pooling_params": PoolingParams()}
    [output] = await engine.run(prompt, **wanted)
    assert output.pooling_output is not None
    assert output.pooling_output.tolist() == http.json()["data"][0]["embedding"]
    wanted["pooling_params"] = PoolingParams(task="token_embed")
    [output] = await engine.run(prompt, **wanted)
    assert output.pooling_output is not None
    assert output.pooling_output.shape[0] == len(prompt)
    engine.client.close()


async def test_sigterm_lets_answers_end(pair: list[Wired], eventually: Eventually) -> None:
    """The last test: it ends a server."""
    engine = pair[1]
    request = sent([1, 2, 3], max_tokens=300)
    engine.client.add(request)
    await eventually(lambda: bool(engine.outputs(request.request_id)))
    os.kill(engine.about.pid, signal.SIGTERM)
    await eventually(lambda: "has ended" in engine.lost)
    assert len(tokens_of(engine.outputs(request.request_id))) == 300
