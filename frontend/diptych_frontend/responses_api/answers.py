"""The answers of the Responses API: a whole response, or the events of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from diptych_frontend.openai.chat import AnswerParts
from diptych_frontend.openai.errors import OPENAI, Dialect, ErrorAnswer
from diptych_frontend.openai.responses import AnswerWriter, Tally, Warnings, encode
from diptych_frontend.responses_api.api_types import (
    FunctionChoice,
    FunctionTool,
    Reasoning,
    ResponsesRequest,
    TextConfig,
)
from diptych_frontend.responses_api.output import OUTPUT_EVENTS, Event, NewIds, Output, OutputItem
from diptych_protocol import EngineGenerateError, RequestOutput, SamplingParams


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, tally: Tally) -> Usage:
        return cls(
            tally.prompt_tokens,
            InputDetails(sum(tally.cached_by_prompt.values())),
            tally.completion_tokens,
            OutputDetails(tally.reasoning_tokens or 0),
            tally.prompt_tokens + tally.completion_tokens,
        )


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    """A response, with the fields of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | FunctionChoice
    tools: list[FunctionTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: Usage | None = None
    warnings: Warnings = msgspec.UNSET


def new_response(
    request: ResponsesRequest, params: SamplingParams, created: int, ids: NewIds
) -> Response:
    """Return a response without content, which reports how it is sampled."""
    return Response(
        # Who knows it may read a stored response, where nobody has a key: it cannot be guessed.
        id=ids.new("resp", 16),
        created_at=created,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning or Reasoning(),
        store=request.is_stored,
        temperature=params.temperature,
        text=request.text or TextConfig(),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_p=params.top_p,
    )


class _OfResponse(Event, kw_only=True):
    response: Response


class Created(_OfResponse, kw_only=True, tag="response.created"):
    pass


class InProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    pass


class Completed(_OfResponse, kw_only=True, tag="response.completed"):
    pass


class Incomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    pass


class Failed(_OfResponse, kw_only=True, tag="response.failed"):
    pass


EVENTS: Final = (Created, InProgress, *OUTPUT_EVENTS, Completed, Incomplete, Failed)
"""All kinds of events of a stream."""

Keep = Callable[[Response, bytes], Any]
"""Called with a response that is to be stored, and its body."""


class ResponsesWriter(AnswerWriter):
    """See `AnswerWriter`."""

    def __init__(
        self, response: Response, output: Output, parts: AnswerParts, keep: Keep | None
    ) -> None:
        self.dialect = Dialect(OPENAI.id_header, OPENAI.body, self._failed)
        self._response = response
        self._parts = parts
        self._keep = keep
        self._output = output
        self._begun = False
        self._finish_reason: str | None = None

    def events(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        begin = b""
        if not self._begun:
            self._begun = True
            self._response.warnings = self.warnings
            begin = self._output.event(Created(response=self._response))
            begin += self._output.event(InProgress(response=self._response))
        return begin + self._add(output, tally)

    def has_told(self, num_events: int) -> None:
        self._output.num_events = num_events

    def ending(self, tally: Tally) -> bytes:
        last = self._close(tally)
        response = self._response
        ended = Completed if response.status == "completed" else Incomplete
        last += self._output.event(ended(response=response))
        if self._keep is not None:
            self._keep(response, encode(response))
        return last

    def answer(self, outputs: Sequence[Sequence[RequestOutput]], tally: Tally) -> bytes:
        self._response.warnings = self.warnings
        for output in outputs[0]:
            self._add(output, tally)
        self._close(tally)
        body = encode(self._response)
        if self._keep is not None:
            self._keep(self._response, body)
        return body

    def _add(self, output: RequestOutput, tally: Tally) -> bytes:
        [choice] = output.outputs
        reasoning, pieces, self._finish_reason = self._parts.read(choice)
        tally.reasoning_tokens = self._parts.num_reasoning_tokens
        to = self._output
        told = to.add_reasoning(reasoning) if reasoning else b""
        for piece in pieces:
            told += to.add_text(piece) if isinstance(piece, str) else to.add_call(piece)
        return told

    def _close(self, tally: Tally) -> bytes:
        """End the response. Raises `EngineGenerateError` for one that was broken off."""
        response = self._response
        if self._finish_reason not in ("stop", "tool_calls", "length"):
            raise EngineGenerateError(f"the answer was broken off ({self._finish_reason})")
        response.status = "incomplete" if self._finish_reason == "length" else "completed"
        if response.status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        last = self._output.close(response.status)
        response.output = self._output.done
        response.usage = Usage.of(tally)
        return last

    def _failed(self, answer: ErrorAnswer, request_id: str) -> bytes:
        code = "rate_limit_exceeded" if answer.status == 429 else "server_error"
        response = self._response
        response.status, response.output = "failed", self._output.done
        response.incomplete_details = response.usage = None
        response.error = ResponseError(code, answer.detail.message)
        return self._output.event(Failed(response=response))
