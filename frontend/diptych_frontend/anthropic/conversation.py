"""Translates a conversation of the Messages API into a chat of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, ClassVar, Final

import msgspec

from diptych_frontend.anthropic.api_types import (
    AdaptiveThinking,
    AnyChoice,
    Block,
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    NoChoice,
    NoThinking,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from diptych_frontend.openai import response_format
from diptych_frontend.openai.api_types import (
    MAX_MESSAGES,
    CalledFunction,
    CalledTool,
    ChatCompletionRequest,
    ChatMessage,
    ImagePart,
    ImageUrl,
    TextPart,
)
from diptych_frontend.tool_calls import tools
from diptych_protocol import InvalidRequestError

FAILED: Final = "Error:"
"""Stands before the result of a tool that failed: chat templates have no other place for that."""


class TranslatedChat(ChatCompletionRequest, kw_only=True):
    """A chat whose format was requested in the field `output_config`."""

    FORMAT_FIELD: ClassVar[str] = "output_config"
    TOOL_FIELD: ClassVar[str] = "tools[{}].input_schema"

    @property
    def effort_field(self) -> str:
        return "thinking" if self.reasoning_effort == "none" else "output_config.effort"


def as_chat(request: CountTokensRequest) -> TranslatedChat:
    """Return a conversation as a chat. Raises `InvalidRequestError` for what a chat cannot
    express."""
    messages = _messages(request)
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages: {len(messages)} turns and results of tools; send at most {MAX_MESSAGES}",
            param="messages",
        )
    chat = TranslatedChat(
        model=request.model,
        messages=messages,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        include_reasoning=_shows_thinking(request),
        response_format=_format(request),
        chat_template_kwargs=request.chat_template_kwargs,
    )
    if messages[-1].role == "assistant":
        _continue(request, chat)
    if isinstance(request.thinking, NoThinking):
        chat.reasoning_effort = "none"
    elif request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
    _choose_tools(request, chat)
    if isinstance(request, MessagesRequest):
        _set_options(request, chat)
    return chat


def _continue(request: CountTokensRequest, chat: TranslatedChat) -> None:
    """The last turn is an answer that has begun, and goes on. Raises `InvalidRequestError`."""
    if isinstance(request.thinking, Thinking | AdaptiveThinking):
        raise InvalidRequestError(
            "messages: an answer that has begun goes on without thinking: leave thinking out, or "
            "end with the user's turn",
            param="messages",
        )
    chat.continue_final_message = True


def _set_options(request: MessagesRequest, chat: TranslatedChat) -> None:
    chat.max_tokens = request.max_tokens
    chat.stream = request.stream
    chat.stop = request.stop_sequences
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.priority = request.priority
    chat.cache_salt = request.cache_salt
    chat.session_id = request.session_id
    chat.kv_hints = request.kv_hints
    chat.prompt_cache_retention = request.cache_retention()
    chat.json_schemas = request.json_schemas


def _choose_tools(request: CountTokensRequest, chat: TranslatedChat) -> None:
    match request.tool_choice:
        case None:
            return
        case ToolChoice(name=name):
            function = tools.FunctionName(name=name)
            chat.tool_choice = tools.NamedTool(type="function", function=function)
        case AnyChoice():
            chat.tool_choice = "required"
        case NoChoice():
            chat.tool_choice = "none"
        case _:
            chat.tool_choice = "auto"
    chat.parallel_tool_calls = not request.tool_choice.disable_parallel_tool_use


def _shows_thinking(request: CountTokensRequest) -> bool:
    """Clients ask for thinking whatever the model is; one that does not reason has none to show."""
    thinking = request.thinking
    hides = isinstance(thinking, Thinking | AdaptiveThinking) and thinking.display == "omitted"
    return not hides


def _format(request: CountTokensRequest) -> response_format.JsonSchemaFormat | None:
    config = request.output_config
    if config is None:
        return None
    if config.format is None:
        return None
    schema = response_format.NamedSchema(name="output", schema=config.format.schema)
    return response_format.JsonSchemaFormat(json_schema=schema)


def _tool(tool: Tool) -> tools.Tool:
    function = tools.FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.input_schema
    )
    return tools.Tool(type="function", function=function)


def _messages(request: CountTokensRequest) -> list[ChatMessage]:
    """Turns of the same role that follow each other are one, as in Anthropic's API."""
    messages: list[ChatMessage] = []
    if request.system is not None:
        system = [Turn(role="system", content=[*_blocks(request.system)])]
        messages.extend(_said(_blocks_of(system), "system"))
    for role, turns in groupby(request.messages, key=lambda turn: turn.role):
        blocks = _blocks_of(turns)
        messages.extend(_answered(blocks) if role == "assistant" else _said(blocks, role))
    return messages


def _blocks(content: str | list[Any]) -> list[Any]:
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _blocks_of(turns: Iterable[Turn]) -> list[Block]:
    return [block for turn in turns for block in _blocks(turn.content)]


def _said(blocks: list[Block], role: str) -> list[ChatMessage]:
    """What a user or a system says, and results of tools, each of which is a message."""
    messages: list[ChatMessage] = []
    parts: list[TextPart | ImagePart] = []

    def end_message() -> None:
        if parts:
            content = parts.copy()
            of_user = role == "user"
            messages.append(ChatMessage(role="user" if of_user else "system", content=content))
            parts.clear()

    for block in blocks:
        match block:
            case TextBlock() | ImageBlock():
                parts.append(_part(block))
            case ToolResultBlock() if role == "user":
                end_message()
                messages.append(_result(block))
            case _:
                raise _misplaced(block, role)
    end_message()
    return messages


def _answered(blocks: list[Block]) -> list[ChatMessage]:
    """What the model answered: one message."""
    texts: list[TextPart | ImagePart] = []
    thoughts: list[str] = []
    calls: list[CalledTool] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(_part(block))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                function = CalledFunction(name=block.name, arguments=arguments)
                calls.append(CalledTool(id=block.id, type="function", function=function))
            case ImageBlock() | ToolResultBlock():
                raise _misplaced(block, "assistant")
    message = ChatMessage(role="assistant", content=texts, tool_calls=calls or None)
    if thoughts:
        message.reasoning_content = "\n".join(thoughts)
    return [message]


def _result(block: ToolResultBlock) -> ChatMessage:
    parts = [_part(part) for part in _blocks(block.content or "")]
    if block.is_error:
        parts.insert(0, TextPart(text=FAILED))
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=parts)


def _part(block: TextBlock | ImageBlock) -> TextPart | ImagePart:
    if isinstance(block, TextBlock):
        return TextPart(text=block.text)
    url = f"data:{block.source.media_type};base64,{block.source.data}"
    return ImagePart(image_url=ImageUrl(url=url))


def _misplaced(block: Block, role: str) -> InvalidRequestError:
    kind = block.__struct_config__.tag
    return InvalidRequestError(f"messages: {kind} has no place in a turn of {role}")
