"""Keeps the requests that clients send to a vLLM server, from their arrival to their ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

import msgspec

from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    PoolingParams,
    SamplingParams,
)
from diptych_protocol.kv_transfer_params import PARAM
from diptych_protocol.wire import ErrorKind
from diptych_vllm.serve.adapters import VllmAdapters
from diptych_vllm.serve.early import EarlyPrompts
from diptych_vllm.serve.engine_view import ServedEngine
from diptych_vllm.serve.hand_off import FETCHES, TooLateError, VllmHandOffs, asked_of
from diptych_vllm.serve.translation import (
    CoreOutput,
    check_request,
    failure,
    num_received,
    output_of,
)

log = logging.getLogger(__name__)

EARLY_S: Final = 600.0
"""The server gives up the early fetch of a prompt after this many seconds."""

Key = tuple[bytes, str]
"""A client, and the id of one of its requests."""


class VllmAnswers:
    """Runs requests, each in a task of its own. Cancelling the task aborts the request."""

    def __init__(
        self,
        engine: ServedEngine,
        adapters: VllmAdapters,
        hand_offs: VllmHandOffs,
        put: Callable[[bytes, EngineCoreOutput], None],
        on_death: Callable[[], None],
        early: Callable[[Any], EarlyPrompts],
    ) -> None:
        """
        Args:
            put: sends an output to a client, soon.
            on_death: called when the engine's core has ended.
            early: makes the prompts that are fetched early, of a function that runs one of them.
        """
        self._engine, self._adapters, self._hand_offs = engine, adapters, hand_offs
        self._put, self._on_death = put, on_death
        self._early = early(self._fetch_early)
        self._open: dict[Key, asyncio.Task[None]] = {}
        self._unread: set[Key] = set()
        """Requests that fetch KV and have brought no output yet."""
        self._salt = ""
        """A part of every request's cache salt. When it changes, requests no longer find blocks
        that were stored before."""

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._open)

    def add(self, client: bytes, request: EngineCoreRequest) -> None:
        key = client, request.request_id
        if key in self._open:
            self._put(client, failure(request.request_id, "a request with this id is here already"))
            return
        task = asyncio.ensure_future(self._serve(client, request))
        self._open[key] = task
        task.add_done_callback(lambda ended: self._ended(key, ended))

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        self._unread.discard(key)
        if self._open.get(key) is task:
            del self._open[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request %s was not served", key[1], exc_info=error)

    def abort(self, client: bytes, request_id: str) -> None:
        """End a request. Its client receives no further output."""
        self._early.drop((client, request_id))
        task = self._open.pop((client, request_id), None)
        if task is not None:
            task.cancel()

    def abort_all(self) -> None:
        """End all requests, and tell their clients that they have ended."""
        for client, request_id in list(self._open):
            self.abort(client, request_id)
            end = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
            self._put(client, end)

    def lose(self, client: bytes) -> None:
        """End all requests of a client that is gone."""
        self._early.drop_of(client)
        for key in [key for key in self._open if key[0] == client]:
            self.abort(*key)

    def announced(self, client: bytes, request: EngineCoreRequest) -> None:
        """Record that a request will come, and that another engine computes its prompt."""
        self._early.announced(client, request, asked_of(request))

    def doubt(self, why: str) -> None:
        """Fail the requests that were reading KV, and let no later request find blocks that are
        stored now, because the KV of either may be wrong."""
        log.error("what was fetched is not believed: %s", why)
        self._salt = secrets.token_hex(8)
        for client, request_id in list(self._unread):
            self.abort(client, request_id)
            self._put(client, failure(request_id, f"its KV may be wrong: {why}", param=PARAM))

    # --- one request --------------------------------------------------------------------------

    async def _serve(self, client: bytes, request: EngineCoreRequest) -> None:
        name = request.request_id
        try:
            check_request(request, self._engine.abilities)
            if request.pooling_params is not None:
                await self._pool(client, request, request.pooling_params)
            else:
                await self._generate(client, request)
        except TooLateError as exc:
            self._put(client, failure(name, str(exc), param=PARAM))
        except Exception as exc:
            if self._engine.has_died(exc):
                self._on_death()
                return
            kind, param = self._engine.error_of(exc)
            if kind is ErrorKind.FAULT:
                log.exception("request %s failed", name)
            whose = "" if isinstance(exc, DiptychError) else "vLLM: "
            self._put(client, failure(name, f"{whose}{exc}", kind, param))

    async def _pool(self, client: bytes, request: EngineCoreRequest, params: PoolingParams) -> None:
        async with self._adapters.using(self._salted(request)) as own:
            vectors = await self._engine.pool(own, params)
        self._put(
            client,
            EngineCoreOutput(
                request.request_id, [], pooling_output=vectors, finish_reason=FinishReason.STOP
            ),
        )

    async def _generate(self, client: bytes, request: EngineCoreRequest) -> None:
        key, asked = (client, request.request_id), asked_of(request)
        early = None
        if asked.get(FETCHES):  # who has computed the prompt has told them
            params = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
            request = msgspec.structs.replace(request, sampling_params=params)
            early = await self._early.take(key)
        if early is not None:
            asked = {}
        reads = bool(asked.get(FETCHES))
        told = self._hand_offs.told(asked) if asked else None
        if reads:
            self._unread.add(key)
        begun = False
        num_cached = 0

        def take(made: CoreOutput) -> None:
            nonlocal begun, num_cached
            output = output_of(request, made)
            if not begun:
                begun = True
                self._unread.discard(key)
                came = self._count_received(made)
                num_cached = output.num_cached_tokens - came - (early or 0)
                output.num_received_tokens = came + (early or 0)
            output.num_cached_tokens = max(0, num_cached)
            self._hand_offs.answer(request, output)
            self._put(client, output)

        try:
            async with self._adapters.using(self._salted(_with(request, told))) as own:
                await self._engine.generate(own, take)
        except Exception as exc:
            if reads and not begun and not self._engine.has_died(exc):
                await self._give_back(request.request_id, asked)
            raise

    def _count_received(self, made: CoreOutput) -> int:
        num_tokens = num_received(made)
        self._engine.load.prompt_came(num_tokens)
        return num_tokens

    async def _give_back(self, name: str, asked: dict[str, Any]) -> None:
        """Give back the KV that waits for a request which vLLM has refused."""
        self._hand_offs.unread(asked)
        try:
            await self.reject(asked)
        except InvalidRequestError as exc:
            log.info("request %s: nothing to release: %s", name, exc)

    async def reject(self, lease: dict[str, Any]) -> None:
        """Let a lease's owner free its blocks: nobody reads them. Raises `InvalidRequestError`."""
        params = self._hand_offs.given_back(lease)
        if params is not None:
            await self._engine.reject(params)

    async def _fetch_early(self, request: EngineCoreRequest) -> int | None:
        """Return how many tokens came from elsewhere; None if the prompt was not fetched."""
        fetched: int | None = None

        def take(made: CoreOutput) -> None:
            nonlocal fetched
            came = self._count_received(made)
            if output_of(request, made).finish_reason is FinishReason.LENGTH:
                fetched = came

        try:
            async with asyncio.timeout(EARLY_S):
                told = self._hand_offs.told(asked_of(request))
                async with self._adapters.using(self._salted(_with(request, told))) as own:
                    await self._engine.generate(own, take)
        except Exception as exc:  # the request then fetches its KV itself
            log.info("request %s: its KV did not come early: %r", request.request_id, exc)
            return None
        return fetched

    def _salted(self, request: EngineCoreRequest) -> EngineCoreRequest:
        if not self._salt:
            return request
        salt = f"{request.cache_salt or ''}{self._salt}"
        return msgspec.structs.replace(request, cache_salt=salt)


def _with(request: EngineCoreRequest, told: dict[str, Any] | None) -> EngineCoreRequest:
    """Return the request with these parameters for vLLM's connector."""
    params: SamplingParams = request.sampling
    extra = {name: x for name, x in (params.extra_args or {}).items() if name != PARAM}
    if told is not None:
        extra[PARAM] = told
    params = msgspec.structs.replace(params, extra_args=extra or None)
    return msgspec.structs.replace(request, sampling_params=params)
