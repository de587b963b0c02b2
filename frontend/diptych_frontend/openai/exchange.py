"""One HTTP request and its answer: what all layers know of it, and how they read and send."""

from __future__ import annotations

import asyncio
import gc
import math
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar, cast

import msgspec
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from diptych_frontend.confined.json_cost import MAX_VALUES, check_json_cost
from diptych_frontend.observability.tracing import trace_context
from diptych_frontend.openai.errors import OPENAI, Dialect, Headers, from_decode_error
from diptych_frontend.openai.field_rules import leave_out
from diptych_frontend.quotas.ledger import Bill
from diptych_frontend.quotas.quotas import Quotas, check, headers_of
from diptych_protocol import UNREADABLE, InvalidRequestError, LoRARequest, PromptOptions
from diptych_protocol.wire import REVISION_HEADER

WRITE_TIMEOUT_S: Final = 60.0
"""A connection whose client reads nothing for this long is closed."""
EXCHANGE_KEY: Final = "diptych.exchange"
PARTS_KEY: Final = "diptych.parts"
"""Where a server that has a `PartWriter` for the answer puts it into the scope."""
RANK_HEADER: Final = "X-data-parallel-rank"

MAX_WARNINGS: Final = 16

T = TypeVar("T")
_BYTE_ORDER_MARKS: Final = (BOM_UTF8, BOM_UTF16_LE, BOM_UTF16_BE)
_any: Final = msgspec.json.Decoder(Any)
_TRUNCATED: Final = "Input data was truncated"
_ESCAPE: Final = r"\ud800"


class Deadline:
    """Limits the time of each step of one task.

    Setting a timer of the event loop takes longer than writing a token. So there is one timer at a
    time. When it fires, mostly too early, it checks whether the present step is late.
    """

    def __init__(self) -> None:
        """Limit the current task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Deadline needs a task to interrupt")
        self.task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self.due = math.inf
        """When the step under way is late; infinite between two steps."""
        self._late = False
        """The step under way was cancelled for it."""

    async def within(self, seconds: float, step: Awaitable[T]) -> T:
        """Await the step. Raises `TimeoutError` if it takes longer; then it is cancelled."""
        self.begin(seconds)
        try:
            return await step
        except asyncio.CancelledError as exc:
            if self.has_cancelled():
                raise TimeoutError from exc
            raise
        finally:
            self.due = math.inf

    def begin(self, seconds: float) -> None:
        """Begin a step that is cancelled after this time unless `due` is infinite again. The code
        that catches the `CancelledError` calls `has_cancelled`. This is `within` without its
        coroutine."""
        self._late = False
        self.due = self._loop.time() + seconds
        if self.due < self._rings_at:
            self._set_timer()

    def has_cancelled(self) -> bool:
        """Whether the deadline, and not somebody else, caused the `CancelledError` that was just
        caught."""
        return self._late and self.task.uncancel() <= self._cancelling

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self.close()
        self._rings_at = self.due
        self._timer = self._loop.call_at(self.due, self._ring)

    def _ring(self) -> None:
        late = self.due <= self._rings_at
        self._timer, self._rings_at = None, math.inf
        if late:
            self._late = True
            self.task.cancel()
        elif self.due < math.inf:
            self._set_timer()


class ClientStalledError(Exception):
    """The client stopped reading its answer."""


class PartWriter:
    """Writes parts of a streamed answer to its connection, and tells when that is lost, without
    ASGI's coroutines. It is for parts between the first and the last."""

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, *, has_chunks: bool = True
    ) -> None:
        """has_chunks: each part is one of HTTP/1.1's chunks."""
        self._transport, self._flow, self._has_chunks = transport, flow, has_chunks
        self._is_lost = False
        self._on_lost: Callable[[], object] | None = None

    def may_write(self) -> bool:
        """Whether the client reads what was written."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, part: bytes) -> None:
        if part:  # an empty chunk would be the last one
            chunk = b"%x\r\n%b\r\n" % (len(part), part) if self._has_chunks else part
            self._transport.write(chunk)

    def watch(self, on_lost: Callable[[], object] | None) -> None:
        """Call this when the connection is lost, at once if it is. None: nobody asks any more."""
        self._on_lost = on_lost
        if on_lost is None:
            return
        if self._is_lost:
            on_lost()
        self._flow.resume_reading()  # a large body may have paused it, and nothing else would read

    def lost(self) -> None:
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()


@dataclass(slots=True)
class Exchange:
    """One request and its outcome. Every layer and the route use the same object."""

    request_id: str
    peer: str = ""
    """The address that it came from; empty if that is unknown."""
    parts: PartWriter | None = None
    """None: all of the answer goes through ASGI's `send`."""
    dialect: Dialect = OPENAI
    """The format of errors for its client."""
    deadline: Deadline = field(default_factory=Deadline)
    """Limits the time that each read from the client, and each write to it, may take."""
    body: bytes = b""
    """The part of it that arrived, unless that was too large."""
    promise: dict[str, Any] | None = None
    """The `kv_transfer_params` of remotely prefilled blocks in a body that was too large."""
    headers: Headers = ()
    """Headers of every answer, including errors."""
    status: int | None = None
    """Set when the answer's headers are sent."""
    is_event_stream: bool = False
    completed: bool = False
    """Whether the last byte of the answer was sent."""
    tenant: str = ""
    """The client: the name of the request's API key; empty without keys."""
    quotas: Quotas | None = None
    """The limits of API keys; None if there are no keys."""
    bill: Bill | None = None
    """What it takes of its key's tokens, once it is known."""
    least_priority: int | None = None
    """The request is no more urgent than this, whatever its body says; None: as its body says."""
    refuses_unknown: bool = False
    """Whether an unknown field of the body is an error, outside of messages."""
    ignored_fields: int = 0
    """Fields of the body that were left out because they have no effect here."""
    warnings: tuple[str, ...] = ()
    """What the answer says about them."""
    admitted: bool = False
    """Whether an engine accepted the request, and so has to clean up after it."""

    @property
    def client(self) -> str:
        """The client that takes turns with others: the name of the request's API key or, without
        keys, its address."""
        return self.tenant or self.peer

    def priority(self, asked: int | None) -> int:
        """Return the priority of a request whose body asks for this one. The lower number is served
        first."""
        floor = self.least_priority
        return (asked or 0) if floor is None else max(asked or 0, floor)

    async def reserve(self, tokens: int) -> None:
        """Set aside the most tokens that it can take. Raises `QuotaExceededError`, or
        `InvalidRequestError` if its key may never use so many."""
        if self.quotas is not None:
            grant = await self.quotas.reserve(self.tenant, tokens)
            self.bill, self.headers = grant.bill, self.headers + headers_of(grant)
            check(grant, tokens)

    def warn(self, why_ignored: Mapping[str, str]) -> None:
        """Tell the client of fields without an effect: in a header of the answer and, where it has
        room for `warnings`, in the answer."""
        told = dict(islice(why_ignored.items(), MAX_WARNINGS))
        lines = tuple(f"{name} is ignored: {why}" for name, why in told.items())
        if {*lines} <= {*self.warnings}:
            return  # the body is read for a second time
        self.warnings += lines
        self.headers += ((b"x-diptych-ignored", ", ".join(told).encode()),)


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[EXCHANGE_KEY]
    return exchange


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of the request's first header of this name. `name` must be in lower case, as
    in the scope."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def prompt_options(
    scope: Scope, exchange: Exchange, adapter: LoRARequest | None, asked_priority: int | None
) -> PromptOptions:
    """Return what an engine is told of each prompt of a request, whatever it asks for."""
    parent = header(scope, b"traceparent")
    headers = trace_context(parent, header(scope, b"tracestate")) if parent else None
    revision = header(scope, _REVISION)
    if revision is not None:
        headers = {**(headers or {}), REVISION_HEADER: _side(revision)}
    return {
        "lora_request": adapter,
        "priority": exchange.priority(asked_priority),
        "trace_headers": headers,
        "tenant": exchange.tenant,
    }


_REVISION: Final = REVISION_HEADER.encode()


def _side(asked: str) -> str:
    if asked not in ("canary", "stable"):
        raise InvalidRequestError(
            f"{REVISION_HEADER} must be canary or stable, not {asked[:100]!r}",
            param=REVISION_HEADER,
        )
    return asked


def rank_of(scope: Scope) -> int | None:
    """Return the engine core that the caller chose, if any; whether it exists, the engine knows."""
    text = header(scope, RANK_HEADER.lower().encode())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 4):
        raise InvalidRequestError(
            f"{RANK_HEADER} must be the number of a rank, not {text[:100]!r}",
            param="data_parallel_rank",
        )
    return int(text)


def most_values(max_model_len: int) -> int:
    """Return how many values the body of a request may have for a model with this
    context length."""
    return max(MAX_VALUES, 2 * max_model_len)


def decode_body(
    scope: Scope, body: bytes, decoder: msgspec.json.Decoder[T], max_values: int = MAX_VALUES
) -> T:
    """Decode a body. Raises `InvalidRequestError` for another content type, and for an invalid
    body. Fields that have no effect are left out; see `field_rules`."""
    content_type = header(scope, b"content-type") or ""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"send the body as 'Content-Type: application/json', not {content_type[:100]!r}",
            param="Content-Type",
            status=415,
        )
    _check_coding(scope)
    try:
        return decode_json(body, decoder, max_values)
    except InvalidRequestError as exc:
        if not isinstance(exc.__cause__, msgspec.ValidationError):
            _check_charset(scope, body)
            raise
        try:
            raw = decode_json(body, _any, max_values)
        except InvalidRequestError as untyped:
            if isinstance(untyped.__cause__, msgspec.ValidationError):  # a number such as 1e400
                raise exc from None
            raise
        exchange = exchange_of(scope)
        left_out = leave_out(raw, decoder.type, refuses_unknown=exchange.refuses_unknown)
        if not left_out:
            raise
        exchange.ignored_fields = len(left_out)
        if left_out.elsewhere:
            exchange.warn(left_out.elsewhere)
        return decode_json(msgspec.json.encode(raw), decoder, max_values)


def _check_coding(scope: Scope) -> None:
    """Raise `InvalidRequestError` for a body that is said to be compressed, even if it is not: who
    stands in between may have read something else."""
    coding = header(scope, b"content-encoding") or "identity"
    if coding.lower() != "identity":
        raise InvalidRequestError(
            f"send the body as it is, without 'Content-Encoding: {coding[:100]}'",
            param="Content-Encoding",
            status=415,
        )


def _check_charset(scope: Scope, body: bytes) -> None:
    """Raise `InvalidRequestError` if a body that is no JSON may be some in another encoding."""
    charset = (header(scope, b"content-type") or "").lower().partition("charset=")[2].strip(' "')
    if charset not in ("", "utf-8", "utf8") or body.startswith(_BYTE_ORDER_MARKS):
        raise InvalidRequestError(
            "send the body in UTF-8, without a byte order mark", param="Content-Type", status=415
        )


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T], max_values: int = MAX_VALUES) -> T:
    """Decode a body, unless that takes too long (`check_json_cost`).

    Raises `InvalidRequestError`, naming the field, for a body that the decoder rejects.
    """
    large = len(body) > max_values
    if large:
        # What a body is made of refers to nothing: searching it for cycles would take ten times as
        # long as decoding it.
        gc.disable()
    try:
        check_json_cost(body, max_values)
        return decoder.decode(body)
    except UNREADABLE as exc:
        raise from_decode_error(_plainer(exc, body), decoder.type) from exc
    finally:
        if large:
            gc.enable()


def _plainer(exc: Exception, body: bytes) -> Exception:
    """Near its end the decoder takes a body with half a surrogate pair for a truncated one."""
    if str(exc) == _TRUNCATED:
        try:
            _any.decode(body + b" " * len(_ESCAPE))
        except UNREADABLE as other:
            return other if "surrogate" in str(other) else exc
    return exc


def decode_query(params: Mapping[str, str], kind: type[T], most: int) -> T:
    """Return the parameters of a list, of which `limit` may be 1 to `most`. Raises
    `InvalidRequestError`, naming the parameter."""
    try:
        query: Any = msgspec.convert(dict(params), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise from_decode_error(exc, kind) from exc
    if not 1 <= query.limit <= most:
        raise InvalidRequestError(f"limit must be between 1 and {most}", param="limit")
    return cast(T, query)


def split_prompts(prompt: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """Return one text, one list of token ids, or a list of either, as a list of prompts.

    Raises `InvalidRequestError`, naming the field, for an empty or mixed list.
    """
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if not prompt:
        raise InvalidRequestError(f"{field} is an empty list", param=field)
    if len(ids) == len(prompt):
        return [ids]
    if len(texts) == len(prompt):
        return [*texts]
    if len(lists) == len(prompt):
        return [*lists]
    raise InvalidRequestError(
        f"{field} mixes texts, token ids and lists; send one kind", param=field
    )


def recorded(send: Send, exchange: Exchange) -> Send:
    """Return a `send` that has a deadline, adds the request's id to the answer, and records how far
    the answer is."""
    request_id = exchange.request_id.encode()
    deadline = exchange.deadline

    async def recording_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            id_header = (exchange.dialect.id_header, request_id)
            message["headers"] = [*message.get("headers", ()), id_header, *exchange.headers]
        elif not message.get("more_body", False):
            exchange.completed = True
        deadline.begin(WRITE_TIMEOUT_S)
        try:
            await send(message)
        except asyncio.CancelledError as exc:
            if deadline.has_cancelled():
                raise ClientStalledError from exc
            raise
        finally:
            deadline.due = math.inf

    return recording_send


async def send_bytes(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """Send a whole answer, which is JSON, at once."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
