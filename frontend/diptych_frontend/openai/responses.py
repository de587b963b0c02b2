"""The bodies and stream chunks for clients, and what both routes need to make them.

Fields of type `... | UnsetType` are left out of the JSON unless they are set. The others are always
there, as null if necessary, because clients of the OpenAI API expect them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from diptych_frontend.openai.api_types import StreamOptions
from diptych_frontend.openai.errors import Dialect
from diptych_protocol import UNSAID, Logprob, RequestOutput, SamplingDefaults
from diptych_protocol.outputs import LEAST_LOGPROB

encode = msgspec.json.Encoder().encode


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


SSE = b"data: %b\n\n"
SSE_DONE = b"data: [DONE]\n\n"

KVParams = dict[str, Any] | UnsetType
Warnings = Sequence[str] | UnsetType


class PromptTokensDetails(msgspec.Struct, gc=False):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


ChunkUsage = Usage | UnsetType | None
"""Unset if the client wants no usage; None if only the last chunk contains it."""


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of a prompt that is echoed, which nothing precedes."""
    top_logprobs: list[dict[str, float] | msgspec.Raw | None]
    """Those of a prompt are encoded one by one, like `PromptLogprobs`."""
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[msgspec.Raw] | UnsetType
"""For each token of the prompt: `PromptLogprob`s by token id, first its own, then the likeliest;
null for the first token. Each is encoded by itself, because an encoder lets no other thread run
meanwhile."""


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs = UNSET


class Completion(msgspec.Struct):
    """An answer; a chunk has the same shape, see `ChunkUsage`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage = UNSET
    kv_transfer_params: KVParams = UNSET
    warnings: Warnings = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"
    index: int | UnsetType = UNSET
    """Only in streams."""


class AnswerMessage(msgspec.Struct):
    role: str
    content: str | None
    """None if the answer consists of calls only."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kv_transfer_params: KVParams = UNSET
    prompt_logprobs: PromptLogprobs = UNSET
    warnings: Warnings = UNSET


class Delta(msgspec.Struct):
    content: str
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage = UNSET
    kv_transfer_params: KVParams = UNSET
    warnings: Warnings = UNSET


@dataclass(slots=True)
class Tally:
    """Counts the tokens of one answer, output by output."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_by_prompt: dict[int, int] = field(default_factory=dict)
    reasoning_tokens: int | None = None
    """None if reasoning is not separated."""

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        for choice in output.outputs:
            self.completion_tokens += len(choice.token_ids)
        if prompt_index not in self.cached_by_prompt:
            self.cached_by_prompt[prompt_index] = output.num_cached_tokens
            # Of a prefetch only these count.
            self.prompt_tokens = max(self.prompt_tokens, sum(self.cached_by_prompt.values()))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.cached_by_prompt.values())),
            completion_tokens_details=UNSET
            if self.reasoning_tokens is None
            else CompletionTokensDetails(self.reasoning_tokens),
        )


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of an answer share, and the client's options."""

    response_id: str
    created: int
    """Unix time in seconds."""
    model: str
    n: int
    stream_options: StreamOptions | None


class AnswerWriter(ABC):
    """Turns engine outputs into the bytes of one answer. There is one per request."""

    warnings: Warnings = UNSET
    """What the answer says about fields of the request. In a stream its first event has it."""
    dialect: Dialect | None = None
    """The form of errors in a stream; None: as for other answers of its path."""

    @abstractmethod
    def events(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        """Return the server-sent events for one delta output."""

    def has_told(self, num_events: int) -> None:  # noqa: B027  (most number no events)
        """The client has so many events for the outputs so far; they came to it in other pieces."""

    @abstractmethod
    def ending(self, tally: Tally) -> bytes:
        """Return the last events of a successful stream."""

    @abstractmethod
    def answer(self, outputs: Sequence[Sequence[RequestOutput]], tally: Tally) -> bytes:
        """Return the body of a whole answer; `outputs` holds each prompt's outputs, in order."""


class ResponseWriter(AnswerWriter):
    """The common part of the writers of the two OpenAI routes."""

    text_field: ClassVar[bytes]
    """The name of an answer's text in an event."""
    chunk_type: ClassVar[type[Completion | ChatChunk]]
    object_name: ClassVar[str]
    """What events call themselves."""

    def __init__(self, envelope: Envelope, *, is_quick: bool = True) -> None:
        """is_quick: the text of an answer goes into events as it is."""
        self._envelope = envelope
        options = envelope.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._no_usage: ChunkUsage = None if self._include_usage else UNSET
        """What an event tells of the usage, unless each tells it."""
        self._is_quick = is_quick and not self._continuous_usage
        self._begun: set[int] = set()
        """The indices of the choices that had an event."""
        self._plain: dict[int, PlainEvents] = {}
        """By the choice's index."""

    @abstractmethod
    def _choices(self, prompt_index: int, output: RequestOutput, tally: Tally) -> list[Any]:
        """What an output adds to each of its choices. They have begun then."""

    def events(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        """See `AnswerWriter.events`."""
        choice = output.outputs[0]
        index = prompt_index * self._envelope.n + choice.index
        has_only_text = (
            self._is_quick
            and index in self._begun
            and len(output.outputs) == 1
            and output.kv_transfer_params is None
            and choice.finish_reason is None
            and choice.logprobs is None
            and choice.stop_reason is None
        )
        if not has_only_text:
            return self._event(prompt_index, output, tally)
        plain = self._plain.get(index)
        if plain is None:
            text, choice.text = choice.text, ""
            plain = PlainEvents(self._event(prompt_index, output, tally), self.text_field)
            self._plain[index], choice.text = plain, text
        return plain.event(choice.text)

    def _event(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        head = self._envelope
        choices = self._choices(prompt_index, output, tally)
        chunk = self.chunk_type(
            head.response_id, self.object_name, head.created, head.model, choices
        )
        chunk.usage = tally.usage() if self._continuous_usage else self._no_usage
        if output.kv_transfer_params is not None:
            chunk.kv_transfer_params = output.kv_transfer_params
        chunk.warnings, self.warnings = self.warnings, UNSET
        return SSE % encode(chunk)

    def ending(self, tally: Tally) -> bytes:
        """See `AnswerWriter.ending`. An event without choices tells the usage to who wants it."""
        if not self._include_usage:
            return SSE_DONE
        head = self._envelope
        chunk = self.chunk_type(head.response_id, self.object_name, head.created, head.model, [])
        chunk.usage = tally.usage()
        return SSE % encode(chunk) + SSE_DONE


class PlainEvents:
    """Writes events that differ only in one text, as nearly all of a stream do. Encoding only the
    text takes a third of the time."""

    __slots__ = ("_after", "_before")

    def __init__(self, event: bytes, field: bytes) -> None:
        """event: an example, whose text is empty. field: the name of the text. Quotation marks in
        an event's other texts are escaped, so this field cannot be found in them."""
        self._before, _, self._after = event.partition(b'"%b":""' % field)
        self._before += b'"%b":' % field

    def event(self, text: str) -> bytes:
        return b"".join((self._before, encode(text), self._after))


def transfer_params(output: RequestOutput) -> KVParams:
    return UNSET if output.kv_transfer_params is None else output.kv_transfer_params


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs:
    if output.prompt_logprobs is None:
        return UNSET
    return [msgspec.Raw(encode(_prompt_row(row))) for row in output.prompt_logprobs]


def _prompt_row(row: dict[int, Logprob] | None) -> dict[int, PromptLogprob] | None:
    if row is None:
        return None
    return {
        token: PromptLogprob(logprob_value(entry), entry.rank, entry.decoded_token)
        for token, entry in row.items()
    }


def logprob_value(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def token_name(token_id: int, entry: Logprob, *, before_bytes: str = "") -> str:
    """Return the token as text, its id where the engine sent no text, or its bytes in Python's
    notation if they are only a part of a character.

    before_bytes: what such a name begins with.
    """
    if entry.decoded_token is None:
        return f"token_id:{token_id}"
    try:
        (entry.token_bytes or b"").decode()
    except UnicodeDecodeError:
        return before_bytes + repr(entry.token_bytes)[2:-1]
    return entry.decoded_token


def by_likelihood(candidates: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Return the candidates for one position, the most likely first."""
    return sorted(candidates.items(), key=lambda item: -item[1].logprob)


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    parent: str | None = None
    """For an adapter: the name of the model that it adapts; None for the model itself."""
    object: str = "model"
    owned_by: str = "diptych"
    sampling: SamplingDefaults = UNSAID
    """What requests get that leave these fields out; a field that is not there is as in OpenAI's
    API."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Health(msgspec.Struct, omit_defaults=True):
    status: str
    reason: str = ""
