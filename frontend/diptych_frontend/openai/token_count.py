"""Routes that count the tokens of a request's prompt, for APIs that are translated into chats."""

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
from diptych_protocol import EngineClient, TokensPrompt


class _Body(Protocol):
    model: str


Body = TypeVar("Body", bound=_Body)


class TokenCountRoute(Generic[Body]):
    """The ASGI endpoint. No engine is asked."""

    def __init__(
        self,
        kind: type[Body],
        prompt_of: Callable[[Body, Scope], TokensPrompt],
        answer: Callable[[int], msgspec.Struct],
        image_word: bytes,
        engine: EngineClient,
        served_names: frozenset[str],
        workers: RequestWorkers,
    ) -> None:
        """kind: the type of requests. prompt_of: returns the prompt, or raises
        `InvalidRequestError`. answer: makes the answer from the number of tokens. image_word: a
        word that every body with images contains."""
        self._decoder = msgspec.json.Decoder(kind)
        self._prompt_of, self._answer, self._image_word = prompt_of, answer, image_word
        self._engine = engine
        self._served_names = served_names
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = exchange_of(scope).body
        work = partial(self._count, scope, body)
        answer = await self._workers.read(scope, body, work, self._image_word)
        await send_bytes(send, 200, answer, [])

    def _count(self, scope: Scope, body: bytes) -> bytes:
        request = decode_body(scope, body, self._decoder, most_values(self._engine.max_model_len))
        adapter_of(request.model, self._served_names, self._engine)
        prompt = self._prompt_of(request, scope)
        return encode(self._answer(len(prompt["prompt_token_ids"])))
