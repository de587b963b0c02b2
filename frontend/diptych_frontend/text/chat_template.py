"""A model's chat template: Jinja from the model's files, rendered in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych_protocol import InvalidRequestError


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - the base class types it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations with the names and filters that published templates rely on."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Raises `InvalidRequestError` if the source is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise InvalidRequestError(
                f"the model's chat template is not valid: {exc}", param="model"
            ) from exc
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Raises `InvalidRequestError` if the template refuses the conversation."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._tokens,
            )
        except Exception as exc:
            # A template is the model author's program: it may fail in any way a program can.
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {exc}", param="messages"
            ) from exc


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML; a prompt must show the characters as they are.
    return json.dumps(value, ensure_ascii=False, indent=indent)
