"""Structured outputs: turns a requested form into a grammar for llguidance.

Both ends of the wire use this: the front-end to refuse what can never work, the engine core to
compile it. The result depends on nothing but the form, so both get the same.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from diptych_frontend.confined.json_cost import check_json_cost
from diptych_frontend.text.bounded_schemas import bounded
from diptych_frontend.text.lark_parts import embedded_schemas, part_without_text
from diptych_frontend.text.schema_circles import endless_part, too_wide_part
from diptych_frontend.text.schema_parts import References, Schema, all_parts, dict_at, list_at
from diptych_protocol import InvalidRequestError, StructuredOutputsParams

_SUSPECT: Final = ("(?=", "(?!", "(?<", "\\1", "\\2", "\\3", "\\p", "\\c", "\\u")
"""Only patterns with one of these are tried: the others are read by everybody."""
_TIMES: Final = re.compile(r" \(\d+ times\)$")
_KEYS: Final = "Unimplemented keys: "
_FORMAT: Final = "Unknown format: "
_ONE_OF: Final = "oneOf"
_COUNTS: Final = "min/maxProperties"
MAX_FORM_BYTES: Final = 128 << 10
"""Limit on a form, encoded. The costliest that were found within it compile in 2.5 s."""
STACK_PER_BYTE: Final = 1024
"""The most that was measured is 0.5 kB of stack per byte of a form in which each part contains the
next one. Only stack that is used takes memory."""
MAX_LEXER_STATES: Final = 50_000
"""Limit on the lexer states of one grammar. Each takes 1 to 2 kB, so this bounds the memory that
the costliest grammar may hold."""
MAX_REASON_CHARS: Final = 500
LENIENT_HELPS: Final = 'json_schemas: "lenient" leaves out what cannot be enforced'
REMEMBERED_VERDICTS: Final = 128
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,32}"
"""Pattern of the white space between the tokens of JSON. Every document can be written within this
limit. Without one, a small model may emit blanks until its tokens are used up."""
ANY_OBJECT: Final = {"type": "object"}
FIELD: Final = "structured_outputs"
BEGINS_LATER: Final = "[lazy]"
"""What a grammar contains if its answer is free until a certain text comes."""
_RULE_THAT_BEGINS_LATER: Final = re.compile(rf"^\w+{re.escape(BEGINS_LATER)}:", re.MULTILINE)
"""A schema in a grammar is one line, and its texts may say anything."""
NO_TEXT: Final = "NoExtension"
"""llguidance's error if neither text nor the end may follow."""
NO_DETAILS: Final = "\n<non-verbose/>"
PROBED_BYTES: Final = 8
"""So far an answer is written before its form is admitted. A parser whose table for a rule is too
large for its limits says so when the rule's first texts have come."""
BACKTRACE: Final = "\n<backtrace>"
"""The rest of an error of llguidance from here on describes this machine, not the grammar."""
NOTHING_FITS: Final = "no answer fits it"
TOO_WIDE: Final = "has more than about 500 members in a row that may be left out: require some"
Verdict = tuple[str, tuple[str, ...]]
"""Why no answer can have a form (empty if one can), and what of the form is not enforced."""


def loosened(schema: Schema) -> tuple[Schema, list[str]]:
    """Return a schema without what llguidance refuses even when lenient, and the removed keywords.

    Raises `RecursionError`.
    """
    # llguidance can ignore keywords that it does not support, and warns of each. It still refuses
    # references to other documents, and patterns that it cannot read.
    references = References(schema)
    flaws: dict[int, str] = {}
    for _, part in all_parts(schema):
        if "$ref" in part and references.target(part) is None:
            flaws[id(part)] = "$ref"
        elif isinstance(part.get("pattern"), str) and not _is_readable(part["pattern"]):
            flaws[id(part)] = "pattern"
    return (_without(schema, flaws), sorted(set(flaws.values()))) if flaws else (schema, [])


def left_out(warnings: Sequence[str]) -> list[str]:
    """Return the keywords that llguidance warns of."""
    names: list[str] = []
    for warning in warnings:
        told = _TIMES.sub("", warning.partition("\n")[0])
        if told.startswith(_KEYS):
            names += json.loads(told.removeprefix(_KEYS))
        elif told.startswith(_FORMAT):
            names.append(f"format {told.removeprefix(_FORMAT)}")
        elif told.startswith(_ONE_OF):
            names.append("oneOf")
        elif told.startswith(_COUNTS):
            names += ["minProperties", "maxProperties"]
        else:
            names.append(told)
    return names


def _is_readable(pattern: str) -> bool:
    if not any(sign in pattern for sign in _SUSPECT):
        return True
    schema = json.dumps({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def _without(value: Any, flaws: dict[int, str]) -> Any:
    if isinstance(value, list):
        return [_without(item, flaws) for item in value]
    if not isinstance(value, dict):
        return value
    gone = flaws.get(id(value))
    return {key: _without(inner, flaws) for key, inner in value.items() if key != gone}


def parser_limits() -> LLParserLimits:
    """Return the limits on compiling and matching one grammar: the library's defaults, except for
    memory."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def check_structured_outputs(form: StructuredOutputsParams, field: str = FIELD) -> tuple[str, ...]:
    """Raise `InvalidRequestError`, naming the field, unless the form can be compiled, and an answer
    of any model that has the form can begin, continue and end. Returns the keywords of a schema
    that are not enforced; there are none unless the form is lenient.

    It takes up to about 100 ms for a large schema that was not used recently, and releases the GIL.
    """
    form.check()
    if field == FIELD:
        field = f"{FIELD}.{form.kind}"
    reason, not_enforced = _verdict(encode_form(form, field))
    if not reason:
        return not_enforced
    reason = reason[:MAX_REASON_CHARS]
    if form.json is not None and not form.lenient:
        looser = msgspec.structs.replace(form, lenient=True)
        if not _verdict(encode_form(looser, field))[0]:
            reason += f"; {LENIENT_HELPS}"
    raise _refuse(reason, field)


def encode_form(form: StructuredOutputsParams, field: str = "structured_outputs") -> bytes:
    """Return the form as bytes, which identify equal forms. Raises `InvalidRequestError` if the
    form is too large or too deeply nested."""
    try:
        encoded = msgspec.msgpack.encode(form)
    except RecursionError:
        raise _refuse("nested too deeply", field) from None
    except OverflowError:
        raise _refuse("an integer beyond 64 bits", field) from None
    except UnicodeEncodeError:
        raise _refuse("a lone surrogate, which is not a character", field) from None
    if len(encoded) > MAX_FORM_BYTES:
        reason = f"{len(encoded)} bytes, of which at most {MAX_FORM_BYTES} are accepted"
        raise _refuse(reason, field)
    return encoded


def grammar_of(form: StructuredOutputsParams) -> str:
    """Return the form in llguidance's own notation. Raises `ValueError` if it is malformed."""
    if form.choice is not None:
        # One terminal: as rules, no more than 2,000 texts would fit into a row of the parser.
        texts = " | ".join(map(_as_literal, form.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.grammar is not None:
        return grammar_from("grammar", form.grammar)
    schema = ANY_OBJECT if form.json is None else decoded(form.json)
    prepared = schema_for_llguidance(schema, lenient=form.lenient)
    return LLMatcher.grammar_from_json_schema(json.dumps(prepared))


def _as_literal(text: str) -> str:
    """A text as a grammar has it: as in JSON, which leaves this control character as it is."""
    return msgspec.json.encode(text).decode().replace("\x7f", r"\u007f")


def is_json(form: StructuredOutputsParams) -> bool:
    """Whether an answer is JSON, or contains JSON as the arguments of a forced call. An answer that
    begins with free text is not: there, quotes and digits mean nothing."""
    grammar = form.grammar or ""
    embedded = "%json" in grammar and not _RULE_THAT_BEGINS_LATER.search(grammar)
    return form.json is not None or form.json_object or embedded


def schema_for_llguidance(schema: Schema, *, lenient: bool) -> Schema:
    """Return a schema as it is compiled: with limits, and with llguidance's options."""
    if lenient:
        schema, _ = loosened(schema)
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return bounded(schema) | {"x-guidance": options}


def decoded(schema: str | Schema) -> Schema:
    """Return a schema as an object. Raises `ValueError` if it is none."""
    value: Any = schema
    if isinstance(schema, str):
        check_json_cost(schema.encode())
        value = msgspec.json.decode(schema)
    if not isinstance(value, dict):
        raise ValueError("a schema must be a JSON object")
    return value


@functools.lru_cache(REMEMBERED_VERDICTS)
def _verdict(encoded: bytes) -> Verdict:
    """What is to be said of a form."""
    with deep_executor("form") as executor:
        return executor.submit(_judged, encoded).result()


def _judged(encoded: bytes) -> Verdict:
    try:
        form = msgspec.msgpack.decode(encoded, type=StructuredOutputsParams)
        grammar = grammar_of(form)
        matcher = _begun(grammar)
        reason = reason_of(matcher) or _flaw_inside(form, grammar) or _flaw_behind(matcher)
        gone = loosened(decoded(form.json))[1] if form.lenient and form.json is not None else []
        gone += left_out(matcher.get_grammar_warnings()) if form.lenient else []
    except (ValueError, RecursionError) as exc:
        return str(exc) or "nested too deeply", ()
    return reason, tuple(dict.fromkeys(gone))


def _begun(grammar: str) -> LLMatcher:
    """A grammar with its first mask."""
    matcher = LLMatcher(_bytes_as_tokens(), grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Return why a grammar cannot be used, after its first mask; empty if it can."""
    reason = matcher.get_error().partition(BACKTRACE)[0].removesuffix(NO_DETAILS)
    return NOTHING_FITS if reason.startswith(NO_TEXT) else reason


def _flaw_inside(form: StructuredOutputsParams, grammar: str) -> str:
    """A part of a form that no text fits, or no parser has room for: an answer that came there
    could not go on, or not end."""
    schemas = []
    if form.json is not None:
        schemas = [schema_for_llguidance(decoded(form.json), lenient=form.lenient)]
    if form.grammar is not None:
        part = part_without_text(grammar, lambda lark: reason_of(_begun(lark)) != NOTHING_FITS)
        if part is not None:
            return f"no text fits {part}"
        schemas = embedded_schemas(grammar)
    endless = next(filter(None, map(endless_part, schemas)), None)
    if endless:
        return f"no value fits {endless}, which always contains itself"
    wide = next(filter(None, map(too_wide_part, schemas)), None)
    return f"the object {wide} {TOO_WIDE}" if wide else ""


def _flaw_behind(matcher: LLMatcher) -> str:
    """Why an answer that has begun could not go on, and so what a client would hear instead."""
    for _ in range(PROBED_BYTES):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_stopped() or not allowed:
            break
        # White space leads nowhere.
        matcher.consume_token(min(allowed, key=lambda byte: (byte <= ord(" "), byte)))
    return reason_of(matcher)


@functools.cache
def _bytes_as_tokens() -> LLTokenizer:
    """Texts byte by byte: what no text of bytes fits, no text of any vocabulary's tokens does."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


class _Bytes:
    """The vocabulary of all bytes, and of an end."""

    tokens = (*(bytes((value,)) for value in range(256)), b"<end>")
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _refuse(reason: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}", param=field)


_creating = threading.Lock()


def deep_executor(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread, which can compile any form that is not too large.

    Its stack is large, because llguidance recurses along chains of rules and references, and a
    stack overflow ends the process.
    """
    executor = ThreadPoolExecutor(1, name)
    with _creating:  # the size is one of the process, for threads that start
        before = threading.stack_size(STACK_PER_BYTE * MAX_FORM_BYTES)
        try:
            executor.submit(lambda: None)  # starts the thread
        finally:
            threading.stack_size(before)
    return executor


def check_strict(schema: Schema, of: str, field: str) -> None:
    """Raise `InvalidRequestError` unless a schema is one of an object, and each of its objects
    requires all of its properties and allows no others.

    of: the owner of the schema, in the words of OpenAI's errors. field: the field that contains it.
    """
    flaw = _flaw(schema)
    if flaw is not None:
        raise InvalidRequestError(
            f"Invalid schema for {of}: {flaw} Leave out `strict` if that is not wanted.",
            param=field,
        )


def _flaw(schema: Schema) -> str | None:
    if schema.get("type") != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got {schema.get('type')!r}."
    for path, part in all_parts(schema):
        if not _is_of_object(part):
            continue
        context = f"In context={path!r},"
        if part.get("additionalProperties") is not False:
            return f"{context} 'additionalProperties' is required to be supplied and to be false."
        required = list_at(part, "required")
        missing = next((n for n in dict_at(part, "properties") if n not in required), None)
        if missing is not None:
            return (
                f"{context} 'required' is required to be supplied and to be an array including "
                f"every key in properties. Missing {missing!r}."
            )
    return None


def _is_of_object(schema: Schema) -> bool:
    kind = schema.get("type")
    return (
        kind == "object" or "properties" in schema or (isinstance(kind, list) and "object" in kind)
    )
