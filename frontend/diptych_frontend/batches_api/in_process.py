"""A request of a batch, given to the server's own routes without a connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_frontend.openai.asgi import exchange_of

_OF_BATCH: Final = "diptych.batch"
"""The key in a scope of who asks. A scope of a connection cannot have it."""


@dataclass(slots=True)
class Answer:
    """What a route answered."""

    request_id: str
    status: int = 0
    """0: it was given up before there was an answer."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    @property
    def retry_after_s(self) -> float:
        """How long the server wants to be left alone."""
        text = self.headers.get(b"retry-after", b"0")
        return float(text) if text.isdigit() else 0.0


@dataclass(frozen=True, slots=True)
class Asker:
    """For whom a batch asks, and how urgent that is."""

    client: str
    least_priority: int | None
    """See `Exchange.least_priority`."""


class AskedByBatch:
    """A layer in the place of the one that looks at API keys: a batch knows whose it is."""

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
    """POST a body. When `stop` is set the request is aborted, as when a client leaves."""
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
