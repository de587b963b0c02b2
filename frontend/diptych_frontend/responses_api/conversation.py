"""Translates a request of the Responses API into a chat of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import ClassVar

import msgspec

from diptych_frontend.openai import response_format
from diptych_frontend.openai.api_types import (
    MAX_MESSAGES,
    CalledFunction,
    CalledTool,
    ChatCompletionRequest,
    ChatMessage,
    ImagePart,
    ImageUrl,
    SharedFields,
    TextPart,
)
from diptych_frontend.responses_api.api_types import (
    FunctionCall,
    FunctionCallOutput,
    FunctionChoice,
    FunctionTool,
    InputImage,
    InputText,
    Item,
    JsonSchemaFormat,
    Message,
    OutputText,
    ReasoningItem,
    ResponsesRequest,
)
from diptych_frontend.tool_calls import tools
from diptych_protocol import InvalidRequestError

Parts = Iterable[InputText | InputImage | OutputText]


class ResponseChat(ChatCompletionRequest, kw_only=True):
    """A chat whose format was requested in the field `text`."""

    FORMAT_FIELD: ClassVar[str] = "text"
    TOOL_FIELD: ClassVar[str] = "tools[{}].parameters"

    items: list[Item] = msgspec.field(default_factory=list)
    """The whole conversation, as items of the Responses API."""
    tenant: str = ""
    """The client to whom the response belongs, if it is to be stored."""
    size: int = 0
    """The conversation's size in bytes, if it is to be stored."""

    @property
    def effort_field(self) -> str:
        return "reasoning.effort"


def as_chat(request: ResponsesRequest, before: Sequence[Item]) -> ResponseChat:
    """Return the chat that a request continues.

    before: the conversation so far. Raises `InvalidRequestError` for what a chat cannot express.
    """
    items = [*before, *request.items()]
    messages = [*_instructions(request), *messages_of(items)]
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"input: the conversation has {len(messages)} messages; at most {MAX_MESSAGES} go into "
            "one request",
            param="input",
        )
    return ResponseChat(
        items=items,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        chat_template_kwargs=request.chat_template_kwargs,
        include_reasoning=request.include_reasoning,
        **{name: getattr(request, name) for name in SharedFields.__struct_fields__},
    )


def _instructions(request: ResponsesRequest) -> list[ChatMessage]:
    if request.instructions is None:
        return []
    return [ChatMessage(role="system", content=request.instructions)]


def _tool(tool: FunctionTool) -> tools.Tool:
    function = tools.FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return tools.Tool(type="function", function=function)


def _tool_choice(request: ResponsesRequest) -> tools.ToolChoice | None:
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        function = tools.FunctionName(name=choice.name)
        return tools.NamedTool(type="function", function=function)
    return choice


def _format(request: ResponsesRequest) -> response_format.ResponseFormat | None:
    config = request.text
    if config is None:
        return None
    if isinstance(config.format, JsonSchemaFormat):
        schema = response_format.NamedSchema(
            name=config.format.name, schema=config.format.schema, strict=config.format.strict
        )
        return response_format.JsonSchemaFormat(json_schema=schema)
    return config.format


def messages_of(items: Iterable[Item]) -> list[ChatMessage]:
    """Return the conversation as messages. Consecutive output of the model is one message."""
    messages: list[ChatMessage] = []
    for of_model, group in groupby(items, key=_is_of_model):
        if of_model:
            messages.append(_answer(group))
        else:
            messages.extend(_said(item) for item in group)
    return messages


def _is_of_model(item: Item) -> bool:
    match item:
        case Message(role=role):
            return role == "assistant"
        case _:
            return isinstance(item, FunctionCall | ReasoningItem)


def _answer(items: Iterable[Item]) -> ChatMessage:
    texts: list[TextPart | ImagePart] = []
    thoughts: list[str] = []
    calls: list[CalledTool] = []
    for item in items:
        match item:
            case Message():
                texts.extend(_parts(item.content))
            case ReasoningItem():
                thoughts.extend(part.text for part in item.content or item.summary)
            case FunctionCall():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                calls.append(CalledTool(id=item.call_id, type="function", function=function))
    message = ChatMessage(role="assistant", content=texts, tool_calls=calls or None)
    if thoughts:
        message.reasoning_content = "\n".join(thoughts)
    return message


def _said(item: Item) -> ChatMessage:
    match item:
        case FunctionCallOutput():
            output = _parts(item.output)
            return ChatMessage(role="tool", tool_call_id=item.call_id, content=output)
        case Message():
            return ChatMessage(role=item.role, content=_parts(item.content))
        case _:
            raise InvalidRequestError("input: an item of the model's in another's place")


def _parts(content: str | Parts) -> list[TextPart | ImagePart]:
    if isinstance(content, str):
        return [TextPart(text=content)]
    return [
        ImagePart(image_url=ImageUrl(url=part.image_url))
        if isinstance(part, InputImage)
        else TextPart(text=part.text)
        for part in content
    ]
