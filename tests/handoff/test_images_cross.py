"""P encodes images, and their KV crosses: D needs no encoder, unless it computes the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from engine_kit.core import CLIENT, core_request
from engine_kit.handoff import Engine, LocalRouter, drive, engines, request
from model_kit.pictures import encoded, picture
from model_kit.seeing import Published

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import EngineCoreRequest, KVTransferParams, SamplingParams

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def trio(published: Published) -> Iterator[list[Engine]]:
    """An engine alone, P and D."""
    small = {"max_num_batched_tokens": 16}
    with engines(published.uri, alone=small, p=small, d=small) as made:
        yield made


def asked(published: Published, seed: int, **fields: Any) -> EngineCoreRequest:
    renderer = TextRenderer(resolve_model(published.uri))
    prompt = renderer.render_prompt(
        {"prompt": "see <image>!", "multi_modal_data": {"image": encoded(picture(seed))}}
    )
    wanted = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "mm_features": prompt["mm_features"]}
    return request(f"image {seed}", prompt["prompt_token_ids"], **wanted | fields)


def through(*messages: EngineCoreRequest, **engines: list[Engine]) -> list[list[int]]:
    read = LocalRouter(None, **engines).run(*messages)  # type: ignore[arg-type]
    return [[*outputs[-1].outputs[0].token_ids] for outputs in read]


def encoded_by(*engines: Engine) -> list[int]:
    return [engine.core.stats().images_encoded for engine in engines]


def test_P5_an_image_is_encoded_by_prefill_alone(published: Published, trio: list[Engine]) -> None:
    alone, prefill, decode = trio
    messages = [asked(published, 1), asked(published, 2), asked(published, 1, cache_salt="x")]
    expected = through(*messages, decode=[alone])
    assert through(*messages, prefill=[prefill], decode=[decode]) == expected
    assert expected[0] != expected[1], "else the image would not matter"
    assert encoded_by(alone, prefill, decode) == [3, 3, 0]
    assert decode.prompt_tokens_computed == 0
    assert decode.hinge.early_loads_adopted == 3, "what was announced without tiles was kept"
    assert published.worst_gap(
        {"prompt_token_ids": messages[0].prompt_token_ids or [],
         "mm_features": messages[0].mm_features or []},
        expected[0],
    ) < 1e-2  # fmt: skip


def test_P5_decode_encodes_an_image_itself_when_it_has_to_compute_the_prompt(
    published: Published, trio: list[Engine]
) -> None:
    alone, prefill, decode = trio
    message = asked(published, 1)
    [expected] = through(message, decode=[alone])
    router = LocalRouter(None, prefill=[prefill], decode=[decode])
    collector = router.send(message)
    router.until(lambda: decode.core.stats().tokens_generated >= 3)
    assert encoded_by(prefill, decode) == [1, 0]
    assert decode.core.call("reset_prefix_cache", [True]) is True  # all lose their blocks
    made: list[int] = []
    while not collector.finished:
        router.turn()
        output = collector.take()
        made = made if output is None else [*output.outputs[0].token_ids]
    assert made == expected
    assert encoded_by(prefill, decode) == [1, 1]


def test_P5_a_stream_that_moves_on_needs_no_encoder(
    published: Published, trio: list[Engine]
) -> None:
    alone, prefill, decode = trio
    message = asked(published, 1)
    with engines(published.uri, other={}) as (other,):
        router = LocalRouter(None, prefill=[prefill], decode=[decode, other], move_after=4)
        [[*_, last]] = router.run(message)
        assert other.core.stats().tokens_generated > 0
        assert encoded_by(prefill, decode, other) == [1, 0, 0]
    assert [[*last.outputs[0].token_ids]] == through(message, decode=[alone])


def test_P5_a_hand_off_that_fails_is_made_good(published: Published, trio: list[Engine]) -> None:
    """P takes its lease back before D has read it."""
    alone, prefill, decode = trio
    message = asked(published, 1)
    [expected] = through(message, decode=[alone])
    router = LocalRouter(None, prefill=[prefill], decode=[decode])
    collector = router.send(message)
    router.until(lambda: prefill.hinge.leases_granted == 1)
    prefill.core.call("reset_prefix_cache", [False, True])
    made: list[int] = []
    while not collector.finished:
        router.turn()
        output = collector.take()
        made = made if output is None else [*output.outputs[0].token_ids]
    router.settle()
    assert made == expected


def test_P2_kv_of_another_image_is_not_taken(published: Published, trio: list[Engine]) -> None:
    """The same tokens, the same salt; only the picture differs."""
    _, prefill, decode = trio
    one, other = asked(published, 1), asked(published, 2)
    assert one.prompt_token_ids == other.prompt_token_ids
    lend = {"kv_transfer_params": KVTransferParams(do_remote_decode=True).to_dict()}
    first = core_request(
        "first", one.prompt_token_ids or [], mm_features=one.mm_features, max_tokens=1,
        extra_args=lend,
    )  # fmt: skip
    lent = drive(prefill, first)[-1].kv_transfer_params
    assert lent is not None
    params = SamplingParams(temperature=0.0, max_tokens=4, extra_args={"kv_transfer_params": lent})
    for message, taken in ((other, False), (one, True)):
        wanted = msgspec.structs.replace(
            message, request_id=f"second {taken}", sampling_params=params
        )
        decode.core.add(wanted, CLIENT)
        outputs = decode.core.take_outputs().get(CLIENT, [])
        refused = any(output.error is not None for output in outputs)
        assert refused is not taken, outputs
    decode.core.abort_all()


def test_P5_a_prefix_with_an_image_is_fetched_and_another_image_s_is_not(
    published: Published, trio: list[Engine]
) -> None:
    """The names of blocks cover the images: no engine takes the KV of another picture."""
    alone, taker, _ = trio
    messages = [longer(asked(published, seed)) for seed in (1, 2)]
    expected = [through(message, decode=[alone])[0] for message in messages]
    alone.forget_prefixes()
    through(messages[0], decode=[alone])
    encoded_before = encoded_by(taker)
    for message, known in zip(messages, (True, False), strict=True):
        router = LocalRouter(None, decode=[taker])
        router.fleet.fetch_from(alone)
        [outputs] = router.run(message)
        assert outputs[-1].outputs[0].token_ids == expected[not known]
        assert taker.hinge.prefix_fetches_completed == 1
    assert encoded_by(taker)[0] - encoded_before[0] == 1, "only the picture that nobody had"


def longer(message: EngineCoreRequest) -> EngineCoreRequest:
    """With more than a block of text behind the image."""
    prompt = message.prompt_token_ids or []
    return msgspec.structs.replace(message, prompt_token_ids=prompt + prompt[-1:] * 20)
