"""Adapters over the wire of real vLLM servers: which one answers, and whose KV is used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_kit.sensitive_model import (
    ANSWER_TOKENS,
    Question,
    questions,
)
from service_kit import healthy, make_router
from vllm_kit.adapters import LORA, RANK, adapter_in, model_with
from vllm_kit.environment import needs_vllm
from vllm_kit.wired import Wired, handed_over, started_servers, tokens_of, wired
from vllm_server import VllmServer, connector_config, save_model_for_vllm

from diptych_protocol import LoRARequest, SamplingParams
from diptych_protocol.block_hashes import adapted, extend_block_hashes, root_hash
from diptych_protocol.wire import (
    FOLLOW_HEARTBEAT,
    FOLLOW_PREFIXES,
    PREFIX_KEY_BYTES,
    ErrorKind,
)

pytestmark = [*needs_vllm, pytest.mark.timeout(1800)]

Eventually = Callable[[Callable[[], Any]], Awaitable[None]]
BLOCK = 32
OPTIONS = (*LORA, "--max-num-batched-tokens", str(3 * BLOCK))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return save_model_for_vllm(root / "model")


@pytest.fixture(scope="module")
def named(root: Path) -> dict[str, str]:
    """Name -> folder."""
    return {name: adapter_in(root / name, seed) for seed, name in enumerate(("one", "two"), 1)}


@pytest.fixture(scope="module")
def asked(root: Path, named: dict[str, str]) -> list[Question]:
    """Prompts, with the answers of our own engine with `one` merged into its weights."""
    return questions(model_with(root / "merged", named["one"]), 8, shortest=70, longest=600)


@pytest.fixture(scope="module")
def servers(
    model: str, named: dict[str, str], root: Path
) -> Iterator[list[tuple[VllmServer, int]]]:
    """P and D. vLLM's own ids begin with `two`, a router's with `one`."""
    settings = connector_config(lease_seconds=60, load_timeout_s=60)
    own = ("--lora-modules", f"two={named['two']}", f"one={named['one']}")
    (root / "logs").mkdir()
    yield from started_servers(model, root / "logs", [settings, settings], *OPTIONS, *own)


@pytest.fixture
async def pair(servers: list[tuple[VllmServer, int]]) -> AsyncIterator[list[Wired]]:
    clients = await wired(servers)
    yield clients
    for each in clients:
        assert not each.lost
        each.client.close()


@pytest.fixture
def one(named: dict[str, str]) -> LoRARequest:
    return LoRARequest("one", 1, named["one"])


async def own_answer(engine: Wired, prompt: list[int], model: str) -> list[int] | None:
    """What vLLM's own API says."""
    answer = engine.server.answer
    return await asyncio.to_thread(answer, prompt, ANSWER_TOKENS, model=model)


async def test_an_answer_is_that_of_the_named_adapter_whatever_ids_vllm_gave(
    pair: list[Wired], asked: list[Question], one: LoRARequest, named: dict[str, str]
) -> None:
    engine, two = pair[0], LoRARequest("two", 2, named["two"])
    for question in asked:
        prompt = question.prompt
        answers = [
            tokens_of(await engine.run(prompt, lora_request=adapter)) for adapter in (one, two)
        ]
        assert answers[0] == question.answer
        assert answers == [await own_answer(engine, prompt, name) for name in ("one", "two")]
        assert answers[0] != answers[1] != tokens_of(await engine.run(prompt)) != answers[0]


async def test_a_prompt_s_kv_is_its_adapter_s(
    pair: list[Wired], asked: list[Question], one: LoRARequest, named: dict[str, str]
) -> None:
    engine, prompt = pair[1], asked[0].prompt
    two = LoRARequest("two", 2, named["two"])
    cached = [
        (await engine.run(prompt, cache_salt="kv", lora_request=adapter))[0].num_cached_tokens
        for adapter in (None, one, two, None, one, two)
    ]
    most = (len(prompt) - 1) // BLOCK * BLOCK
    assert cached == [0, 0, 0, most, most, most]


async def test_prefill_and_decode_use_the_same_adapter(
    pair: list[Wired], asked: list[Question], one: LoRARequest
) -> None:
    p, d = pair
    for question in asked:
        answer, received = await handed_over(p, d, question, cache_salt="whole", lora_request=one)
        assert (answer, received) == (question.answer, len(question.prompt))


@pytest.mark.parametrize("kind", ["missing", "too large", "no adapter"])
async def test_files_that_cannot_be_used_fail_their_request_and_no_other(
    pair: list[Wired], asked: list[Question], tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "bad"
    if kind != "missing":
        adapter_in(folder, 1, rank=16 if kind == "too large" else RANK)
    if kind == "no adapter":
        (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    [output] = await pair[0].run(asked[0].prompt, lora_request=LoRARequest("bad", 9, str(folder)))
    assert (output.error_kind, output.error_param) == (ErrorKind.REFUSED, "lora_path")
    assert output.error is not None
    assert str(folder) in output.error
    assert len(tokens_of(await pair[0].run([1, 2, 3]))) == ANSWER_TOKENS


async def test_other_files_under_one_name_are_another_adapter(
    pair: list[Wired], root: Path, asked: list[Question], one: LoRARequest
) -> None:
    """It is removed, then its files change: no KV of before is used, and none from a P that has
    loaded it before."""
    p, d = pair
    folder, prompt = root / "changing", asked[0].prompt
    changing = LoRARequest("changing", 5, adapter_in(folder, 1))
    for engine in pair:
        assert tokens_of(await engine.run(prompt, lora_request=changing)) == asked[0].answer
    assert await d.client.call("remove_lora", 5)
    assert not await d.client.call("remove_lora", 5)
    adapter_in(folder, 3)
    [other] = questions(model_with(root / "other", str(folder)), 1, shortest=70)
    first, *rest = await d.run(other.prompt, lora_request=changing)
    assert first.num_cached_tokens == 0
    assert tokens_of([first, *rest]) == other.answer
    first, *rest = await d.run(prompt, lora_request=changing)
    assert first.num_cached_tokens == 0
    lent = await p.run(
        prompt, max_tokens=1, transfer={"do_remote_decode": True}, lora_request=changing
    )
    reference = lent[-1].kv_transfer_params
    refused = await d.run(prompt, transfer=reference, lora_request=changing, cache_salt=None)
    assert refused[-1].error is not None


async def test_a_removed_adapter_serves_the_requests_that_run_with_it(
    pair: list[Wired], root: Path, asked: list[Question]
) -> None:
    engine, folder = pair[0], root / "leaving"
    leaving = LoRARequest("leaving", 6, adapter_in(folder, 1))
    running = asyncio.create_task(engine.run(asked[0].prompt, lora_request=leaving, max_tokens=300))
    before = await engine.run(asked[0].prompt, lora_request=leaving, max_tokens=1)
    assert tokens_of(before) == asked[0].answer[:1]
    assert await engine.client.call("remove_lora", 6)
    assert 6 not in await engine.client.call("list_loras")
    (folder / "adapter_config.json").unlink()
    outputs = await running
    assert tokens_of(outputs)[:ANSWER_TOKENS] == asked[0].answer
    assert len(tokens_of(outputs)) == 300


async def test_calls_name_adapters_by_the_callers_ids(
    pair: list[Wired], one: LoRARequest, named: dict[str, str]
) -> None:
    client = pair[0].client
    seven = LoRARequest("seven", 7, named["two"])
    assert await client.call("add_lora", seven)
    assert 7 in await client.call("list_loras")
    assert await client.call("pin_lora", 7)
    with pytest.raises(Exception, match="take another id"):
        await client.call("add_lora", LoRARequest("eight", 7, named["one"]))
    assert await client.call("remove_lora", 7)
    assert 7 not in await client.call("list_loras")


async def test_routers_hear_which_adapters_are_loaded_and_whose_prefixes_are_remembered(
    pair: list[Wired], asked: list[Question], one: LoRARequest, eventually: Eventually
) -> None:
    d, prompt = pair[1], asked[1].prompt
    d.client.tell(FOLLOW_HEARTBEAT)
    d.client.tell(FOLLOW_PREFIXES)
    await d.run(prompt, cache_salt="news", lora_request=one)
    await eventually(
        lambda: any("one" in (x.heartbeat.adapters or ()) for x in d.heard if x.heartbeat)
    )

    def told() -> bool:
        changes = [x.prefix_changes for x in d.heard if x.prefix_changes is not None]
        digest = changes[-1].adapters.get("one") if changes else None
        if digest is None:
            return False
        chain = [root_hash(adapted("news", "one", digest))]
        extend_block_hashes(chain, [0] * BLOCK + prompt, BLOCK, None)
        added, width = b"".join(x.added for x in changes), PREFIX_KEY_BYTES
        keys = {added[at : at + width] for at in range(0, len(added), width)}
        return {mine[:width] for mine in chain[1:]} <= keys

    await eventually(told)


async def test_a_router_s_adapters_answer_across_the_pools(
    model: str,
    servers: list[tuple[VllmServer, int]],
    asked: list[Question],
    named: dict[str, str],
    eventually: Eventually,
) -> None:
    (_, at_p), (_, at_d) = servers
    router = make_router(model, f"127.0.0.1:{at_p}", f"127.0.0.1:{at_d}", None, lora_modules=named)
    router.start()
    try:
        await healthy(router)
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for number, question in enumerate(asked[:4]):
            outputs = router.generate(
                {"prompt_token_ids": question.prompt}, params, f"r{number}",
                lora_request=router.adapters["one"],
            )  # fmt: skip
            assert list([x async for x in outputs][-1].outputs[0].token_ids) == question.answer
        rows = [link.row for link in router.pools.links.values()]
        await eventually(
            lambda: all(row.adapters.has("one", time.monotonic() + 1e6) for row in rows)
        )
    finally:
        router.shutdown()
