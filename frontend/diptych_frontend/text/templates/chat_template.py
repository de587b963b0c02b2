"""A model's chat template: Jinja from the model's files, rendered in a sandbox.

The sandbox limits what a template can access, but not its time and memory: see
`confined_templates`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych_protocol import UNREADABLE, InvalidRequestError

KWARGS: Final = "chat_template_kwargs"
MAX_KWARGS_BYTES: Final = 16 << 10
"""Limit on `chat_template_kwargs`, encoded."""
END_MARK: Final = "\ufdd0\ufdd1 "
"""Marks the end of a message to be continued, while a template renders it. The first characters
occur in no text: Unicode reserves them for use within programs. The blank shows whether the
template strips messages."""
_VARIABLE = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,63}")


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 - the base class types it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations with the names and filters that published templates use."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Raises `InvalidRequestError` if the source is not a template, and `MemoryError`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise  # whoever set the bound knows what it was
        except Exception as exc:
            # What somebody else wrote may also be nested too deeply for a parser.
            raise InvalidRequestError(
                f"the model's chat template is not valid: {exc}", param="model"
            ) from exc
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._globals = frozenset(environment.globals)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Render a conversation; `template_kwargs` are further variables of the template. With
        `continue_final_message` the text ends where the last message ends.

        Raises `InvalidRequestError` for a variable that callers may not set, and if the template
        refuses the conversation, or does not output the message that is to be continued.
        """
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        variables = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
            **self._tokens,
        }
        if template_kwargs:
            check_template_kwargs(template_kwargs, self._globals | variables.keys())
            variables |= template_kwargs
        if tools:
            variables.setdefault("xml_tools", tools)  # SmolLM3's name for them
        try:
            text = self._template.render(variables)
        except MemoryError:
            raise
        except Exception as exc:
            # A template is the model author's program: it may fail in any way a program can.
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {exc}", param="messages"
            ) from exc
        if not continue_final_message:
            return text
        return _begun(text)


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose end can be found in what a template makes of it. Raises
    `InvalidRequestError`."""
    content = message.get("content")
    is_text = isinstance(content, str) and content
    if message.get("role") != "assistant" or message.get("tool_calls") or not is_text:
        raise InvalidRequestError(
            "only a last message of the assistant can go on, with a text and without calls of "
            "tools",
            param="messages",
        )
    return {**message, "content": f"{content}{END_MARK}"}


def _begun(text: str) -> str:
    """What a template made of a conversation, up to the end of the message that goes on.

    A template that trims messages has kept the blanks before the mark, which it would have taken
    away from the message without one. Raises `InvalidRequestError`.
    """
    begun, mark, rest = text.rpartition(END_MARK.rstrip())
    if not mark:
        raise InvalidRequestError(
            "the model's chat template does not show the last message, so no answer can go on "
            "with it",
            param="messages",
        )
    if not (mark + rest).startswith(END_MARK):
        begun = begun.rstrip()
    # Some templates show a message twice.
    return begun.replace(END_MARK, "").replace(END_MARK.rstrip(), "")


def check_template_kwargs(kwargs: object, reserved: Collection[str] = ()) -> None:
    """Raise `InvalidRequestError` unless these are a few plain values with allowed names."""
    if not isinstance(kwargs, dict):
        raise _refused("must be an object")
    for name in kwargs:
        if not (isinstance(name, str) and _VARIABLE.fullmatch(name)):
            raise _refused(f"{str(name)[:64]!r} is no name of a variable: use letters, digits, _")
        if name in reserved:
            raise _refused(f"{name} is set by the server; leave it out")
    try:
        size = len(msgspec.msgpack.encode(kwargs))
    except (TypeError, ValueError, OverflowError, *UNREADABLE) as exc:
        raise _refused(f"use plain values, and integers of 64 bits: {exc}") from None
    if size > MAX_KWARGS_BYTES:
        raise _refused(f"{size} bytes, of which at most {MAX_KWARGS_BYTES} are accepted")


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{KWARGS}: {reason}", param=KWARGS)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, with the arguments of transformers' in their order.

    Jinja's own filter escapes for HTML; a prompt must show the characters as they are.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
