"""The format of Llama 4 and Llama 3.2: `[name(key=value, ...), ...]`, a list of calls in Python,
with or without `<|python_start|>` and `<|python_end|>` around it.

It is parsed as Python but never run: values are literals.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import Any, Final

from diptych_frontend.tool_calls.calls import (
    FUNCTION_NAME,
    Marker,
    OpenCall,
    ParsedCall,
    Tools,
    WrittenCall,
    called,
    may_begin,
)
from diptych_frontend.tool_calls.json_end import BracketedCalls, PythonEnd

START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
MARKERS: Final = (START, END)
MAX_LIST: Final = 64 << 10
"""A longer list remains text, because parsing it would take too long."""
_JSON_NAMES: Final = {"true": True, "false": False, "null": None}
"""Models mix these up with Python's."""


class _NotLiteralError(Exception):
    """There is something that would have to be run."""


class PythonicCalls(BracketedCalls):
    """See `OpenCall`."""

    BRACKET = "["
    END = PythonEnd

    def _read(self, written: str) -> list[ParsedCall] | None:
        return calls_in(written)

    def unfinished(self, text: str) -> list[ParsedCall] | None:
        is_call = self._marker or may_begin(text, (f"[{name}(" for name in self._tools))
        return [] if is_call else None


def calls_in(written: str) -> list[ParsedCall] | None:
    """Return the calls of a list; None if it is anything else."""
    if len(written) > MAX_LIST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about what a model wrote
            found = ast.parse(written.strip(), mode="eval").body
        if not isinstance(found, ast.List) or not found.elts:
            return None
        return [_call(each) for each in found.elts]
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError, _NotLiteralError):
        return None


def _call(node: ast.expr) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args:
        raise _NotLiteralError
    name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    if not re.fullmatch(FUNCTION_NAME, name):
        raise _NotLiteralError
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise _NotLiteralError
        arguments[keyword.arg] = _value(keyword.value)
    return called(WrittenCall(name, arguments))


def _value(node: ast.expr) -> Any:
    """What a literal stands for, as JSON has it."""
    match node:
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_value(node.operand)
    raise _NotLiteralError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _NotLiteralError


def open_call(marker: str, tools: Tools) -> OpenCall:
    """Return the calls that begin with the marker; an empty marker stands for a list
    without one."""
    return Marker(END) if marker == END else PythonicCalls(marker, tools)
