"""Sends a batch's requests to the server's own routes without a connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_frontend.openai.exchange import exchange_of

_OF_BATCH: Final = "diptych.batch"
"""The key in a scope of who asks. A scope of a connection cannot have it."""


@dataclass(slots=True)
class Answer:
    """The answer of a route."""

    request_id: str
    status: int = 0
    """0: the request was aborted before there was an answer."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    @property
    def retry_after_s(self) -> float:
        """The seconds to wait before the next request, if the server gave any."""
        text = self.headers.get(b"retry-after", b"0")
        return float(text) if text.isdigit() else 0.0


@dataclass(frozen=True, slots=True)
class Asker:
    """The client for whom a batch sends requests, and their priority."""

    client: str
    least_priority: int | None
    """See `Exchange.least_priority`."""


class AskedByBatch:
    """A layer in the place of the check of API keys, since a batch knows its client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asker: Asker = scope[_OF_BATCH]
        exchange = exchange_of(scope)
        exchange.tenant, exchange.least_priority = asker.client, asker.least_priority
        await self._app(scope, receive, send)


async def ask(
    app: ASGIApp, path: str, body: bytes, request_id: str, asker: Asker, stop: asyncio.Event
) -> Answer:
    """POST a body. Setting `stop` aborts the request, as when a client disconnects."""
    sent = False
    answer = Answer(request_id)
    pieces: list[bytes] = []

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await stop.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = dict(message.get("headers", ()))
        else:
            pieces.append(message.get("body", b""))

    await app(_scope(path, body, request_id, asker), receive, send)
    answer.body = b"".join(pieces)
    return answer


def _scope(path: str, body: bytes, request_id: str, asker: Asker) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": ("batch", 0),
        "server": None,
        _OF_BATCH: asker,
    }
