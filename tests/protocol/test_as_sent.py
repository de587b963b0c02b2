"""What a caller passes has the types that the wire wants, or its field is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from cases import each
from engine_kit.wire import request
from hypothesis import given
from hypothesis import strategies as st

from diptych_protocol import (
    EngineCoreRequest,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    UtilityCall,
    wire,
)
from diptych_protocol.as_sent import (
    MAX_REQUEST_BYTES,
    encode_call,
    ids_of,
    params_as_sent,
    request_as_sent,
)

BEYOND = 2**64
CYCLE: list[Any] = []
CYCLE.append(CYCLE)

SAMPLING: dict[str, Any] = {
    "n": 2.0,
    "temperature": None,
    "top_p": "1",
    "top_k": True,
    "seed": True,
    "max_tokens": 2.5,
    "min_tokens": np.int64(1),
    "stop": [1],
    "stop_token_ids": "12",
    "bad_words": "Paris",
    "logprobs": b"1",
    "logit_bias": {BEYOND: 1.0},
    "output_kind": 9,
    "structured_outputs": {"shape": "round"},
    "detokenize": 1,
    "extra_args": {"deep": CYCLE},
}


@each("field", SAMPLING)
def test_a_sampling_parameter_of_another_type_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params_as_sent(SamplingParams(**{field: SAMPLING[field]}), SamplingParams)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"), [("task", 1), ("dimensions", 2.0), ("normalize", "yes")]
)
def test_a_pooling_parameter_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params_as_sent(PoolingParams(**{field: value}), PoolingParams)
    assert caught.value.param == field


@each(
    ("field", "value", "param"),
    [
        ("priority", 1.5, "priority"),
        ("priority", BEYOND, "priority"),
        ("request_id", "\ud800", "request_id"),
        ("arrival_time", "now", "arrival_time"),
        ("data_parallel_rank", "0", "data_parallel_rank"),
        ("trace_headers", {"traceparent": 1}, "trace_headers"),
        ("lora_request", LoRARequest("a", "one"), "lora_request"),  # type: ignore[arg-type]
        ("mm_features", [1], "mm_features"),
        ("sampling_params", SamplingParams(seed=True), "seed"),
        ("sampling_params", SamplingParams(extra_args={"kv_transfer_params": {"a": BEYOND}}),
         "kv_transfer_params"),
        ("cache_salt", "x" * (MAX_REQUEST_BYTES + 1), "cache_salt"),
    ],
)  # fmt: skip
def test_a_field_of_a_request_is_refused_by_name(field: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_as_sent(msgspec.structs.replace(request("r"), **{field: value}))
    assert caught.value.param == param


def test_what_the_wire_takes_for_the_same_is_the_declared_type_afterwards() -> None:
    given: Any = {"temperature": 1, "stop": ("a", "b"), "output_kind": 2}
    sent = params_as_sent(SamplingParams(**given), SamplingParams)
    assert (sent.temperature, sent.stop) == (1.0, ["a", "b"])
    assert type(sent.temperature) is float
    assert sent.output_kind is RequestOutputKind.FINAL_ONLY


def test_a_single_stop_string_is_one_string() -> None:
    stop: Any = "Paris"
    assert SamplingParams(stop=stop).stop == ["Paris"]
    decoded = msgspec.convert({"stop": ["Paris"]}, SamplingParams)
    assert decoded.stop == ["Paris"]


@given(
    st.sampled_from(EngineCoreRequest.__struct_fields__[3:]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=4,
    ),
)
def test_what_is_let_through_a_core_can_read(field: str, value: Any) -> None:
    message = msgspec.structs.replace(request("r"), **{field: value})
    if field == "prompt_embeds":
        return
    try:
        sent = request_as_sent(message)
    except InvalidRequestError:
        return
    wire.request_decoder.decode(wire.encoder.encode(sent))


def test_the_arguments_of_a_call_must_be_plain() -> None:
    for argument in (object(), BEYOND, "\ud800", CYCLE, "x" * (wire.MAX_MESSAGE_BYTES + 1)):
        with pytest.raises(InvalidRequestError, match="sleep"):
            encode_call(UtilityCall(0, 1, "sleep", [argument]))


def test_ids_are_strings() -> None:
    assert ids_of("abc") == ["abc"]
    assert ids_of(("a", "b")) == ["a", "b"]
    wrong: list[Any] = [5, None, ["a", 5], [["a"]], {1: 2}]
    for ids in wrong:
        with pytest.raises(InvalidRequestError, match="must be a string"):
            ids_of(ids)
