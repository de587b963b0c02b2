"""A router in front of real vLLM servers: aggregated, tokens in and tokens out."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from free_ports import free_port
from vllm_kit.environment import START_S, needs_vllm
from vllm_kit.real_server import RealVllm, vllm_servers
from vllm_kit.tiny_model import CONTEXT, VOCABULARY, save_tiny_model
from waits import PATIENCE_S

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import RouterConfig, SamplingParams
from diptych_router.engines.discovery import parse_targets
from diptych_router.engines.engine_link import key_of
from diptych_router.engines.known_prefixes import BlockNamer
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.records import record_of
from diptych_router.requests.routed_request import RoutedRequest

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(START_S + 600)]

HELLO: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me of two panels and a hinge."}],
    "max_tokens": 24,
    "temperature": 0,
}
EVENTS = {
    "enable_kv_cache_events": True, "publisher": "zmq",
    "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0",
}  # fmt: skip
OPTIONS = ("--kv-events-config", json.dumps(EVENTS))
LONG = {**HELLO, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def servers(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealVllm]]:
    with vllm_servers(model, tmp_path_factory.mktemp("logs"), 2, *OPTIONS) as started:
        yield started


@pytest_asyncio.fixture
async def router(
    model: str, servers: list[RealVllm], tmp_path: Path, eventually: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that has found all servers that live."""
    alive = [server for server in servers if server.process.poll() is None]
    config = RouterConfig(model=model, served_name="tiny", policy="round_robin")
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(config))
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "diptych_router", "--config", tmp_path / "router.json"),
            *("--port", str(port), "--decode", ",".join(server.address for server in alive)),
            *("--batch-directory", tmp_path / "batches"),
        ]
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            await eventually(lambda: _is_ready(client))
            yield client
    finally:
        process.kill()
        process.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json={**HELLO, **fields})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


async def own_answer(server: RealVllm, **fields: Any) -> dict[str, Any]:
    """What a vLLM server answers without a router."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        return await ask(client, **fields)


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    text: str = answer["choices"][choice]["message"]["content"]
    return text


async def deltas(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[str]:
    """The pieces of a streamed answer."""
    body = {**HELLO, **fields, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["choices"][0]["delta"].get("content") or ""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 11},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "min_p": 0.1, "seed": 2},
        {"logit_bias": {"500": 100}},
        {"min_tokens": 24, "stop_token_ids": [500]},
    ],
)
async def test_answers_are_those_of_vllm(
    router: httpx.AsyncClient, servers: list[RealVllm], fields: dict[str, Any]
) -> None:
    expected = text_of(await own_answer(servers[0], **fields))
    assert text_of(await ask(router, **fields)) == expected
    assert "".join([piece async for piece in deltas(router, **fields)]) == expected


async def test_a_batch_has_the_answers_of_vllm(
    router: httpx.AsyncClient, servers: list[RealVllm], eventually: Any
) -> None:
    questions = [f"Tell me of panel {number}." for number in range(4)]
    asked = {question: [{"role": "user", "content": question}] for question in questions}
    lines = [
        {
            "custom_id": question,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**HELLO, "messages": messages},
        }
        for question, messages in asked.items()
    ]
    content = "\n".join(map(json.dumps, lines))
    file = await router.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}
    )
    assert file.status_code == 200, file.text
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = (await router.post("/v1/batches", json=body)).json()

    async def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = (await router.get(f"/v1/batches/{batch['id']}")).json()
        return found if found["status"] == "completed" else None

    done = await eventually(ended)
    assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    written = (await router.get(f"/v1/files/{done['output_file_id']}/content")).text
    told = [json.loads(line) for line in written.splitlines()]
    answers = {line["custom_id"]: text_of(line["response"]["body"]) for line in told}
    expected = {
        question: text_of(await own_answer(servers[0], messages=messages))
        for question, messages in asked.items()
    }
    assert answers == expected


async def test_log_probabilities_are_those_of_vllm(
    router: httpx.AsyncClient, servers: list[RealVllm]
) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 1.0, "seed": 4}
    answers = [await own_answer(servers[0], **fields), await ask(router, **fields)]
    own, routed = (answer["choices"][0]["logprobs"]["content"] for answer in answers)
    assert [token["token"] for token in routed] == [token["token"] for token in own]
    for mine, theirs in zip(routed, own, strict=True):
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
        assert len(mine["top_logprobs"]) == 3, "also where the sampled token is none of them"


async def test_the_router_ends_answers_at_stop_strings(
    router: httpx.AsyncClient, servers: list[RealVllm], eventually: Any
) -> None:
    whole = text_of(await ask(router))
    stop = whole[len(whole) // 2 :][:6]
    answer = await ask(router, stop=[stop], max_tokens=900)
    assert text_of(answer) == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    await eventually(lambda: not any(server.num_running() for server in servers))


async def test_several_answers_to_one_prompt(
    router: httpx.AsyncClient, servers: list[RealVllm]
) -> None:
    answer = await ask(router, n=2, temperature=1.0, seed=5)
    first, second = text_of(answer, 0), text_of(answer, 1)
    assert all((first, second))
    assert first != second


async def test_an_answer_has_the_form_that_was_asked_for(router: httpx.AsyncClient) -> None:
    answer = await ask(router, structured_outputs={"regex": "(left|right) panel"})
    assert text_of(answer) in ("left panel", "right panel")


async def test_a_client_that_goes_ends_its_request_in_vllm(
    router: httpx.AsyncClient, servers: list[RealVllm], eventually: Any
) -> None:
    def total(figure: str) -> float:
        return sum(server.figure(f"vllm:{figure}") for server in servers)

    async def was_cut_short() -> bool:
        """On a busy machine an answer may be over before anybody goes, and then proves nothing."""
        before = total("generation_tokens_total")
        stream = deltas(router, **LONG)
        await anext(stream)
        was_seen = total("num_requests_running") == 1
        await stream.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: total("num_requests_running") == 0)
        return was_seen and total("generation_tokens_total") - before < LONG["max_tokens"]

    await eventually(was_cut_short)


def in_process(model: str, servers: list[RealVllm]) -> PoolClient:
    """A router's client that chooses by what servers remember."""
    source = resolve_model(model)
    renderer = TextRenderer(source)
    return PoolClient(
        RouterConfig(model=model, served_name="tiny", policy="prefix_aware"),
        InputProcessor(renderer, max_model_len=CONTEXT, vocab_size=VOCABULARY),
        OutputProcessor(renderer.tokenizer),
        targets={
            "prefill": [],
            "decode": parse_targets(",".join(server.address for server in servers)),
        },
        read_keys=None,
    )


async def test_prompts_go_where_their_beginning_is_remembered(
    model: str, servers: list[RealVllm], eventually: Any
) -> None:
    """The router comes after the prompts, so it knows of them by what servers send again."""
    texts = [f"{number}, and so on and on" * 60 for number in range(4)]
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for number, text in enumerate(texts):
            body = {"model": "tiny", "prompt": text, "max_tokens": 1}
            await client.post(f"{servers[number % 2].url}/v1/completions", json=body)
    router = in_process(model, servers)

    def choices() -> list[tuple[str, bool]]:
        """Whom each prompt would go to, and whether that server has most of it."""
        found = []
        for text in texts:
            asked = router.input_processor.process("q", text, SamplingParams(max_tokens=1))
            view = RoutedRequest(asked, CONTEXT, record_of(asked, 0.0), BlockNamer()).view
            decision = router.pools.choose(view)
            assert decision is not None
            known = decision.to_compute < view.prompt_tokens / 2
            found.append((router.name_of(decision.decode), known))
        return found

    try:
        router.start()
        await eventually(lambda: len(router.pools.usable_engines()) == 2)
        await eventually(lambda: all(known for _, known in choices()))
        names = [router.name_of(key_of("decode", f"tcp://{each.address}")) for each in servers]
        assert [name for name, _ in choices()] == [
            names[number % 2] for number in range(len(texts))
        ]
    finally:
        router.shutdown()


async def test_a_stream_goes_on_at_another_server(
    router: httpx.AsyncClient, servers: list[RealVllm], eventually: Any
) -> None:
    """The last test of this module: one server is gone after it."""
    expected = text_of(await own_answer(servers[0], **LONG))
    pieces: list[str] = []

    async def lost_its_server() -> bool:
        """On a busy machine an answer may be over before anybody has seen where it runs."""
        pieces.clear()
        victim = None
        async for piece in deltas(router, **LONG):
            pieces.append(piece)
            if victim is None:
                victim = next((each for each in servers if each.num_running()), None)
                if victim is not None:
                    await asyncio.to_thread(victim.kill)
        return victim is not None

    await eventually(lost_its_server)
    assert "".join(pieces) == expected
