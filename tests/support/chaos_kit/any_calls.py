"""Calls of an engine in which anything stands anywhere.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from diptych_protocol import (
    Array,
    EngineCoreRequest,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)

Target = tuple[str, str]
"""What a value is put into: which object of a call, and which field of it."""
Call = dict[Target, Any]


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    """A list that holds itself."""
    value: list[Any] = []
    value.append(value)
    return value


TEXTS: Final = (
    "", "Paris", "\0", "a\0b", "\ud800", "\U0001f600", "x" * 5000, "y" * 100_000, "embed", "nan",
    "../..", "/dev/zero", "{{", "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
)  # fmt: skip
NUMBERS: Final = (
    0, 1, 2, 3, -1, 16, 17, 20, 64, 128, 129, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**63,
    2**64 - 1, 2**64, -(2**64), 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, 2.5, 1e-300, 1e300,
    float("inf"), float("-inf"), float("nan"), True, False,
)  # fmt: skip
STRANGE: Final[tuple[Any, ...]] = (
    None, b"", b"bytes", object(), object, ..., 1j, {1, 2}, (1, 2), range(3), bytearray(b"x"),
    nested(50), nested(100_000), endless(), lambda: None, np.int64(3), np.float64(0.5),
    np.zeros(3), SamplingParams(), SamplingParams(max_tokens=2), PoolingParams(),
    StructuredOutputsParams(regex="a"), LoRARequest("a", 1, "/nowhere"),
    Array("float32", (1,), bytes(4)), Array("float32", (3, 32), bytes(384)), [1, 2, 3], [[1], [2]],
    ["a", "b"], {"a": "b"}, {1: 2}, {1: 1.0}, {2**70: 1.0}, {"kv_transfer_params": {"a": 2**70}},
    {"kv_transfer_params": {"do_remote_decode": "yes"}}, {"minimum": 2**70}, {"regex": "a"},
)  # fmt: skip
PLAIN: Final = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=()), max_size=8),
)  # fmt: skip
"""Scalars that JSON has, and then some."""


def trees(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and dicts of leaves, not very deep."""
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=5,
    )


ANYTHING: Final = st.one_of(
    PLAIN,
    st.sampled_from(STRANGE),
    trees(PLAIN | st.binary(max_size=8), st.integers() | st.sampled_from(TEXTS)),
)
JSON: Final = trees(PLAIN, st.sampled_from([text for text in TEXTS if len(text) < 100]))

OPTIONS: Final = (
    "request_id", "prompt", "params", "lora_request", "tokenization_kwargs", "trace_headers",
    "priority", "prompt_text",
)  # fmt: skip
"""Arguments that every client takes."""
TARGETS: Final[list[Target]] = [
    *(("options", name) for name in OPTIONS),
    *(("sampling", name) for name in SamplingParams.__struct_fields__),
    *(("pooling", name) for name in PoolingParams.__struct_fields__),
    *(("form", name) for name in StructuredOutputsParams.__struct_fields__),
    *(("lora", name) for name in LoRARequest.__struct_fields__),
    *(("request", name) for name in EngineCoreRequest.__struct_fields__),
    *(
        ("prompt", name)
        for name in ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt",
                     "multi_modal_data", "\ud800")
    ),
]  # fmt: skip


def calls(*more: Target) -> st.SearchStrategy[Call]:
    """Sound calls but for one or two values."""
    targets = st.sampled_from([*TARGETS, *more])
    return st.dictionaries(targets, ANYTHING, min_size=1, max_size=2)


def arguments(call: Call) -> dict[str, Any]:
    """What `add_request` of a client is called with."""
    params: Any = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, **_of(call, "sampling")})
    if form := _of(call, "form"):
        params.structured_outputs = StructuredOutputsParams(**form)
    if pooling := _of(call, "pooling"):
        params = PoolingParams(**pooling)
    made = {"request_id": "r", "prompt": [1, 2, 3], "params": params}
    if prompt := _of(call, "prompt"):
        made["prompt"] = {"prompt_token_ids": [1, 2, 3], **prompt}
    if lora := _of(call, "lora"):
        fields = {"lora_name": "a", "lora_int_id": 1, "lora_path": "/nowhere", **lora}
        made["lora_request"] = LoRARequest(**fields)
    if request := _of(call, "request"):
        empty: dict[str, Any] = dict.fromkeys(EngineCoreRequest.__struct_fields__[:10])
        sound = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "arrival_time": 0.0}
        made["prompt"] = EngineCoreRequest(**{**empty, **sound, **request})
    return {**made, **_of(call, "options")}


def _of(call: Call, target: str) -> dict[str, Any]:
    return {name: value for (kind, name), value in call.items() if kind == target}


def may_fail_in_the_engine(call: Call) -> bool:
    """Adapters are looked for there, and it alone judges what only front-ends send."""
    return any(kind in ("lora", "request") or name == "lora_request" for kind, name in call)
