"""What is dear to decode is refused undecoded, and what only looks so is not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.confined.json_cost import (
    MAX_NAMES,
    MAX_VALUES,
    DearJsonError,
    check_json_cost,
)

MANY = 20_000
HARD = (
    "1e300",
    "-1.5E+300",
    "1e-320",
    "1e23",
    "1E+023",
    "9007199254740993.0",
    "0." + "2" * 700,
    "1" * 4000,
)
"""Numbers that take a decoder ten to a thousand times as long as others."""
DEAR: dict[str, bytes] = {
    **{
        f"numbers like {each[:20]}": f"[{','.join([each] * (MANY * 5 // len(each)))}]".encode()
        for each in HARD
    },
    "one number of many digits": b"1" * (1 << 20),
    "a fraction of many digits": b"[0." + b"1" * (1 << 20) + b"]",
    "values": b"[" + b"[]," * MAX_VALUES + b"1]",
    "members": json.dumps({f"name {i}": i for i in range(MAX_NAMES + 1)}).encode(),
    "numbers before a fault": b"[" + b"1e300," * MANY + b'\\"]',
    "numbers behind quotes": b'{"a\\\\":"\\"' + b'","b":[' + b"1e300," * MANY + b"1]}",
    "quotes": b'"":' * (1 << 18),
}
CHEAP: dict[str, Any] = {
    "a text of hard numbers": " ".join(HARD) * 1000,
    "a text of names": "a: b: " * MAX_NAMES,
    "a text of quoted numbers": '"1e300" \\ ' * MANY,
    "token ids": [50256] * (MAX_VALUES - 2),
    "small numbers": [0.125] * MANY,
    "some hard numbers": [1e300] * 200,
    "numbers near zero": [1.5e-5, -2.5e-07, -1000, -12345.5] * 1000,
    "texts": ["1e300"] * MANY,
}


@each("kind", DEAR)
def test_what_is_dear_is_refused(kind: str) -> None:
    with pytest.raises(DearJsonError, match="more than"):
        check_json_cost(DEAR[kind])


@each("kind", CHEAP)
def test_what_only_looks_dear_is_decoded(kind: str) -> None:
    for written in (json.dumps(CHEAP[kind]), json.dumps(CHEAP[kind], indent=1)):
        check_json_cost(written.encode())


@given(
    st.recursive(
        st.text(alphabet='"\\1e3{:', max_size=40) | st.just(1e300),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\e1', max_size=9), inner),
    ),
    st.integers(200, 300),
)
def test_numbers_are_told_from_texts_however_quoted(value: Any, count: int) -> None:
    """Whatever stands in texts before them, 257 hard numbers are too many and 256 are not."""
    around = "x" * 4096
    inside = msgspec.json.encode([around, value]).count(b"e300")
    numbers = count - _hard_numbers(value)
    written = msgspec.json.encode([around, value, [1e300] * numbers])
    assert inside >= _hard_numbers(value)
    if count > 256:
        with pytest.raises(DearJsonError):
            check_json_cost(written)
    else:
        check_json_cost(written)


def _hard_numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = [*value.values()]
    return sum(map(_hard_numbers, value)) if isinstance(value, list) else int(value == 1e300)
