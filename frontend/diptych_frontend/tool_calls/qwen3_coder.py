"""The format of Qwen3-Coder: a function and its parameters as tags in `<tool_call>`.

`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, with newlines
between the tags and around values. The schema of a parameter says whether its value is a text or
JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from diptych_frontend.tool_calls.calls import FUNCTION_NAME, BetweenMarkers, ParsedCall, Tools
from diptych_frontend.tool_calls.marked import HERMES_BEGIN, HERMES_END
from diptych_protocol import UNREADABLE

FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER_END: Final = "</parameter>"

_PARAMETER: Final = re.compile(r"\s*<parameter=(?P<key>[^<>\s]{1,256})>\n?")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""The template of the model writes these values of an earlier call as Python does."""


def open_call(marker: str, tools: Tools) -> BetweenMarkers:
    """Return the call that begins with the marker."""
    return BetweenMarkers(HERMES_BEGIN, HERMES_END, lambda written: _read(written, tools), FUNCTION)


def _read(written: str, tools: Tools) -> ParsedCall | None:
    written = written.strip()
    if not (written.startswith(FUNCTION) and written.endswith(FUNCTION_END)):
        return None
    name, _, body = written[len(FUNCTION) : -len(FUNCTION_END)].partition(">")
    if not re.fullmatch(FUNCTION_NAME, name):
        return None
    properties = tools.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, msgspec.Raw] = {}
    at = 0
    while (parameter := _PARAMETER.match(body, at)) is not None:
        end = body.find(PARAMETER_END, parameter.end())
        if end < 0:
            return None
        value = body[parameter.end() : end].removesuffix("\n")
        key = parameter["key"]
        arguments[key] = _value(value, schemas.get(key))
        at = end + len(PARAMETER_END)
    if body[at:].strip():
        return None
    return ParsedCall(name, msgspec.json.encode(arguments).decode())


def _value(written: str, schema: Any) -> msgspec.Raw:
    """The value in JSON. What is not JSON is a text, whatever the schema says."""
    kinds = schema.get("type", ()) if isinstance(schema, Mapping) else "string"
    if "string" not in kinds:
        value = _WORDS.get(written.strip(), written)
        try:
            return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(value)))
        except UNREADABLE:
            pass
    return msgspec.Raw(msgspec.json.encode(written))
