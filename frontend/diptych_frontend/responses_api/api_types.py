"""The requests of the Responses API, as strict msgspec structs.

Their fields are honoured, but for those that `RULES` calls taken. `RULES` also has the known fields
that are ignored or refused; see `openai/field_rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from diptych_frontend.openai.api_types import (
    ALL_CACHED,
    MAX_MESSAGES,
    MAX_METADATA,
    NO_VERBOSITY,
    NOBODY_ASKS,
    ONE_TIER,
    PROCESSOR,
    MetadataText,
    SharedFields,
    VllmRequest,
)
from diptych_frontend.openai.errors import from_decode_error
from diptych_frontend.openai.field_rules import Rules, ignored, leave_out, refused, taken
from diptych_frontend.openai.response_format import JsonObjectFormat, TextFormat
from diptych_frontend.reasoning.request_options import Effort
from diptych_frontend.tool_calls.tools import MAX_TOOLS, ToolName
from diptych_protocol import InvalidRequestError

Status = Literal["in_progress", "completed", "incomplete"]


class _Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of a message's content."""

    prompt_cache_breakpoint: Any = None
    """Ignored: every prefix is cached."""


class InputText(_Part, tag="input_text"):
    text: str


class InputImage(_Part, tag="input_image"):
    image_url: str
    """A `data:` URL."""
    detail: Literal["auto", "low", "high", "original"] | None = None
    """Ignored."""
    file_id: None = None


class OutputText(_Part, tag="output_text"):
    text: str
    annotations: Any = None
    """Ignored."""
    logprobs: Any = None
    """Ignored."""


class ReasoningText(_Part, tag="reasoning_text"):
    text: str


class SummaryText(_Part, tag="summary_text"):
    text: str


class _Item(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """One thing that was said. What an answer brings along is taken back."""

    id: str | None = None
    status: Status | None = None


class Message(_Item, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText]
    phase: Any = None
    """Ignored."""


class FunctionCall(_Item, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    caller: Any = None
    """Ignored."""


class FunctionCallOutput(_Item, tag="function_call_output"):
    call_id: str
    output: str | list[InputText | InputImage]
    name: str | None = None
    """Ignored."""
    caller: Any = None
    """Ignored."""


class ReasoningItem(_Item, tag="reasoning"):
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    """Left out of the prompt, because only its maker can read it."""


Item = Message | FunctionCall | FunctionCallOutput | ReasoningItem


class _Items(msgspec.Struct):
    input: list[Item]


class FunctionTool(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    RULES: ClassVar[Rules] = {
        "defer_loading": refused("tools are the client's", False),
        "allowed_callers": refused("tools are the client's", ["direct"], []),
        "output_schema": ignored("not checked"),
    }

    name: ToolName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """The schema must declare, for each object, all of its properties as required and no others as
    allowed."""


class FunctionChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    name: str


class JsonSchemaFormat(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    """The schema must declare, for each object, all of its properties as required and no others as
    allowed."""


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    RULES: ClassVar[Rules] = {"verbosity": ignored(NO_VERBOSITY, "medium")}

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat = msgspec.field(
        default_factory=TextFormat
    )


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    RULES: ClassVar[Rules] = {
        "context": ignored("the template decides", "auto"),
        "mode": ignored("there is one mode", "standard"),
    }

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: the reasoning is returned as it is."""
    generate_summary: Any = None
    """Ignored."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Ignored: events are never padded."""


class ResponsesRequest(SharedFields, kw_only=True):
    """Body of POST /v1/responses."""

    RULES: ClassVar[Rules] = {
        **VllmRequest.RULES,
        "user": taken(NOBODY_ASKS),
        "safety_identifier": taken(NOBODY_ASKS),
        "prompt_cache_options": taken(ALL_CACHED),
        "service_tier": ignored(ONE_TIER, "auto", "default"),
        "include": ignored("nothing more is offered", [], ["reasoning.encrypted_content"]),
        "access_programs": refused("tools are the client's"),
        "background": refused("use a batch", False),
        "context_management": refused("conversations stay whole", []),
        "conversation": refused("use previous_response_id"),
        "image": refused("answers are texts"),
        "max_tool_calls": refused("tools are the client's"),
        "moderation": refused("not offered"),
        "prompt": refused("prompts are not stored"),
        "top_logprobs": refused("use chats", 0),
        "truncation": refused("conversations stay whole", "disabled"),
        "kv_transfer_params": refused("use chats"),
        "enable_response_messages": refused("not offered", False),
        "previous_input_messages": refused("use previous_response_id"),
        "mm_processor_kwargs": refused(PROCESSOR, {}),
        "media_io_kwargs": refused(PROCESSOR, {}),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """Whether the answer is kept for later requests; it is unless this is false."""
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, MetadataText], msgspec.Meta(max_length=MAX_METADATA)] | None = (
        None
    )

    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def items(self) -> list[Item]:
        """Return the items of the input. Raises `InvalidRequestError` naming the part."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        if not 0 < len(self.input) <= MAX_MESSAGES:
            raise InvalidRequestError(
                f"input has {len(self.input)} items; send 1 to {MAX_MESSAGES}", param="input"
            )
        # Clients leave the type of a message out.
        typed = [{"type": "message", **item} for item in self.input]
        return as_items(typed)


def as_items(values: list[Any]) -> list[Item]:
    """Return items from plain values. Raises `InvalidRequestError` naming the part."""
    try:
        try:
            return msgspec.convert({"input": values}, _Items).input
        except msgspec.ValidationError:
            if not leave_out({"input": values}, _Items, refuses_unknown=True):
                raise
            return msgspec.convert({"input": values}, _Items).input
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        raise from_decode_error(exc, _Items) from exc
