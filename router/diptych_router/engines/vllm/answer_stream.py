"""One streamed answer of a vLLM server, from its bytes to outputs. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from diptych_protocol import UNREADABLE, DiptychError, EngineCoreOutput, EngineCoreRequest
from diptych_router.engines.vllm.messages import (
    Answer,
    ErrorBody,
    answer_decoder,
    failure,
    output_of,
)

MAX_EVENT_BYTES: Final = 1 << 20
"""An event has some hundred bytes; with 20 alternatives for each token some thousand."""
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class MalformedStreamError(DiptychError):
    """An answer that is none; what came of it before may be right."""


class AnswerStream:
    """Reads an event stream. Only its lines of data count, each of which is a whole JSON text."""

    def __init__(self, request: EngineCoreRequest, max_tokens: int, vocab_size: int) -> None:
        """max_tokens: more tokens than these were not asked for."""
        self._core_id = request.request_id
        self._logprobs = request.sampling.logprobs
        self._tokens_left = max_tokens
        self._vocab_size = vocab_size
        self._rest = b""
        self.ended = False
        """The request's last output has come."""
        self.is_whole = False
        """The stream has said its last word."""

    def feed(self, data: bytes) -> list[EngineCoreOutput]:
        """The outputs that are whole with these bytes. Raises `MalformedStreamError`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        outputs = []
        for line in lines:
            content = self._content(line)
            if not content or self.is_whole:
                continue
            if content == _DONE:
                self.is_whole = True
            elif not self.ended:
                output = self._read(content)
                if output is not None:
                    self.ended = output.finished
                    outputs.append(output)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise MalformedStreamError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return outputs

    def _content(self, line: bytes) -> bytes:
        """The data of a line; empty: it has none."""
        content = line.strip()
        if not content or content[:1] == b":":
            return b""
        if not content.startswith(_DATA):
            raise MalformedStreamError(f"{content[:40]!r} is no line of data")
        if len(content) > MAX_EVENT_BYTES:
            raise MalformedStreamError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return content[len(_DATA) :].lstrip()

    def _read(self, content: bytes) -> EngineCoreOutput | None:
        try:
            answer = answer_decoder.decode(content)
        except UNREADABLE as exc:
            raise MalformedStreamError(f"an event cannot be read: {exc}") from exc
        output = output_of(self._core_id, answer, self._logprobs)
        if output is None:
            return None
        tokens = output.new_token_ids
        self._tokens_left -= len(tokens)
        if self._tokens_left < 0:
            raise MalformedStreamError("it has more tokens than were asked for")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise MalformedStreamError(f"it has a token outside the vocabulary: {tokens[:8]}")
        return output


def refusal(core_id: str, status: int, body: bytes) -> EngineCoreOutput:
    """The end of a request whose answer has another status than 200."""
    try:
        error = msgspec.json.decode(body, type=Answer).error
    except UNREADABLE:
        error = None
    if error is None:
        error = ErrorBody(f"status {status}")
    error.code = status
    return failure(core_id, error)
