"""The formats of calls by name: the values of the setting `tool_call_parser`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from diptych_frontend.reasoning.formats import name_of
from diptych_frontend.reasoning.harmony import CALL_BEGIN
from diptych_frontend.tool_calls import earlier, llama, marked, mistral, pythonic, qwen3_coder
from diptych_frontend.tool_calls.calls import OpenCall, Tools
from diptych_protocol import EngineClient, InvalidRequestError

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How models of one kind call tools."""

    markers: tuple[str, ...]
    """The beginnings of calls, all with the same first character."""
    open: Callable[[str, Tools], OpenCall]
    """Makes the possible call that begins with a marker."""
    bare: str = ""
    """A call may also begin without a marker, with this character at the beginning of a line;
    `open` gets an empty marker for it."""
    separators: str = ""
    """Characters between one call and the next, beside blanks."""
    has_special_markers: bool = False
    """Whether the markers are special tokens, which are usually absent from the text
    of an answer."""
    prepare: Callable[[Messages, earlier.Declared], Messages] | None = None
    """Converts the messages of a conversation, which is not empty, for the templates of these
    models, unless they take what OpenAI's API has. Tools: empty where the request has none."""
    write: Callable[[list[dict[str, Any]]], str] | None = None
    """Writes calls as these models do, if there are templates that only show texts; from their
    names and arguments."""

    def prepared(
        self, messages: Messages, tools: earlier.Declared, template: str | None
    ) -> Messages:
        """Return the messages of a conversation as the template wants them."""
        if self.prepare is not None:
            messages = self.prepare(messages, tools)
        if self.write is None or template is None or "tool_calls" in template:
            return messages
        write = self.write
        return [
            earlier.with_calls_in_text(message, write) if message.get("tool_calls") else message
            for message in messages
        ]


HERMES: Final = ToolCallFormat(
    (marked.HERMES_BEGIN,), marked.open_hermes, write=marked.write_hermes
)
FORMATS: Final[Mapping[str, ToolCallFormat]] = MappingProxyType(
    {
        "hermes": HERMES,
        "llama": ToolCallFormat(
            llama.MARKERS,
            llama.LlamaCall,
            bare="{",
            separators=llama.SEPARATORS,
            prepare=earlier.one_call_each,
        ),
        "mistral": ToolCallFormat(
            mistral.MARKERS,
            mistral.MistralCalls,
            has_special_markers=True,
            prepare=earlier.short_ids,
        ),
        "granite": ToolCallFormat(
            mistral.OF_GRANITE,
            mistral.MistralCalls,
            has_special_markers=True,
            write=mistral.written_by_granite,
        ),
        "phi4_mini": ToolCallFormat(
            (marked.PHI_BEGIN,),
            marked.open_phi,
            has_special_markers=True,
            prepare=earlier.tools_of_the_system,
            write=marked.write_phi,
        ),
        "deepseek": ToolCallFormat(marked.DEEPSEEK_MARKERS, marked.open_deepseek),
        "pythonic": ToolCallFormat(pythonic.MARKERS, pythonic.open_call, bare="["),
        "qwen3_coder": ToolCallFormat((marked.HERMES_BEGIN,), qwen3_coder.open_call),
        "harmony": ToolCallFormat(
            (CALL_BEGIN,), marked.open_harmony, prepare=earlier.one_thought_each
        ),
    }
)

SIGNS: Final = (
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool|>", "phi4_mini"),
    ("<|tool_call|>", "granite"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("<|start_header_id|>ipython", "llama"),
    ("<|python_tag|>", "llama"),
)
"""Texts that only the chat templates of one kind contain, the surest first."""
_NAMES_TOOLS: Final = re.compile(r"\b(xml_)?tools\b")
"""The variable by which templates get tools, or SmolLM3's name for it. A template that only says
the word is not found out."""


def format_of(tool_call_parser: str, reasoning_parser: str, template: str | None) -> str:
    """Return the name of the format for the setting.

    A model that reasons in channels also calls tools in channels. For other models, `auto` finds
    the format in the chat template; a template without any sign means `hermes`.
    """
    if tool_call_parser != "auto":
        return tool_call_parser
    if name_of(reasoning_parser, template) == "harmony":
        return "harmony"
    return next((name for sign, name in SIGNS if sign in (template or "")), "hermes")


def takes_tools(template: str | None) -> bool:
    """Whether a chat template may show tools to the model. Without a template nothing is known."""
    return template is None or _NAMES_TOOLS.search(template) is not None


def check_takes_tools(template: str | None, model: str, remedy: str) -> None:
    """Raise `InvalidRequestError` for a chat template that would show no tools to the model."""
    if not takes_tools(template):
        raise InvalidRequestError(
            f"the chat template of {model} has no place for tools, so it would not learn of them: "
            f"{remedy}",
            param="tools",
        )


def format_for(engine: EngineClient) -> ToolCallFormat:
    """Return the format of an engine's model."""
    template = engine.renderer.chat_template
    return FORMATS[format_of(engine.tool_call_parser, engine.reasoning_parser, template)]
