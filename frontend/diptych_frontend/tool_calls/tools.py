"""The tools that a chat may call: the clients' declarations, and the grammar of an answer that
calls them.

A forced call has one form, whatever the model's own format is: `<tool_call>{"name": ...,
"arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec

from diptych_frontend.text.schema_parts import Schema
from diptych_frontend.text.structured_outputs import (
    ANY_OBJECT,
    BEGINS_LATER,
    check_strict,
    decoded,
    schema_for_llguidance,
)
from diptych_frontend.tool_calls.calls import json_of
from diptych_frontend.tool_calls.marked import HERMES_BEGIN, HERMES_END
from diptych_protocol import InvalidRequestError, StructuredOutputsParams

MAX_TOOLS: Final = 128
MAX_FORCED_CALLS: Final = 16
"""Limit on the forced calls of one answer. Without it, a small model that must call something might
never end."""

ANY_ARGUMENTS: Final = schema_for_llguidance(ANY_OBJECT, lenient=False)

ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None for a function without parameters."""
    strict: bool | None = None
    """The schema must declare, for each object, all of its properties as required and no others as
    allowed. Then the arguments of calls fit it."""

    def check(self, field: str) -> None:
        """Raise `InvalidRequestError`, naming the field, for a schema that breaks its
        own `strict`."""
        if self.strict:
            schema = self.parameters or {"type": "object", "additionalProperties": False}
            check_strict(schema, f"function {self.name!r}", field)


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def forced_call(
    tools: list[Tool], choice: ToolChoice | None, *, parallel: bool, lenient: bool
) -> StructuredOutputsParams | None:
    """Return the form of an answer that must call one of the tools; None if it need not.

    parallel: it may call several. lenient: see `StructuredOutputsParams`. Raises
    `InvalidRequestError` for a tool that does not exist.
    """
    called = called_tools(tools, choice)
    if not called:
        return None
    calls = _several(parallel and not isinstance(choice, NamedTool))
    alternatives = _calls((f.name, _arguments(f, lenient)) for _, f in called)
    return StructuredOutputsParams(
        grammar=f"start: {calls}\ncall: {json_of(HERMES_BEGIN)} ({alternatives})\n"
    )


def free_calls(
    tools: list[Tool], *, parallel: bool, lenient: bool
) -> StructuredOutputsParams | None:
    """Return the form of an answer that may have calls anywhere. After the beginning of a call, a
    tool is called, and the arguments of a strict tool fit its schema. None if no tool is strict.

    parallel, lenient: as in `forced_call`.
    """
    if not strict_tools(tools):
        return None
    answer = "call* TEXT" if parallel else "call | TEXT"
    return StructuredOutputsParams(
        grammar=f"start: {answer}\ncall: begin ({_free_calls(tools, lenient)})\n"
        f"begin{BEGINS_LATER}: TEXT {json_of(HERMES_BEGIN)}\nTEXT: /(?s:.*)/\n"
    )


def calls_or_form(
    tools: list[Tool], form: StructuredOutputsParams, field: str, *, parallel: bool, lenient: bool
) -> StructuredOutputsParams:
    """Return the form of an answer that calls tools or has a form of its own, as agents ask for.

    form: that of the message, which `field` asks for. parallel, lenient: as in `forced_call`.
    """
    schema = ANY_OBJECT if form.json is None else decoded(form.json)
    schema = _compiled(schema, field, lenient)
    return StructuredOutputsParams(
        grammar=f"start: {_several(parallel)} | %json {json_of(schema)}\n"
        f"call: {json_of(HERMES_BEGIN)} ({_free_calls(tools, lenient)})\n"
    )


def strict_tools(tools: list[Tool]) -> list[tuple[int, FunctionTool]]:
    """Return the functions whose arguments must fit their schemas, with their positions."""
    return [(index, tool.function) for index, tool in enumerate(tools) if tool.function.strict]


def called_tools(tools: list[Tool], choice: ToolChoice | None) -> list[tuple[int, FunctionTool]]:
    """Return the functions that an answer must choose from, with their positions; none if it need
    not call.

    Raises `InvalidRequestError` for a tool that does not exist.
    """
    if choice is None or choice in ("none", "auto"):
        return []
    if not tools:
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    called = [(index, tool.function) for index, tool in enumerate(tools)]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        called = [(index, function) for index, function in called if function.name == name]
        if not called:
            raise InvalidRequestError(
                f"tool_choice: {name[:64]!r} is not among the tools", param="tool_choice"
            )
    return called


def arguments_of(function: FunctionTool) -> dict[str, Any]:
    """Return the schema of the arguments of a call. Raises `InvalidRequestError`."""
    schema = {"type": "object", **(function.parameters or {"additionalProperties": False})}
    if schema["type"] != "object":
        raise InvalidRequestError(
            f"tools: the parameters of {function.name} must be a schema of type object",
            param="tools",
        )
    return schema


def _several(parallel: bool) -> str:
    """One call, or as many as an answer may have."""
    return f'call ("\\n" call){{0,{MAX_FORCED_CALLS - 1}}}' if parallel else "call"


def _free_calls(tools: list[Tool], lenient: bool) -> str:
    """See `_calls`. The arguments of tools that are not strict may be any."""
    functions = [tool.function for tool in tools]
    return _calls(
        (f.name, _arguments(f, lenient) if f.strict else ANY_ARGUMENTS) for f in functions
    )


def _calls(called: Iterable[tuple[str, Schema]]) -> str:
    """What may follow the beginning of a call, in Lark's notation.

    called: the names of functions, and what their arguments are compiled from.
    """
    after = json_of(f"}}\n{HERMES_END}")
    return "\n    | ".join(
        json_of(f'\n{{"name": "{name}", "arguments": ') + f" %json {json_of(schema)} {after}"
        for name, schema in called
    )


def _arguments(function: FunctionTool, lenient: bool) -> Schema:
    return _compiled(arguments_of(function), "tools", lenient)


def _compiled(schema: Schema, field: str, lenient: bool) -> Schema:
    try:
        return schema_for_llguidance(schema, lenient=lenient)
    except RecursionError:
        raise InvalidRequestError(f"{field}: nested too deeply", param=field) from None
