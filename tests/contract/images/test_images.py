"""Images through a whole engine: answers, caches, resets and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from engine_kit.core import CLIENT, core_request, make_core, run, step, tokens
from engine_kit.llm_engine import params, stats
from engine_kit.llm_engine import run as run_engine
from model_kit.pictures import encoded, image_part, picture
from model_kit.seeing import IMAGE_TOKEN

from diptych_engine import LLMEngine
from diptych_engine.control.core import EngineCore
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreRequest,
    PoolingParams,
    TokensPrompt,
    wire,
)
from diptych_protocol.wire import ErrorKind

TEXT = {"type": "text", "text": "what is it?"}
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def renderer(published: Any) -> TextRenderer:
    return TextRenderer(resolve_model(published.uri))


def asked(renderer: TextRenderer, *seeds: int, text: str = "what is it?") -> TokensPrompt:
    parts = [image_part(picture(seed)) for seed in seeds]
    said = {"type": "text", "text": text}
    return renderer.render_chat([{"role": "user", "content": [said, *parts, said]}])


def request(name: str, prompt: TokensPrompt, **fields: Any) -> EngineCoreRequest:
    fields = {"max_tokens": NUM_TOKENS, "mm_features": prompt.get("mm_features")} | fields
    return core_request(name, prompt["prompt_token_ids"], **fields)


def make(published: Any, **options: Any) -> EngineCore:
    return make_core(published.uri, block_size=4, num_blocks=512, **options)


def answer(core: EngineCore, name: str, prompt: TokensPrompt, **fields: Any) -> list[int]:
    [outputs] = run(core, request(name, prompt, **fields)).values()
    assert outputs[-1].error is None
    return tokens(outputs)


def refusal(core: EngineCore, message: EngineCoreRequest) -> tuple[str, ErrorKind, str | None]:
    [outputs] = run(core, message).values()
    return outputs[-1].error or "", outputs[-1].error_kind, outputs[-1].error_param


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16}, {"encoder_cache_tokens": 20, "max_num_seqs": 2}],
    ids=["whole", "chunks", "tight"],
)
def test_contract_M03_answers_are_those_of_transformers(
    published: Any, renderer: TextRenderer, options: dict[str, int]
) -> None:
    """Several at a time, with images of their own, with one in common, and with none."""
    core = make(published, **options)
    prompts = {
        "one": asked(renderer, 1),
        "two": asked(renderer, 1, 2),
        "same twice": asked(renderer, 3, 3),
        "text": asked(renderer),
    }
    outputs = run(core, *(request(name, prompt) for name, prompt in prompts.items()))
    answers = {name: tokens(made) for name, made in outputs.items()}
    for name, prompt in prompts.items():
        assert len(answers[name]) == NUM_TOKENS
        assert published.worst_gap(prompt, answers[name]) < 1e-2, name
    wrong = published.worst_gap(asked(renderer, 2), answers["one"])
    assert wrong > 0.1, "else any image would do"
    core.close()


def test_contract_M03_a_preempted_request_sees_its_images_again(
    published: Any, renderer: TextRenderer
) -> None:
    core = make(published)
    prompt = asked(renderer, 1)
    expected = answer(core, "alone", prompt)
    core.call("reset_prefix_cache", [])
    core.add(request("again", prompt), CLIENT)
    made = [output for _ in range(4) for output in step(core)]
    assert core.call("reset_prefix_cache", [True]) is True
    while not made[-1].finished:
        made += step(core)
    assert tokens(made) == expected
    core.close()


# --- caches ---------------------------------------------------------------------------------------


def test_contract_B10_the_prefix_cache_knows_images_and_salts(
    published: Any, renderer: TextRenderer
) -> None:
    core = make(published)
    one, other = asked(renderer, 1, text="x" * 40), asked(renderer, 2, text="x" * 40)

    def cached(prompt: TokensPrompt, **fields: Any) -> int:
        [outputs] = run(core, request("r", prompt, max_tokens=1, **fields)).values()
        return outputs[-1].num_cached_tokens

    before = one["prompt_token_ids"].index(IMAGE_TOKEN) // 4 * 4
    assert cached(one) == 0
    assert cached(other) == before > 0
    assert cached(one) > len(one["prompt_token_ids"]) - 5
    assert cached(one, cache_salt="salt") == 0
    assert cached(one, cache_salt="salt") > before
    core.close()


@pytest.fixture
def core(published: Any) -> Iterator[EngineCore]:
    made = make(published, enable_prefix_caching=False)
    yield made
    made.close()


def encoded_by(core: EngineCore) -> int:
    return core.stats().images_encoded


def test_contract_C14_the_encoder_runs_again_after_its_reset(
    core: EngineCore, renderer: TextRenderer
) -> None:
    prompt = asked(renderer, 1)
    first = answer(core, "a", prompt)
    assert answer(core, "b", prompt) == first
    assert encoded_by(core) == 1
    assert core.call("reset_encoder_cache", []) == "1 images have to be encoded again"
    assert core.stats().encoder_cache_tokens == 0
    assert answer(core, "c", prompt) == first
    assert encoded_by(core) == 2
    assert answer(core, "d", prompt, cache_salt="another") == first
    assert encoded_by(core) == 3, "nobody learns of another salt's images by how long they take"


def test_contract_C14_a_reset_in_the_middle_of_an_image(
    published: Any, renderer: TextRenderer
) -> None:
    core = make(published, max_num_batched_tokens=8)
    prompt = asked(renderer, 1)
    core.add(request("r", prompt), CLIENT)
    made: list[EngineCoreOutput] = []
    while not made or not made[-1].finished:
        made += step(core)
        core.call("reset_encoder_cache", [])
    assert published.worst_gap(prompt, tokens(made)) < 1e-2
    assert encoded_by(core) > 2
    core.close()


def test_contract_C13_an_image_is_sent_again_after_the_reset(
    core: EngineCore, renderer: TextRenderer
) -> None:
    prompt = asked(renderer, 1)
    [feature] = prompt["mm_features"]
    named = [msgspec.structs.replace(feature, data=None)]
    missing = refusal(core, request("early", prompt, mm_features=named))
    assert missing[1:] == (ErrorKind.MISSING_IMAGE, None)
    first = answer(core, "whole", prompt)
    assert answer(core, "named", prompt, mm_features=named) == first
    assert core.call("reset_mm_cache", []) == "1 images have to be sent again"
    assert refusal(core, request("late", prompt, mm_features=named))[1] is ErrorKind.MISSING_IMAGE
    assert answer(core, "again", prompt) == first
    assert encoded_by(core) == 1, "its features are another cache's affair"


def test_contract_C13_C14_a_pause_that_clears_caches_clears_these(
    core: EngineCore, renderer: TextRenderer
) -> None:
    prompt = asked(renderer, 1)
    answer(core, "a", prompt)
    for clears, expected in ((False, 1), (True, 2)):
        paused = core.call("pause_generation", ["abort", clears])
        core.deferred.settle()
        assert paused.done()
        core.call("resume_generation", [])
        answer(core, f"pause {clears}", prompt)
        assert encoded_by(core) == expected
    core.call("sleep", [1])
    core.deferred.settle()
    core.call("wake_up", [])
    named = [msgspec.structs.replace(each, data=None) for each in prompt["mm_features"]]
    assert refusal(core, request("c", prompt, mm_features=named))[1] is ErrorKind.MISSING_IMAGE
    before = encoded_by(core)
    answer(core, "d", prompt)
    assert encoded_by(core) == before + 1


# --- refusals -------------------------------------------------------------------------------------


def test_contract_M03_images_that_do_not_fit_are_refused_by_name(
    published: Any, renderer: TextRenderer
) -> None:
    core = make(published)
    prompt, other = asked(renderer, 1), asked(renderer, 2)
    [feature], [another] = prompt["mm_features"], other["mm_features"]
    swapped = msgspec.structs.replace(feature, data=another.data)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"mm_features": [swapped]}, "not the digest"),
        ({"mm_features": []}, "1 to 32"),
        ({"mm_features": [feature, feature]}, "in an earlier image"),
        ({"resumable": True}, "in pieces cannot have mm_features"),
    ]
    for fields, why in bad:
        error, kind, _ = refusal(core, request("bad", prompt, **fields))
        assert why in error
        assert kind is ErrorKind.FAULT
    small = make(published, encoder_cache_tokens=15)
    error, _, param = refusal(small, request("large", prompt))
    assert ("encoder_cache_tokens, 15" in error, param) == (True, "mm_features")
    small.close()
    pooled = msgspec.structs.replace(
        request("pool", prompt), sampling_params=None, pooling_params=PoolingParams(task="embed")
    )
    assert "takes no images" in refusal(core, pooled)[0]
    assert not core.scheduler.has_work
    core.close()


def test_contract_M03_a_name_does_not_stand_for_another_number_of_tiles(
    core: EngineCore, renderer: TextRenderer
) -> None:
    """It would ask for features that are not there, in the middle of a step."""
    large, small = asked(renderer, 1), renderer.render_prompt(
        {"prompt": "<image>x", "multi_modal_data": {"image": picture(2, 64, 16)}}
    )  # fmt: skip
    [of_large], [of_small] = large["mm_features"], small["mm_features"]
    expected = answer(core, "large", large), answer(core, "small", small)
    for prompt, feature, wrong in ((large, of_large, of_small), (small, of_small, of_large)):
        for data in (None, feature.data):
            named = msgspec.structs.replace(
                feature, identifier=wrong.identifier, mm_hash=None, data=data
            )
            error, kind, _ = refusal(core, request("wrong", prompt, mm_features=[named]))
            assert "image tokens for the" in error
            assert kind is ErrorKind.FAULT
    assert (answer(core, "again", large), answer(core, "too", small)) == expected


def test_contract_M03_a_model_without_vision_refuses_features(renderer: TextRenderer) -> None:
    blind = make_core("dummy://?vocab_size=300")
    error, _, param = refusal(blind, request("r", asked(renderer, 1)))
    assert "takes no images" in error
    assert param == "mm_features"
    blind.close()


def test_contract_M03_features_survive_the_wire(renderer: TextRenderer) -> None:
    message = request("r", asked(renderer, 1, 2))
    frames = wire.encoder.encode(message)
    assert len(frames) == 3, "the tiles of each image are a frame of their own"
    assert wire.request_decoder.decode(frames) == message


# --- LLMEngine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_process", [False, True])
def test_contract_L09_caches_of_images_through_an_engine(published: Any, own_process: bool) -> None:
    config = EngineConfig(
        published.uri, num_blocks=64, num_threads=1, weight_packing="none",
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = LLMEngine(config, multiprocess_mode=own_process)
    prompt: Any = {
        "prompt": "see <image>!", "multi_modal_data": {"image": encoded(picture(1))},
    }  # fmt: skip

    def ask(name: str) -> list[int]:
        engine.add_request(name, prompt, params(max_tokens=4))
        return [*run_engine(engine)[name][-1].outputs[0].token_ids]

    def prepared() -> tuple[int, int]:
        found = engine.renderer.stat_mm_cache()
        assert found is not None
        return found.queries, found.hits

    first = ask("a")
    assert published.worst_gap(engine.renderer.render_prompt(prompt), first) < 1e-2
    assert ask("b") == first
    assert prepared() == (3, 2)
    engine.reset_mm_cache()
    assert ask("c") == first
    assert prepared() == (4, 2)
    assert stats(engine).images_encoded == 1
    engine.reset_encoder_cache()
    assert ask("d") == first
    assert prepared() == (5, 3)
    assert stats(engine).images_encoded == 2
    engine.shutdown()
