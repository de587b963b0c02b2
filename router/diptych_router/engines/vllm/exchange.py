"""One request at a vLLM server: from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec

from diptych_protocol import (
    UNREADABLE,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDescription,
    FinishReason,
    InvalidRequestError,
)
from diptych_protocol.abilities import check_abilities, lacks_of
from diptych_protocol.kv_transfer_params import fingerprint
from diptych_router.engines.vllm.answer_stream import AnswerStream, MalformedStreamError, refusal
from diptych_router.engines.vllm.hand_off import (
    LENDS,
    WHOLE,
    Leg,
    early_leg,
    lending_leg,
    passes_token_on,
    prefill_answer,
    prefill_output,
    ticket_of,
)
from diptych_router.engines.vllm.messages import (
    GENERATE,
    cannot_go_on,
    cut_short,
    generate_body,
    max_tokens_of,
    not_offered,
    too_late,
)
from diptych_router.engines.vllm.references import TICKET, UnusableReferenceError
from diptych_router.engines.vllm.server import CONNECT_S, read_body
from diptych_router.engines.vllm.service import VllmService

BEGIN_S: Final = 30.0
"""From a request to the head of its answer. vLLM sends the head of a stream before it computes."""
IDLE_S: Final = 600.0
"""A stream that brings nothing for so long is broken, even if its request waits for its turn there.
Servers that hang are found out much sooner, by their health."""
DRAIN_S: Final = 5.0
"""After the last output, how long the rest of a stream may take before its connection is closed."""
MAX_ERROR_BYTES: Final = 64 << 10
MAX_PREFILL_BYTES: Final = 4 << 20
"""An answer of prefill names the blocks of a prompt, in some ten bytes for each."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S)

HandOn = Callable[[list[EngineCoreOutput]], None]


class Exchanger:
    """Sends requests to the server that has described itself so."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        service: VllmService,
        address: str,
        about: EngineDescription,
        salt: str,
    ) -> None:
        self._session, self._service, self._address = session, service, address
        self._max_model_len = about.max_model_len
        self._lacks = lacks_of([about])
        self._compat = fingerprint(about.compat)
        self.salt = salt
        """Added to each request's cache salt, so that the server finds nothing that it stored
        before; empty: it may use all that it remembers."""

    async def run(self, request: EngineCoreRequest, hand_on: HandOn) -> None:
        """Send a request and hand its outputs on.

        Raises `CONNECTION_ERRORS`, `TooLongError`, and `MalformedStreamError`.
        """
        core_id = request.request_id
        try:
            # One that was held while no engine was up was not refused when it came.
            check_abilities(self._lacks, request)
        except InvalidRequestError as exc:
            hand_on([not_offered(core_id, exc)])
            return
        if cannot_go_on(request):
            hand_on([cut_short(core_id)])
            return
        try:
            leg = self._leg_of(request)
        except UnusableReferenceError as exc:
            hand_on([too_late(core_id, str(exc))])
            return
        headers = {"content-type": "application/json", **(request.trace_headers or {})}
        async with asyncio.timeout(None if leg.lends else BEGIN_S) as limit:
            try:
                response = await self._session.post(
                    GENERATE,
                    data=self._body(request, leg),
                    headers=headers,
                    timeout=_TIMEOUT,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectorError:
                self._reads_nothing(leg)
                raise
            try:
                if response.status != 200:
                    self._reads_nothing(leg)
                    body = await read_body(response, MAX_ERROR_BYTES)
                    hand_on([refusal(core_id, response.status, body)])
                elif leg.lends:
                    body = await read_body(response, MAX_PREFILL_BYTES)
                    hand_on([self._lent(request, leg, body)])
                else:
                    limit.reschedule(None)
                    await self._follow(request, leg, response, limit, hand_on)
            finally:
                response.close()  # one that was read to its end has given its connection back

    def _leg_of(self, request: EngineCoreRequest) -> Leg:
        asked = ticket_of(request)
        if asked is None:
            return WHOLE
        if asked.get(LENDS):
            return lending_leg(asked)
        if TICKET not in asked:
            return early_leg(asked)
        taken = self._service.references.take(asked, self._address, time.monotonic())
        return Leg(taken, ticket=asked)

    def _reads_nothing(self, leg: Leg) -> None:
        """The server has refused the request, or failed with it."""
        if leg.ticket is not None:
            self._service.references.nothing_reads(leg.ticket)

    def _body(self, request: EngineCoreRequest, leg: Leg) -> bytes:
        if self.salt:
            salt = f"{request.cache_salt or ''}{self.salt}"
            request = msgspec.structs.replace(request, cache_salt=salt)
        return generate_body(
            request, self._max_model_len, kv_transfer_params=leg.params, stream=not leg.lends
        )

    def _lent(self, request: EngineCoreRequest, leg: Leg, body: bytes) -> EngineCoreOutput:
        """The output of a prefill engine, with what stands for its KV."""
        try:
            answer = prefill_answer(body)
        except UNREADABLE as exc:
            raise MalformedStreamError(f"the answer of prefill cannot be read: {exc}") from exc
        service = self._service
        is_early = (leg.params or {}).get("lease_id") in service.early
        passes_on = passes_token_on(service.connector, request) and not is_early
        output = prefill_output(request, answer, service.model.vocab_size, passes_on=passes_on)
        if answer.kv_transfer_params is not None:
            service.learn(self._address, answer.kv_transfer_params)
            output.kv_transfer_params = service.references.keep(
                self._address, self._compat, answer.kv_transfer_params, time.monotonic()
            )
        return output

    async def _follow(
        self,
        request: EngineCoreRequest,
        leg: Leg,
        response: aiohttp.ClientResponse,
        limit: asyncio.Timeout,
        hand_on: HandOn,
    ) -> None:
        most = max_tokens_of(request, self._max_model_len)
        stream = AnswerStream(request, most, self._service.model.vocab_size)
        loop: Any = asyncio.get_running_loop()
        async for data in response.content.iter_any():
            outputs = stream.feed(data)
            if outputs and outputs[-1].finish_reason is FinishReason.ERROR:
                self._reads_nothing(leg)
            hand_on(outputs)
            if stream.ended:
                limit.reschedule(loop.time() + DRAIN_S)
        if not stream.ended:
            raise ConnectionResetError("the stream ended before the answer")
