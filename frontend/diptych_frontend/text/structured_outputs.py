"""Structured outputs: from the form that a caller wants to a grammar for llguidance.

Both ends of the wire use this: the front-end to refuse what can never work, the engine core to
compile it. What is made here depends on nothing but the form, so both make the same.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, grammar_from

from diptych_protocol import InvalidRequestError, StructuredOutputsParams

MAX_FORM_BYTES: Final = 64 << 10
MAX_LEXER_STATES: Final = 50_000
"""Limit on the lexer states of one grammar. Each takes 1 to 2 kB, so this bounds the memory that
the costliest grammar may hold."""
MAX_REASON_CHARS: Final = 500
REMEMBERED_VERDICTS: Final = 128
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,32}"
"""Pattern of the white space between the tokens of JSON. Every document can be written within this
bound; without one, a small model may emit blanks until its tokens are used up."""
ANY_OBJECT: Final = b'{"type":"object"}'


def parser_limits() -> LLParserLimits:
    """What compiling and matching one grammar may cost; the library's defaults, but for memory."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def check_structured_outputs(
    form: StructuredOutputsParams, field: str = "structured_outputs"
) -> None:
    """Raise `InvalidRequestError`, naming the field, unless the form can be compiled.

    Takes up to some 100 ms for a large schema that was not seen lately; releases the GIL.
    """
    form.check()
    reason = _verdict(encode_form(form, field))
    if reason:
        raise _refuse(reason[:MAX_REASON_CHARS], field)


def encode_form(form: StructuredOutputsParams, field: str = "structured_outputs") -> bytes:
    """The form as bytes, used as a key to recognise equal forms. Raises `InvalidRequestError` if
    the form is too large or too deeply nested."""
    try:
        encoded = msgspec.msgpack.encode(form)
    except RecursionError:
        raise _refuse("nested too deeply", field) from None
    except OverflowError:
        raise _refuse("an integer beyond 64 bits", field) from None
    if len(encoded) > MAX_FORM_BYTES:
        reason = f"{len(encoded)} bytes, of which at most {MAX_FORM_BYTES} are accepted"
        raise _refuse(reason, field)
    return encoded


def grammar_of(form: StructuredOutputsParams) -> str:
    """The form in llguidance's own notation. Raises `ValueError` if it is malformed."""
    if form.choice is not None:
        choices = [msgspec.json.encode(choice).decode() for choice in form.choice]
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.grammar is not None:
        return grammar_from("grammar", form.grammar)
    return _from_schema(ANY_OBJECT if form.json is None else form.json)


def _from_schema(schema: bytes | str | dict[str, Any]) -> str:
    if isinstance(schema, dict):
        schema = msgspec.json.encode(schema)
    text = schema.decode() if isinstance(schema, bytes) else schema
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})


@functools.lru_cache(REMEMBERED_VERDICTS)
def _verdict(encoded: bytes) -> str:
    """Why a form cannot be compiled; empty if it can."""
    try:
        grammar = grammar_of(msgspec.msgpack.decode(encoded, type=StructuredOutputsParams))
    except (ValueError, RecursionError) as exc:
        return str(exc) or "nested too deeply"
    return LLMatcher.validate_grammar(grammar, limits=parser_limits())


def _refuse(reason: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}", param=field)
