"""A client sends the tiles of an image once, and again when its core has forgotten them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from engine_kit.async_llm import params
from engine_kit.core import CLIENT, core_request, make_core, step, tokens
from engine_kit.mq import running, set_up
from engine_kit.stat_logger import RecordingLogger
from model_kit.pictures import encoded, image_part, picture

from diptych_engine import AsyncLLM
from diptych_frontend.core_client import sent_images
from diptych_frontend.core_client.sent_images import SentImages
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestOutputKind,
)

CHAT = [{"type": "text", "text": "x"}, image_part(picture(1))]


def request(published: Any, name: str, *seeds: int) -> EngineCoreRequest:
    renderer = TextRenderer(resolve_model(published.uri))
    data: Any = {"image": [encoded(picture(seed)) for seed in seeds]}
    prompt = renderer.render_prompt({"prompt": "<image>x" * len(seeds), "multi_modal_data": data})
    features = prompt["mm_features"]
    return core_request(name, prompt["prompt_token_ids"], mm_features=features, max_tokens=3)


def has_tiles(message: EngineCoreRequest) -> list[bool]:
    return [feature.data is not None for feature in message.mm_features or ()]


def test_contract_C13_tiles_travel_once_and_again_after_a_reset(published: Any) -> None:
    core, sent = make_core(published.uri), SentImages()
    travelled: list[list[bool]] = []

    def ask(name: str, *seeds: int) -> list[int]:
        """As a client does it, but for the socket."""
        waiting = [request(published, name, *seeds)]
        made: list[EngineCoreOutput] = []
        while not made or not made[-1].finished:
            for each in waiting:
                message = sent.to_send(each)
                travelled.append(has_tiles(message))
                core.add(message, CLIENT)
            outputs = EngineCoreOutputs(outputs=step(core), finished_requests={name})
            waiting = sent.to_send_again(outputs)
            if waiting:
                assert outputs.finished_requests == set()
            made += outputs.outputs
        assert not sent.open
        return tokens(made)

    first = ask("a", 1)
    assert ask("b", 1) == first
    both = ask("c", 1, 2)
    assert travelled == [[True], [False], [False, True]]
    core.call("reset_mm_cache", [])
    travelled.clear()
    assert ask("d", 1, 2) == both
    assert ask("e", 1) == first
    assert travelled == [[False, False], [True, True], [False]]
    core.close()


def test_what_a_client_knows_has_an_end(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = SentImages()
    one, other = request(published, "one", 1), request(published, "other", 2)
    monkeypatch.setattr(sent_images, "MAX_NAMES", 1)
    assert [has_tiles(sent.to_send(each)) for each in (one, other, one)] == [[True]] * 3
    assert has_tiles(sent.to_send(one)) == [False]
    sent.ended(["one"])
    assert not sent.open
    sent.forget()
    assert has_tiles(sent.to_send(one)) == [True]
    assert has_tiles(one) == [True], "the request itself stays whole"


@pytest_asyncio.fixture
async def engine(published: Any) -> AsyncIterator[AsyncLLM]:
    config = EngineConfig(
        published.uri, num_blocks=64, num_threads=1, weight_packing="none",
        enable_prefix_caching=False,
    )  # fmt: skip
    made = AsyncLLM(config, stat_loggers=[RecordingLogger])
    await made.ready()
    yield made
    made.shutdown()


async def test_contract_C13_C14_both_resets_through_a_process(
    engine: AsyncLLM, published: Any
) -> None:
    prompt: Any = {"prompt": "see <image>!", "multi_modal_data": {"image": encoded(picture(1))}}

    async def ask(name: str) -> list[int]:
        wanted = params(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
        [output] = [output async for output in engine.generate(prompt, wanted, name)]
        return [*output.outputs[0].token_ids]

    async def encoded_images() -> int:
        return (await engine.refresh_stats()).images_encoded

    first = await ask("a")
    assert published.worst_gap(engine.renderer.render_prompt(prompt), first) < 1e-2
    assert await ask("b") == first
    assert await encoded_images() == 1
    # Somebody else's reset: this client has to find out.
    note = await engine.call_core("reset_mm_cache", timeout_s=30)
    assert note == "1 images have to be sent again"
    assert await ask("c") == first
    assert await encoded_images() == 1
    await engine.reset_encoder_cache()
    assert await ask("d") == first
    assert await encoded_images() == 2
    before = engine.renderer.stat_mm_cache()
    assert before is not None
    assert (before.queries, before.hits) == (5, 4)
    await engine.reset_mm_cache()
    assert await ask("e") == first
    after = engine.renderer.stat_mm_cache()
    assert after is not None
    assert (after.queries, after.hits) == (6, 4)
    told = RecordingLogger.made[-1].images
    assert told[-1].queries == 6
    assert any(each.reset for each in told)


async def test_contract_C13_Q16_the_older_client_forgets_its_images_without_waiting(
    published: Any,
) -> None:
    prompt: Any = {"prompt": "see <image>!", "multi_modal_data": {"image": encoded(picture(1))}}
    wanted = params(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    config = EngineConfig(published.uri, num_blocks=64, num_threads=1, weight_packing="none")
    with running(config) as core:
        async with set_up(core) as client:

            async def ask(name: str) -> tuple[list[int], int]:
                """What it says, and how many images were found prepared."""
                before = client.renderer.stat_mm_cache()
                [output] = [output async for output in client.generate(prompt, wanted, name)]
                after = client.renderer.stat_mm_cache()
                assert before is not None
                assert after is not None
                return [*output.outputs[0].token_ids], after.hits - before.hits

            first, found = await ask("a")
            assert found == 0
            assert await ask("b") == (first, 1)
            await client.reset_mm_cache()
            assert await ask("c") == (first, 0)
            await client.sleep(0)
            await client.wake_up()
            assert await ask("d") == (first, 1), "a light sleep forgets nothing"
            await client.sleep(1)
            await client.wake_up()
            assert await ask("e") == (first, 0)
