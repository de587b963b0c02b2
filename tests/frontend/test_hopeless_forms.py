"""A form that no answer can have is refused before anything is admitted, wherever it comes from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from diptych_frontend.text.schema_circles import too_wide_part
from diptych_frontend.text.structured_outputs import (
    _bytes_as_tokens,
    check_structured_outputs,
    grammar_of,
    parser_limits,
    schema_for_llguidance,
)
from diptych_protocol import InvalidRequestError, StructuredOutputsParams

LOOP = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
LIST = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
TWO = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"b/": {"$ref": "#/$defs/b"}}, "required": ["b/"]},
        "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1},
    },
}
SIDE = {"properties": {"a": {"$ref": "#/$defs/l"}}, "$defs": {"l": {"$ref": "#/$defs/l"}}}
BRANCH = {
    "anyOf": [{"type": "string"}, {"$ref": "#/$defs/l"}],
    "$defs": {"l": LIST | {"items": {"$ref": "#/$defs/l"}}},
}
PARTED = {"allOf": [{"type": "object"}, {"properties": {"x": {"$ref": "#"}}, "required": ["x"]}]}
MAP = {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["k"]}
ANCHORED = {"$ref": "#x", "$defs": {"q": {"$anchor": "x", "$ref": "#x"}}}


def wide(members: int, letter: str = "m") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{letter}{i}": {} for i in range(members)}}


WIDE = wide(600)
HOPELESS_SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "itself": ({"$ref": "#"}, "no answer fits"),
    "a loop": (LOOP, "#/properties/x"),
    "lists of lists": (LIST, "#"),
    "by turns": (TWO, "#/$defs/"),
    "beside others": (SIDE, "#/properties/a"),
    "one way": (BRANCH, "#/$defs/l"),
    "in parts": (PARTED, "#/allOf/1"),
    "of a map": (MAP, "#/additionalProperties"),
    "by name": (ANCHORED, "no answer fits"),
    "a contradiction": ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
    "nothing": ({"type": "string", "pattern": r"[^\s\S]"}, "empty"),
    "as wide as no parser": (WIDE, "# has more than about 500"),
    "wide inside": ({"properties": {"a": {"items": WIDE}}}, "#/properties/a/items has more"),
    "wide behind a reference": (
        {"properties": {"a": {"$ref": "#/$defs/w"}}, "$defs": {"w": WIDE}},
        "#/properties/a has",
    ),
    "wide by alternatives": (
        {"items": {"anyOf": [wide(300), wide(300, "q")]}},
        "#/items has more",
    ),
    "wide behind what is required": (wide(1100) | {"required": ["m0"]}, "# has more"),
}
WAYS = "\n".join(
    ["start: " + " | ".join(f"r{i}" for i in range(3000)), *(f'r{i}: "x{i}"' for i in range(3000))]
)
HOPELESS: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({"json": schema}, says) for name, (schema, says) in HOPELESS_SCHEMAS.items()},
    "no letter": ({"regex": r"[^\s\S]"}, "no answer fits"),
    "no second letter": ({"regex": r"a[^\s\S]"}, "no answer fits"),
    "a rule is itself": ({"grammar": "start: start"}, "no answer fits"),
    "a rule never ends": ({"grammar": 'start: "x" start'}, "no text fits start"),
    "rules never end": ({"grammar": 'start: a | "y"\na: "x" b\nb: a "z"'}, "no text fits a"),
    "a way out of nowhere": (
        {"grammar": 'start: "y" | "x" /[^\\s\\S]/'},
        r"no text fits /[^\s\S]/",
    ),
    "a terminal": ({"grammar": 'start: "y" A?\nA: "x" B\nB: /a/ & /b/'}, "no text fits A"),
    "gbnf": ({"grammar": 'root ::= "a" b\nb ::= "c" b'}, "no text fits"),
    "a wide schema inside": ({"grammar": f'start: "x" %json {json.dumps(WIDE)}'}, "# has more"),
    "as many ways as no parser": ({"grammar": WAYS}, "Current row"),
    "a text in too many pieces": ({"grammar": 'start: "a"~1000000'}, "Too many items"),
    "as many states as no lexer": ({"regex": "((a{100}){100}){100}"}, "too many expressions"),
    "a schema inside": ({"grammar": f'start: "x" %json {json.dumps(LOOP)}'}, "#/properties/x"),
}


@each("name", HOPELESS)
def test_a_form_that_nothing_has_is_refused_by_its_field(name: str) -> None:
    form, says = HOPELESS[name]
    with pytest.raises(InvalidRequestError, match="structured_outputs") as refusal:
        check_structured_outputs(StructuredOutputsParams(**form))
    assert says in str(refusal.value)
    assert refusal.value.param == f"structured_outputs.{next(iter(form))}"


def after_required(members: int) -> dict[str, Any]:
    return wide(members) | {"required": ["m0"]}


def before_required(members: int) -> dict[str, Any]:
    return wide(members) | {"required": [f"m{members - 1}"]}


def two_kinds(members: int) -> dict[str, Any]:
    return {"type": "array", "items": {"anyOf": [wide(members), wide(members, "q")]}}


def kinds(members: int, kind_of: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Alternatives that begin with a required member, and go on with so many others."""
    return {
        "anyOf": [
            {
                "type": "object", "required": ["kind"],
                "properties": {"kind": kind_of(letter)} | wide(members, letter)["properties"],
            }
            for letter in "mq"
        ],
    }  # fmt: skip


def told_apart(members: int) -> dict[str, Any]:
    return kinds(members, lambda letter: {"const": letter})


def alike(members: int) -> dict[str, Any]:
    return kinds(members, lambda _: {"type": "string"})


@pytest.mark.parametrize(
    ("make", "most", "begin"),
    [
        (wide, 500, "{"), (after_required, 1000, '{"m0":"x",'), (before_required, 667, "{"),
        (two_kinds, 250, "[{"), (told_apart, 999, '{"kind":"m",'), (alike, 499, '{"kind":"m",'),
    ],
)  # fmt: skip
def test_objects_are_as_wide_as_llguidance_has_room_for(
    make: Callable[[int], dict[str, Any]], most: int, begin: str
) -> None:
    """The count of too_wide_part is what its parser finds out behind the bracket."""
    for members, fits in ((most, True), (most + 1, False)):
        schema = schema_for_llguidance(make(members), lenient=False)
        assert (too_wide_part(schema) is None) == fits
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = LLMatcher(_bytes_as_tokens(), grammar, log_level=0, limits=parser_limits())
        matcher.try_consume_tokens([*begin.encode()])
        assert ("items" in matcher.get_error()) == (not fits)


POSSIBLE: list[dict[str, Any]] = [
    {"json": {"type": "array", "items": {"$ref": "#"}}},
    {"json": {"type": "object", "properties": {"x": {"$ref": "#"}}}},
    {
        "json": {
            "anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]
        }
    },
    {"json": {"properties": {"x": {"$ref": "#"}}, "required": ["x"]}},  # or a number
    {
        "json": LOOP
        | {
            "properties": {"x": {"type": ["object", "null"], "$ref": "#/$defs/y"}},
            "$defs": {"y": {}},
        }
    },
    {"json": {"enum": [1, "a"]}},
    {"json": {"type": "object", "properties": {"a": False}}},
    {"regex": "a?"},
    {"choice": [f"label {i}" for i in range(5000)]},
    {"grammar": 'start: a // "x" :\na[stop="b", capture="c"]: /(.*)/\nunused: unused'},
    {"grammar": 'start: N ("+" N)* b? [b] b~2..3\n?b: "(" start ")" | "\\"/" -> c\nN: /[0-9]/'},
    {"grammar": "start: N\n%import common.INT -> N\n%ignore /[ ]+/"},
    {"grammar": 'start: "a".."z" | start start | "X"i /\\/"/ %regex {"substring_chars": "ab"}'},
    {"grammar": 'root ::= [a-z]+ ("x" root | "y")*'},
    {"grammar": f'start: "x" %json {json.dumps({"type": "array", "items": {"$ref": "#"}})} start?'},
]


def test_what_llguidance_cannot_compile_is_refused_in_one_line() -> None:
    form = StructuredOutputsParams(grammar='start: a::0\na::_: "x" a::set_bit(0)')
    with pytest.raises(InvalidRequestError, match="assertion failed") as refusal:
        check_structured_outputs(form)
    assert "\n" not in str(refusal.value)


@each("form", POSSIBLE, ids=str)
def test_a_form_that_something_has_is_taken(form: dict[str, Any]) -> None:
    check_structured_outputs(StructuredOutputsParams(**form))


# --- every way to ask -----------------------------------------------------------------------------

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
FUNCTION = {"name": "f", "parameters": LOOP}
TOOLS = [
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": FUNCTION},
]
FORMAT = {"type": "json_schema", "name": "a", "schema": LOOP}
RESPONSE = {"model": "echo", "input": "hi"}
MESSAGE = CHAT | {"max_tokens": 5}
CLAUDE_TOOLS = [{"name": "f", "input_schema": LOOP}]
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOP}}
CONFIG = {"format": {"type": "json_schema", "schema": LOOP}}
FLAT = [{"type": "function", **FUNCTION}]
BY_REGEX = {"structured_outputs": {"regex": r"[^\s\S]"}}
BY_GRAMMAR = {"structured_outputs": {"grammar": "start: start"}}
ASKED: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, CHAT | {"response_format": NAMED}, "response_format"),
    (CHATS, CHAT | BY_REGEX, "structured_outputs.regex"),
    (CHATS, CHAT | {"tools": TOOLS, "tool_choice": "required"}, "tools[1].function.parameters"),
    (
        "/v1/completions",
        {"model": "echo", "prompt": "hi"} | BY_GRAMMAR,
        "structured_outputs.grammar",
    ),
    (RESPONSES, RESPONSE | {"text": {"format": FORMAT}}, "text"),
    (RESPONSES, RESPONSE | {"tools": FLAT, "tool_choice": "required"}, "tools[0].parameters"),
    (MESSAGES, MESSAGE | {"output_config": CONFIG}, "output_config"),
    (
        MESSAGES,
        MESSAGE | {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), ASKED, ids=[f"{p}-{f}" for p, _, f in ASKED])
async def test_every_api_refuses_it_whole_and_streamed(
    http: httpx.AsyncClient, engine: Any, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    response = await http.post(path, json=body | {"stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert field in error["message"]
    assert error.get("param", field) == field
    assert not engine.seen


# --- any form -------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b"])
REFS = st.sampled_from(["#", "#/$defs/a", "#/$defs/b"]).map(lambda ref: {"$ref": ref})
LEAVES = st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"const": 1}]) | REFS | REFS


def larger(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda properties, required: {
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": False,
        },
        st.dictionaries(NAMES, parts, min_size=1),
        st.lists(NAMES, unique=True),
    )  # fmt: skip
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least},
        parts,
        st.integers(0, 2),
    )
    ways = st.lists(parts, min_size=1, max_size=2).map(lambda members: {"anyOf": members})
    return objects | arrays | ways


SCHEMAS = st.builds(
    lambda schema, a, b: {**schema, "$defs": {"a": a, "b": b}},
    *[st.recursive(LEAVES, larger, max_leaves=4)] * 3,
)
SYMBOLS = st.sampled_from(
    ['"x"', '"y"?', "/[^\\s\\S]/", "/[ab]/", "a", "b", "T", "a*", '""', "(a|b)"]
)
BODIES = st.lists(
    st.lists(SYMBOLS, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=3
).map(" | ".join)
GRAMMARS = st.builds(
    lambda start, a, b, t: f"start: {start}\na: {a}\nb: {b}\nT: {t}",
    BODIES,
    BODIES,
    BODIES,
    st.sampled_from(['"t"', "/a/ & /b/", '"x" /[^\\s\\S]/', "/[a-c]+/ & /[b-d]/"]),
)


def walk(form: StructuredOutputsParams, seed: int, *, longest: int = 60) -> None:
    """Go through a form at random, which may not come to a dead end."""
    choice = random.Random(seed)
    matcher = LLMatcher(_bytes_as_tokens(), grammar_of(form), log_level=0, limits=parser_limits())
    for _ in range(longest):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [i for i in range(257) if mask[i // 8] >> i % 8 & 1]
        assert allowed
        if 256 in allowed:
            return
        assert matcher.consume_token(choice.choice(allowed))


@pytest.mark.parametrize("first", [0, 0x70, 0x2020, 0xFDD0])
def test_a_choice_may_have_any_character(first: int) -> None:
    for character in map(chr, range(first, first + 0x30)):
        choice = f'"{character}\\{character}'
        form = StructuredOutputsParams(choice=[choice, "other"])
        check_structured_outputs(form)
        matcher = LLMatcher(_bytes_as_tokens(), grammar_of(form), log_level=0)
        assert matcher.consume_tokens(list(choice.encode())), character
        assert matcher.is_accepting(), character


@settings(max_examples=200)
@given(
    st.builds(lambda schema: StructuredOutputsParams(json=schema), SCHEMAS)
    | st.builds(lambda grammar: StructuredOutputsParams(grammar=grammar), GRAMMARS)
)
def test_an_answer_of_whatever_is_admitted_can_begin_and_go_on(
    form: StructuredOutputsParams,
) -> None:
    try:
        check_structured_outputs(form)
    except InvalidRequestError:
        return
    for seed in range(4):
        walk(form, seed)
