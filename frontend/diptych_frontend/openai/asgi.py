"""The ASGI layers around the routes: identity of a request, errors, key, body, disconnects.

From the outside in they are `Boundary`, `BrowserGate`, `KeyGate` (these two have modules of their
own), `BodyReader`, and the routes. All of them share one `Exchange` per request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.openai.errors import Dialect, error_answer
from diptych_frontend.openai.exchange import (
    EXCHANGE_KEY,
    PARTS_KEY,
    ClientStalledError,
    Exchange,
    header,
    recorded,
    send_bytes,
)
from diptych_frontend.openai.promised_prefill import PromiseFinder
from diptych_frontend.quotas.quotas import Quotas
from diptych_protocol import ClientClosedError, EngineOverloadedError, InvalidRequestError

logger = logging.getLogger("diptych.openai")

BODY_TIMEOUT_S = 30.0
"""A request's body must arrive within this time."""
REST_TIMEOUT_S = 5.0
"""The time for the rest of one that is too large."""
LOOKED_THROUGH = 4
"""A body that is too large is still read up to this many times the limit, because it may name
blocks that wait for it elsewhere."""
MAX_BODIES_BYTES: Final = 512 << 20
"""The most of all open requests: what is read of a body is kept as long as its answer takes."""
SMALL_BYTES: Final = 16 << 10
"""A body of this size is always accepted. Most are smaller, and their senders should not wait for
slow senders of large ones."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Boundary:
    """Gives each request its id, answers every error in the API's form, and counts the answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_answer: Callable[[str, int, str, int], None],
        on_refusal: Callable[[Exchange], Awaitable[None]] | None = None,
        dialects: Mapping[str, Dialect] | None = None,
        refuses_unknown: bool = False,
        quotas: Quotas | None = None,
    ) -> None:
        """`on_answer(route path, status, tenant, ignored fields)` is called once for each answered
        request.

        on_refusal: called after the answer to each request that no engine admitted.
        dialects: error formats by the beginning of a path; OpenAI's for all others.
        refuses_unknown, quotas: see `Exchange`.
        """
        self._app = app
        self._dialects = tuple((dialects or {}).items())
        self._on_answer, self._on_refusal = on_answer, on_refusal
        self._refuses_unknown, self._quotas = refuses_unknown, quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered_id = header(scope, b"x-request-id")
        usable = offered_id is not None and _REQUEST_ID.fullmatch(offered_id)
        exchange = Exchange(offered_id if offered_id and usable else secrets.token_hex(16))
        if peer := scope.get("client"):
            exchange.peer = str(peer[0])
        exchange.parts = scope.get(PARTS_KEY)
        exchange.refuses_unknown, exchange.quotas = self._refuses_unknown, self._quotas
        exchange.deadline.task.set_name(f"request {exchange.request_id}")
        for beginning, dialect in self._dialects:
            if scope["path"].startswith(beginning):
                exchange.dialect = dialect
        scope[EXCHANGE_KEY] = exchange
        # Starlette's routes raise on a wrong method, instead of answering, if they have an app.
        scope["app"] = self
        send = recorded(send, exchange)
        try:
            if offered_id is not None and not usable:
                raise InvalidRequestError(
                    "X-Request-Id must be 1 to 128 visible ASCII characters", param="X-Request-Id"
                )
            await self._app(scope, receive, send)
        except ClientStalledError:
            logger.warning("%s: the client stopped reading its answer", exchange.request_id)
        except asyncio.CancelledError:
            # A client that left is dealt with inside; this is the end of the drain timeout.
            await _answer_error(send, exchange, ClientClosedError("the server is shutting down"))
        except Exception as exc:
            await _answer_error(send, exchange, exc)
        finally:
            self._record(scope, exchange)
            exchange.deadline.close()
        # It covers every route and every cause; without a status, the client has left.
        is_refused = not exchange.admitted and (exchange.status is None or exchange.status >= 400)
        if is_refused and self._on_refusal is not None:
            await self._on_refusal(exchange)

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        status = exchange.status or 499  # the client left before there was an answer
        route = getattr(scope.get("route"), "path", "other")
        self._on_answer(route, status, exchange.tenant, exchange.ignored_fields)
        if exchange.bill is not None and exchange.quotas is not None:
            exchange.quotas.settle(exchange.bill)


async def _answer_error(send: Send, exchange: Exchange, exc: Exception) -> None:
    answer = error_answer(exc, exchange.request_id)
    if answer.status >= 500:
        # Overload and draining are business as usual; one line each would drown the log.
        level = logging.DEBUG if answer.status == 503 else logging.ERROR
        trace = exc if answer.detail.code == "internal_error" else None
        logger.log(level, "%s: %s", exchange.request_id, exc or type(exc), exc_info=trace)
    try:
        if exchange.status is None:
            body = exchange.dialect.body(answer, exchange.request_id)
            await send_bytes(send, answer.status, body, [*answer.headers])
        elif exchange.is_event_stream and not exchange.completed:
            event = exchange.dialect.event(answer, exchange.request_id)
            await send({"type": "http.response.body", "body": event, "more_body": False})
    except ClientStalledError:
        logger.warning("%s: the client stopped reading its answer", exchange.request_id)


class BodyReader:
    """Reads the body of a POST before its route runs, within bounds of size and time. The route
    finds it in the `Exchange`."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, streamed: frozenset[str] = frozenset()
    ) -> None:
        """streamed: paths of routes that read the body themselves, with limits of their own."""
        self._app = app
        self._max_bytes = max_bytes
        self._streamed = streamed
        self._room = BodyRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read_here = scope["type"] == "http" and scope["method"] == "POST"
        if not is_read_here or scope["path"] in self._streamed:
            await self._app(scope, receive, send)
            return
        declared = header(scope, b"content-length") or "0"
        if declared.isdecimal() and int(declared[:20]) > LOOKED_THROUGH * self._max_bytes:
            raise self._too_large()
        exchange: Exchange = scope[EXCHANGE_KEY]
        client, body = exchange.client, _Body(self._max_bytes)
        try:
            try:
                reading = self._read(receive, exchange, client, body)
                complete = await exchange.deadline.within(BODY_TIMEOUT_S, reading)
            except TimeoutError as exc:
                if body.size > self._max_bytes:
                    raise self._too_large() from exc
                raise InvalidRequestError("the body did not arrive in time", status=408) from exc
            if complete:
                await self._app(scope, receive, send)
        finally:
            self._room.ended(client, body.size)

    async def _read(self, receive: Receive, exchange: Exchange, client: str, body: _Body) -> bool:
        """Read the whole body; False if the client left while sending it."""
        more = True
        try:
            while more and body.size <= LOOKED_THROUGH * self._max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                before = body.size
                body.take(message.get("body", b""))
                if before <= self._max_bytes < body.size:
                    exchange.deadline.begin(REST_TIMEOUT_S)
                self._room.arrived(client, before, body.size)
                more = message.get("more_body", False)
        finally:
            exchange.body, exchange.promise = body.whole(), body.promise()
            body.forget()
        if body.size > self._max_bytes:
            raise self._too_large()
        return True

    def _too_large(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"the body is larger than {self._max_bytes} bytes", status=413, code="body_too_large"
        )


class BodyRoom:
    """Counts the bytes of large bodies whose requests are open. One client may use half of the
    limit."""

    def __init__(self, most: int = MAX_BODIES_BYTES) -> None:
        self._most = most
        self._taken = 0
        self._taken_by: Counter[str] = Counter()

    def arrived(self, client: str, before: int, now: int) -> None:
        """Record that a body of that client has grown. Raises `EngineOverloadedError` if that is
        too much."""
        if now <= SMALL_BYTES:
            return
        growth = now - (before if before > SMALL_BYTES else 0)
        self._taken += growth
        self._taken_by[client] += growth
        if self._taken > self._most or self._taken_by[client] > self._most // 2:
            raise EngineOverloadedError("too many large bodies are here; retry later")

    def ended(self, client: str, size: int) -> None:
        """Record that a request of that client, of whose body this much had come, has ended."""
        if size <= SMALL_BYTES:
            return
        self._taken -= size
        self._taken_by[client] -= size
        if not self._taken_by[client]:
            del self._taken_by[client]


class _Body:
    """What has come of a body: kept up to a size, and beyond that only looked through."""

    def __init__(self, max_bytes: int) -> None:
        self.size = 0
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._finder: PromiseFinder | None = None

    def take(self, piece: bytes) -> None:
        self.size += len(piece)
        if self._finder is not None:
            self._finder.feed(piece)
            return
        self._pieces.append(piece)
        if self.size > self._max_bytes:
            self._finder = PromiseFinder()
            self._finder.feed(b"".join(self._pieces))
            self._pieces.clear()

    def whole(self) -> bytes:
        return b"".join(self._pieces)

    def forget(self) -> None:
        self._pieces.clear()

    def promise(self) -> dict[str, Any] | None:
        return self._finder.found() if self._finder is not None else None


class UntilDisconnect:
    """A context that cancels its body when the client disconnects, and then ends without an error.

    Afterwards `gone` says whether that happened.
    """

    def __init__(self, receive: Receive, exchange: Exchange) -> None:
        self.gone = False
        self._receive = receive
        self._exchange = exchange
        self._watcher: asyncio.Task[None] | None = None
        """None: the server tells by itself, and no task has to wait for it."""

    def __enter__(self) -> Self:
        body_task = asyncio.current_task()
        if body_task is None:
            raise RuntimeError("UntilDisconnect needs a task to cancel")
        self._body_task = body_task
        if self._exchange.parts is not None:
            self._exchange.parts.watch(self._disconnected)
        else:
            self._watcher = asyncio.create_task(self._watch())
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> bool:
        if self._exchange.parts is not None:
            self._exchange.parts.watch(None)
        if self._watcher is not None:
            self._watcher.cancel()
            # Else the error that it ends with, whose traceback knows us, would be a cycle: the
            # garbage of every request.
            self._watcher = None
        if not self.gone:
            return False
        self._body_task.uncancel()
        return exc_type is asyncio.CancelledError

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected()

    def _disconnected(self) -> None:
        # Servers also say "disconnect" once an answer is complete.
        if not self._exchange.completed:
            self.gone = True
            self._body_task.cancel()


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI endpoint of all paths that nothing else serves."""
    raise InvalidRequestError(f"no such path: {scope['path'][:200]}", status=404, code="not_found")
