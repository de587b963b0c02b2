"""The answers of the Messages API: a whole message, or the events of one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from diptych_frontend.openai.chat import AnswerParts
from diptych_frontend.openai.errors import Dialect, ErrorAnswer
from diptych_frontend.openai.responses import AnswerWriter, PlainEvents, Tally, Warnings, encode
from diptych_frontend.tool_calls.calls import ParsedCall, Pieces
from diptych_protocol import EngineGenerateError, RequestOutput


class TokenDetails(msgspec.Struct):
    thinking_tokens: int


class Usage(msgspec.Struct):
    """`input_tokens` are those that were not in the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: TokenDetails | UnsetType = UNSET

    @classmethod
    def of(cls, tally: Tally) -> Usage:
        cached = sum(tally.cached_by_prompt.values())
        usage = cls(tally.prompt_tokens - cached, cached, tally.completion_tokens)
        if tally.reasoning_tokens is not None:
            usage.output_tokens_details = TokenDetails(tally.reasoning_tokens)
        return usage


class _Typed(msgspec.Struct, tag_field="type"):
    """An event, or a part of a message."""


class Text(_Typed, tag="text"):
    text: str
    citations: None = None


class Thinking(_Typed, tag="thinking"):
    thinking: str
    signature: str = ""
    """Empty: nothing here is signed."""


class ToolUse(_Typed, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


Content = Text | Thinking | ToolUse


class Message(_Typed, tag="message"):
    id: str
    model: str
    content: list[Content]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    role: Literal["assistant"] = "assistant"
    warnings: Warnings = UNSET


class MessageStart(_Typed, tag="message_start"):
    message: Message


class Ping(_Typed, tag="ping"):
    pass


class BlockStart(_Typed, tag="content_block_start"):
    index: int
    content_block: Content


class TextDelta(_Typed, tag="text_delta"):
    text: str


class ThinkingDelta(_Typed, tag="thinking_delta"):
    thinking: str


class InputDelta(_Typed, tag="input_json_delta"):
    partial_json: str


class BlockDelta(_Typed, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(_Typed, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(_Typed, tag="message_delta"):
    delta: StopDelta
    usage: Usage


class MessageStop(_Typed, tag="message_stop"):
    pass


EVENTS: Final = (
    MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop,
)  # fmt: skip
"""All kinds of events of a stream that does not fail."""


def sse(event: _Typed) -> bytes:
    tag = str(event.__struct_config__.tag).encode()
    return b"event: " + tag + b"\ndata: " + encode(event) + b"\n\n"


def why_stopped(
    finish_reason: str | None, stop_reason: Any, *, full: bool
) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a message that has ended.

    full: it ended before its `max_tokens`. Raises `EngineGenerateError` for an answer that was
    broken off.
    """
    match finish_reason:
        case "tool_calls":
            return "tool_use", None
        case "stop" if isinstance(stop_reason, str):
            return "stop_sequence", stop_reason
        case "stop":
            return "end_turn", None
        case "length":
            return "model_context_window_exceeded" if full else "max_tokens", None
        case _:
            raise EngineGenerateError(f"the answer was broken off ({finish_reason})")


class MessageWriter(AnswerWriter):
    """See `AnswerWriter`."""

    def __init__(self, message_id: str, model: str, max_tokens: int, parts: AnswerParts) -> None:
        self._id = message_id
        self._model = model
        self._max_tokens = max_tokens
        self._parts = parts
        self._begun = False
        self._blocks = Blocks()
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def events(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        reasoning, pieces = self._read(output, tally)
        blocks = self._blocks
        events = [] if self._begun else [sse(MessageStart(self._message([], tally))), sse(Ping())]
        self._begun = True
        if reasoning:
            events.append(blocks.add_thinking(reasoning))
        events += (
            blocks.add_text(piece) if isinstance(piece, str) else blocks.add_call(piece)
            for piece in pieces
        )
        return b"".join(events)

    def ending(self, tally: Tally) -> bytes:
        delta = StopDelta(*self._why_stopped(tally))
        end = (sse(MessageDelta(delta, Usage.of(tally))), sse(MessageStop()))
        return self._blocks.close() + b"".join(end)

    def answer(self, outputs: Sequence[Sequence[RequestOutput]], tally: Tally) -> bytes:
        content: list[Content] = []
        for output in outputs[0]:
            reasoning, pieces = self._read(output, tally)
            if reasoning:
                content.append(Thinking(reasoning))
            for piece in pieces:
                if not isinstance(piece, str):
                    arguments = msgspec.Raw(piece.arguments.encode())
                    content.append(ToolUse(_call_id(), piece.name, arguments))
                elif piece.strip():
                    content.append(Text(piece))
        message = self._message(content, tally)
        message.stop_reason, message.stop_sequence = self._why_stopped(tally)
        return encode(message)

    def _read(self, output: RequestOutput, tally: Tally) -> tuple[str, Pieces]:
        [choice] = output.outputs
        reasoning, pieces, self._finish_reason = self._parts.read(choice)
        self._stop_reason = choice.stop_reason
        tally.reasoning_tokens = self._parts.num_reasoning_tokens
        return reasoning, pieces

    def _message(self, content: list[Content], tally: Tally) -> Message:
        usage = Usage.of(tally)
        return Message(self._id, self._model, content, None, None, usage, warnings=self.warnings)

    def _why_stopped(self, tally: Tally) -> tuple[str, str | None]:
        full = tally.completion_tokens < self._max_tokens
        return why_stopped(self._finish_reason, self._stop_reason, full=full)


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


class Blocks:
    """The blocks of a streamed message, of which one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: Literal["", "text", "thinking"] = ""
        self._deltas = PlainEvents(b"", b"")
        """Those of the open block."""
        self._blanks = ""
        """Blanks that are a block only if something follows them."""

    def add_thinking(self, thinking: str) -> bytes:
        """Add more of the model's reasoning."""
        begin = b""
        if self._open != "thinking":
            begin = self._begin("thinking", Thinking(""))
            delta = sse(BlockDelta(self._index, ThinkingDelta("")))
            self._deltas = PlainEvents(delta, b"thinking")
        return begin + self._deltas.event(thinking)

    def add_text(self, text: str) -> bytes:
        """Add more of the answer's text."""
        begin = b""
        if self._open != "text":
            text = self._blanks + text
            if not text.strip():
                self._blanks = text
                return b""
            begin = self._begin("text", Text(""))
            self._deltas = PlainEvents(sse(BlockDelta(self._index, TextDelta(""))), b"text")
        return begin + self._deltas.event(text)

    def add_call(self, call: ParsedCall) -> bytes:
        """Add a whole call."""
        use = ToolUse(_call_id(), call.name, msgspec.Raw(b"{}"))
        begin = self._begin("", use)
        delta = sse(BlockDelta(self._index, InputDelta(call.arguments)))
        return begin + delta + sse(BlockStop(self._index))

    def close(self) -> bytes:
        """End the block that is open, if one is."""
        was_open, self._open, self._blanks = self._open, "", ""
        return sse(BlockStop(self._index)) if was_open else b""

    def _begin(self, kind: Literal["", "text", "thinking"], content: Content) -> bytes:
        before = self.close()
        self._index += 1
        self._open = kind
        return before + sse(BlockStart(self._index, content))


_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Failure(msgspec.Struct):
    type: str
    message: str


class FailureBody(msgspec.Struct):
    error: Failure
    request_id: str
    type: Literal["error"] = "error"


def _body(answer: ErrorAnswer, request_id: str) -> bytes:
    default = "invalid_request_error" if answer.status < 500 else "api_error"
    failure = Failure(_TYPES.get(answer.status, default), answer.detail.message)
    return encode(FailureBody(failure, request_id))


def _event(answer: ErrorAnswer, request_id: str) -> bytes:
    return b"event: error\ndata: " + _body(answer, request_id) + b"\n\n"


ANTHROPIC: Final = Dialect(b"request-id", _body, _event)
