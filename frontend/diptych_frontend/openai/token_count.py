"""Routes that the server's own tokenizer answers, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_frontend.openai.exchange import decode_body, exchange_of, most_values, send_bytes
from diptych_frontend.openai.generation import adapter_of
from diptych_frontend.openai.request_workers import RequestWorkers
from diptych_frontend.openai.responses import encode
from diptych_protocol import EngineClient


class _Body(Protocol):
    @property
    def model(self) -> str | None: ...


Body = TypeVar("Body", bound=_Body)


class TokenizerRoute(Generic[Body]):
    """The ASGI endpoint."""

    def __init__(
        self,
        kind: type[Body],
        answer: Callable[[Body, Scope], msgspec.Struct],
        image_word: bytes | None,
        engine: EngineClient,
        served_names: frozenset[str],
        workers: RequestWorkers,
    ) -> None:
        """kind: the type of requests. answer: returns the answer, or raises `InvalidRequestError`.
        image_word: a word that every body with images contains, if there are any."""
        self._decoder = msgspec.json.Decoder(kind)
        self._answer, self._image_word = answer, image_word
        self._engine = engine
        self._served_names = served_names
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = exchange_of(scope).body
        work = partial(self._answered, scope, body)
        answer = await self._workers.read(scope, body, work, self._image_word)
        await send_bytes(send, 200, answer, [])

    def _answered(self, scope: Scope, body: bytes) -> bytes:
        request = decode_body(scope, body, self._decoder, most_values(self._engine.max_model_len))
        if request.model is not None:
            adapter_of(request.model, self._served_names, self._engine)
        return encode(self._answer(request, scope))
