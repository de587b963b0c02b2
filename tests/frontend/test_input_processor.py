"""What leaves for an engine core is complete, checked, and the caller's objects are untouched."""

from __future__ import annotations

import re
import time
from inspect import Parameter, signature
from typing import Any

import msgspec
import numpy as np
import pytest

from diptych_frontend.core_client.async_engine import AsyncEngine
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineCoreRequest,
    InvalidRequestError,
    KVTransferParams,
    RequestOptions,
    SamplingParams,
)
from diptych_protocol.engine_client import ADD_ORDER, ENCODE_ORDER, by_name
from diptych_protocol.wire import steady_time

LIMIT = 20
POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD


@pytest.fixture
def inputs(text_renderer: TextRenderer) -> InputProcessor:
    return InputProcessor(
        text_renderer,
        max_model_len=LIMIT,
        vocab_size=49152,
        eos_token_ids=(2, 0, 5),
        scheduling_policy="priority",
    )


@pytest.mark.parametrize("ids", ["\ud800", np.zeros(3), 5, {1: 2}, [None]])
def test_a_request_made_elsewhere_must_have_token_ids(inputs: InputProcessor, ids: Any) -> None:
    request = EngineCoreRequest("r", ids, None, SamplingParams(), None, None, 0.0, None, None, None)
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process("r", request, SamplingParams())
    assert caught.value.param == "prompt"


def process(inputs: InputProcessor, prompt: Any = (7, 8, 9), **params: Any) -> EngineCoreRequest:
    if isinstance(prompt, tuple):
        prompt = list(prompt)
    return inputs.process("req", prompt, SamplingParams(**params))


def test_requests_stay_in_their_order_when_somebody_sets_the_clock(
    inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = []
    for hours in (0, 1, -2):
        monkeypatch.setattr(time, "time", lambda hours=hours: 1.8e9 + 3600 * hours)
        arrivals.append(process(inputs).arrival_time)
    assert arrivals == sorted(arrivals)
    assert arrivals == pytest.approx([arrivals[0]] * 3, abs=3000), "none is due an hour later"


def test_a_request_is_complete(inputs: InputProcessor) -> None:
    before = steady_time()
    request = inputs.process(
        "req",
        {"prompt": "Hello", "cache_salt": "pepper"},
        SamplingParams(),
        priority=3,
        trace_headers={"traceparent": "00-x"},
        data_parallel_rank=1,
    )
    assert re.fullmatch(r"req-[0-9a-f]{8}", request.request_id)
    assert request.external_req_id == "req"
    assert request.prompt_token_ids == [19556]
    assert request.eos_token_id == 2
    assert request.cache_salt == "pepper"
    assert request.priority == 3
    assert request.trace_headers == {"traceparent": "00-x"}
    assert request.data_parallel_rank == 1
    assert before <= request.arrival_time <= steady_time()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest)
    assert inputs.process("r", [1], SamplingParams(), arrival_time=1.5).arrival_time == 1.5


def test_contract_B01_the_same_user_id_gets_different_internal_ids(inputs: InputProcessor) -> None:
    assert len({process(inputs).request_id for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("asked", "given"),
    [(None, LIMIT - 3), (1, 1), (LIMIT - 3, LIMIT - 3), (10**6, LIMIT - 3)],
)
def test_max_tokens_fits_the_room_that_the_prompt_leaves(
    inputs: InputProcessor, asked: int | None, given: int
) -> None:
    assert process(inputs, max_tokens=asked).sampling.max_tokens == given


def test_min_tokens_follows_a_clamped_max_tokens(inputs: InputProcessor) -> None:
    params = process(inputs, max_tokens=100, min_tokens=90).sampling
    assert (params.max_tokens, params.min_tokens) == (17, 17)


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 10 * LIMIT])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    inputs: InputProcessor, length: int
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{length} tokens.* {LIMIT} ") as caught:
        process(inputs, (1,) * length)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert process(inputs, (1,) * (LIMIT - 1), max_tokens=None).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("ignore_eos", "stop_token_ids", "merged"),
    [
        (False, [], [0, 5]),
        (False, [9, 5], [9, 5, 0]),
        (True, [], []),
        (True, [9], [9]),
    ],
)
def test_the_models_other_eos_tokens_become_stop_tokens(
    inputs: InputProcessor, ignore_eos: bool, stop_token_ids: list[int], merged: list[int]
) -> None:
    request = process(inputs, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
    assert request.eos_token_id == 2
    assert request.sampling.stop_token_ids == merged


def test_a_model_without_eos(text_renderer: TextRenderer) -> None:
    inputs = InputProcessor(text_renderer, max_model_len=8, vocab_size=49152)
    assert process(inputs).eos_token_id is None


def test_the_callers_objects_stay_as_they_are(inputs: InputProcessor) -> None:
    kv = KVTransferParams(do_remote_decode=True).to_dict()
    params = SamplingParams(max_tokens=None, stop=["x"], extra_args={"kv_transfer_params": kv})
    prompt = [1, 2]
    before = msgspec.json.encode(params)
    sent = inputs.process("req", prompt, params)
    sent.sampling.stop.append("y")
    sent.sampling.stop_token_ids.append(1)
    assert sent.sampling.extra_args is not None
    sent.sampling.extra_args["z"] = 1
    assert sent.prompt_token_ids is not None
    sent.prompt_token_ids.append(3)
    assert msgspec.json.encode(params) == before
    assert prompt == [1, 2]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": ["x"], "detokenize": False}, "stop"),
        ({"extra_args": {"kv_transfer_params": 3}}, "kv_transfer_params"),
        (
            {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
            "kv_transfer_params",
        ),
        ({"n": 2, "extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}, "n"),
    ],
)
def test_what_can_never_succeed_is_refused_by_field(
    inputs: InputProcessor, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        process(inputs, **params)
    assert caught.value.param == field


def test_an_empty_prompt_is_refused(inputs: InputProcessor) -> None:
    prompts: list[Any] = ["", []]
    for prompt in prompts:
        with pytest.raises(InvalidRequestError, match="empty"):
            process(inputs, prompt)


def test_stop_strings_need_a_tokenizer() -> None:
    inputs = InputProcessor(
        TextRenderer(resolve_model("dummy://")), max_model_len=64, vocab_size=512
    )
    with pytest.raises(InvalidRequestError, match="stop_token_ids") as caught:
        process(inputs, stop=["x"])
    assert caught.value.param == "stop"
    assert process(inputs).prompt_token_ids == [7, 8, 9]


def core_request(**changes: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {
        "request_id": "made",
        "prompt_token_ids": [7, 8],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=None),
        "pooling_params": None,
        "eos_token_id": None,
        "arrival_time": 1.0,
        "lora_request": None,
        "cache_salt": "s",
        "data_parallel_rank": None,
        "priority": 4,
        **changes,
    }
    return EngineCoreRequest(**fields)


def test_a_ready_made_request_is_checked_and_completed_too(inputs: InputProcessor) -> None:
    made = core_request()
    before = msgspec.json.encode(made)
    request = inputs.process("ignored", made, SamplingParams(max_tokens=3))
    assert request.external_req_id == "made"
    assert re.fullmatch(r"made-[0-9a-f]{8}", request.request_id)
    assert request.sampling.max_tokens == LIMIT - 2
    assert (request.cache_salt, request.priority, request.arrival_time) == ("s", 4, 1.0)
    assert msgspec.json.encode(made) == before
    without = core_request(sampling_params=None)
    assert inputs.process("x", without, SamplingParams(max_tokens=3)).sampling.max_tokens == 3
    with pytest.raises(InvalidRequestError, match="token id 49152"):
        inputs.process("x", core_request(prompt_token_ids=[49152]), SamplingParams())


def test_contract_B01_ids_that_callers_must_not_set(inputs: InputProcessor) -> None:
    with pytest.raises(ValueError, match="external_req_id"):
        inputs.process("x", core_request(external_req_id="mine"), SamplingParams())
    with pytest.raises(TypeError, match="must be a string"):
        inputs.process(7, [1], SamplingParams())  # type: ignore[arg-type]


def test_an_option_of_a_request_is_said_once(inputs: InputProcessor) -> None:
    """A field of `RequestOptions` is a keyword of `generate`, and travels under its own name unless
    it is used up here."""
    shown = signature(AsyncEngine.generate).parameters
    given: dict[str, Any] = {"tenant": "a", "reasoning_ended": None, "priority": 0}
    assert {name: shown[name].default for name in given} == {**given, "tenant": ""}
    options = set(RequestOptions.__annotations__)
    assert options < set(shown)
    used_up = {"prompt_text", "tokenization_kwargs", "kept"}
    assert options - used_up < set(EngineCoreRequest.__struct_fields__)
    assert inputs.process("r", [1], SamplingParams(), **given).tenant == "a"
    with pytest.raises(TypeError, match="tenent"):
        inputs.process("r", [1], SamplingParams(), tenent="a")


def test_documented_options_are_also_taken_by_position() -> None:
    """`by_name` gives them the names that the signatures show, in the same order."""
    for method, order in ((AsyncEngine.encode, ENCODE_ORDER), (AsyncEngine.add_request, ADD_ORDER)):
        places = [n for n, p in signature(method).parameters.items() if p.kind is POSITIONAL]
        assert tuple(places[-len(order) :]) == order
        assert by_name(order, [1, 2], {"tenant": "a"}) == {order[0]: 1, order[1]: 2, "tenant": "a"}
        with pytest.raises(TypeError, match=order[0]):
            by_name(order, [1], {order[0]: 1})
        with pytest.raises(TypeError, match="by position"):
            by_name(order, range(len(order) + 1), {})
