"""The requests of the Messages API, as strict msgspec structs.

As in `openai/api_types.py`, a field is honoured, harmless and ignored, or known and refused unless
its value asks for nothing (`NEUTRAL`). A field that is none of these is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from diptych_frontend.openai.api_types import MAX_MESSAGES, CacheSalt, Int64, Neutral
from diptych_frontend.tool_calls.tools import MAX_TOOLS, ToolName
from diptych_protocol import JsonSchemas
from diptych_protocol.sampling import MAX_STOP_CHARS, MAX_STOPS

StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class _Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A block of content."""

    cache_control: Any = None
    """Ignored: every prefix is cached."""


class TextBlock(_Block, tag="text"):
    text: str
    citations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None


class Base64Source(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="base64"
):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(_Block, tag="image"):
    source: Base64Source


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    """Ignored."""


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str | None = None
    """Ignored: nothing here is signed."""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    """Left out of the prompt, because only its maker can read it."""

    data: str


Block = (
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], msgspec.Meta(min_length=1)]


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    NEUTRAL: ClassVar[Neutral] = {
        "type": ("custom",),
        "defer_loading": (False,),
        "allowed_callers": (["direct"], []),
        "input_examples": ([],),
    }

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Ignored: a forced call always fits its schema."""
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    """Ignored: a call comes as a whole."""

    type: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    input_examples: Any = None


class _Choice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    disable_parallel_tool_use: bool = False


class AutoChoice(_Choice, tag="auto"):
    pass


class AnyChoice(_Choice, tag="any"):
    pass


class ToolChoice(_Choice, tag="tool"):
    name: str


class NoChoice(_Choice, tag="none"):
    pass


class _Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """How the model may reason."""


class Thinking(_Thinking, tag="enabled"):
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=2**63 - 1)]
    """Not enforced: only `max_tokens` limits an answer."""
    display: Literal["summarized", "omitted"] | None = None


class AdaptiveThinking(_Thinking, tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class NoThinking(_Thinking, tag="disabled"):
    pass


class JsonSchemaFormat(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    NEUTRAL: ClassVar[Neutral] = {"effort": (), "task_budget": ()}

    format: JsonSchemaFormat | None = None

    effort: Any = None
    task_budget: Any = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    NEUTRAL: ClassVar[Neutral] = {
        "context_management": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Thinking | AdaptiveThinking | NoThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    """Ignored: every prefix is cached."""

    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    NEUTRAL: ClassVar[Neutral] = CountTokensRequest.NEUTRAL | {
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
        "service_tier": ("auto", "standard_only"),
    }

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopSequence], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None
    json_schemas: JsonSchemas | None = None
    """See `GenerationRequest`."""

    metadata: Any = None
    """Ignored."""

    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
