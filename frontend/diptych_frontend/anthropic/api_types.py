"""The requests of the Messages API, as strict msgspec structs.

Their fields are honoured, but for those that `RULES` calls taken. `RULES` also has the known fields
that are ignored or refused; see `openai/field_rules.py`.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from diptych_frontend.openai.api_types import (
    MAX_MESSAGES,
    NOBODY_ASKS,
    ONE_TIER,
    CacheSalt,
    Int64,
    VllmRequest,
)
from diptych_frontend.openai.field_rules import Rules, ignored, refused, taken
from diptych_frontend.openai.kv_hints import KvHints
from diptych_frontend.reasoning.request_options import Effort
from diptych_frontend.tool_calls.tools import MAX_TOOLS, ToolName
from diptych_protocol import JsonSchemas
from diptych_protocol.sampling import MAX_STOP_CHARS, MAX_STOPS

StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class _Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A block of content."""

    cache_control: Any = None
    """Every prefix is cached; a mark anywhere says that a next turn will come."""


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
    RULES: ClassVar[Rules] = {
        "type": refused("tools are the client's", "custom"),
        "defer_loading": refused("tools are the client's", False),
        "allowed_callers": refused("tools are the client's", ["direct"], []),
        "input_examples": refused("write them into the description", []),
    }

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Ignored: a forced call always fits its schema."""
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    """Ignored: a call comes as a whole."""


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
    RULES: ClassVar[Rules] = {"task_budget": refused("use max_tokens")}

    effort: Effort | None = None
    format: JsonSchemaFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    RULES: ClassVar[Rules] = {
        "context_management": ignored("conversations stay whole"),  # Claude Code always sends it
        "mcp_servers": refused("tools are the client's", []),
        "speed": ignored(ONE_TIER, "standard"),
        "thread": refused("messages are not stored"),
        "compaction": refused("conversations stay whole"),
    }

    model: str
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Thinking | AdaptiveThinking | NoThinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, as vLLM takes them."""
    output_config: OutputConfig | None = None
    cache_control: Any = None

    def cache_retention(self) -> str | None:
        """Return for how long `cache_control` says anywhere that the cache is needed, as OpenAI's
        `prompt_cache_retention`; None if it is not set."""
        system = self.system if isinstance(self.system, list) else []
        turns = [turn.content for turn in self.messages if isinstance(turn.content, list)]
        blocks = [*system, *chain.from_iterable(turns)]
        results = [
            block.content
            for block in blocks
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
        ]
        marked = [self, *(self.tools or ()), *blocks, *chain.from_iterable(results)]
        marks = [each.cache_control for each in marked if each.cache_control is not None]
        if any(isinstance(mark, dict) and mark.get("ttl") == "1h" for mark in marks):
            return "24h"
        return "in_memory" if marks else None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    RULES: ClassVar[Rules] = {
        **CountTokensRequest.RULES,
        **VllmRequest.RULES,
        "kv_transfer_params": refused("use chats"),
        "metadata": taken(NOBODY_ASKS),
        "container": refused("tools are the client's"),
        "diagnostics": ignored("see headers"),
        "inference_geo": refused("not offered"),
        "service_tier": ignored(ONE_TIER, "auto", "standard_only"),
        "billing_policy": ignored("not needed"),
        "fallbacks": ignored("one model is served", []),
        "fallback_credit_token": ignored("not needed"),
    }

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopSequence], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None
    session_id: str | None = None
    kv_hints: KvHints | None = None
    json_schemas: JsonSchemas | None = None
    """See `SharedFields`."""

    metadata: Any = None
