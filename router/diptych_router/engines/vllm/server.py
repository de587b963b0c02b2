"""What a router asks a vLLM server about itself. Every answer is bounded, every wait ends."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp

from diptych_frontend.core_client.client import NotConnectedError
from diptych_protocol import EngineDescription, UtilityError
from diptych_protocol.kv_transfer_params import LEASE_FIELDS
from diptych_router.engines.vllm.description import ServedModel, check_generate, description_of
from diptych_router.engines.vllm.event_socket import EventSource, source_of
from diptych_router.engines.vllm.messages import GENERATE
from diptych_router.engines.vllm.metrics import ServerFigures, read_metrics

CONNECT_S: Final = 3.0
PAGE_S: Final = 10.0
MAX_PAGE_BYTES: Final = 8 << 20
REJECT: Final = "/v1/kv_transfer/reject"
"""The route that our connector adds to vLLM's server."""
COMPLETIONS: Final = "/v1/completions"
NO_MODEL: Final = "no model: this request only gives blocks back"
_NOT_THERE: Final = 404
CONNECTION_ERRORS: Final = (aiohttp.ClientError, OSError)
"""What HTTP calls raise, besides `TimeoutError`, which is among these."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)


class TooLongError(UtilityError):
    """A body is longer than any that makes sense."""


def open_session(address: str) -> aiohttp.ClientSession:
    """A client of one server, with as many connections as it has requests. Needs a running loop."""
    return aiohttp.ClientSession(
        f"http://{address}",
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """A whole body. Raises `TooLongError`."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > most:
            response.close()
            raise TooLongError(f"{response.url.path} has more than {most} bytes")
    return bytes(body)


class VllmServer:
    """The pages of one server."""

    def __init__(
        self, session: aiohttp.ClientSession, address: str, *, may_have_route: bool
    ) -> None:
        """may_have_route: it has our connector, and so may serve `REJECT`."""
        self._session, self._address = session, address
        self._may_have_route = self._has_route = may_have_route

    async def describe(self, served: ServedModel, timeout_s: float) -> EngineDescription:
        """Who it is. Raises as `figures`, and `UnfitServerError`."""
        self._has_route = self._may_have_route  # until it says otherwise
        async with asyncio.timeout(timeout_s):
            await self._page("/health")
            status, _ = await self._get(GENERATE)
            check_generate(status)
            models = await self._page("/v1/models")
            version = await self._page("/version")
            figures = read_metrics((await self._page("/metrics")).decode(errors="replace"))
        return description_of(models, version, figures, served, self._address)

    async def figures(self, timeout_s: float) -> ServerFigures:
        """Its load now, if it is healthy. Raises `NotConnectedError` if nobody listens,
        `UtilityError` if it does not answer well, and `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._page("/health")
            return read_metrics((await self._page("/metrics")).decode(errors="replace"))

    async def event_source(self) -> EventSource | None:
        """Where its KV events are; see `source_of`. Raises as `figures`, and `EventsError`."""
        async with asyncio.timeout(PAGE_S):
            page = await self._page("/kv_event_sources")
        host = self._address.rpartition(":")[0]
        return source_of(page, host)

    async def lives(self, timeout_s: float) -> bool:
        """It says that it is healthy."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._page("/health")
        except (NotConnectedError, UtilityError, TimeoutError):
            return False
        return True

    async def give_back(self, params: dict[str, Any], timeout_s: float) -> None:
        """Say that nobody wants the KV that these parameters describe. Raises as `figures`."""
        async with asyncio.timeout(timeout_s):
            if self._has_route:
                self._has_route = await self._reject(params)
            if not self._has_route:
                await self._have_refused(params)

    async def _reject(self, params: dict[str, Any]) -> bool:
        """Give a lease back by the route for that. Returns whether the server has it."""
        lease = {name: params.get(name) for name in LEASE_FIELDS}
        status, answer = await self._post(REJECT, {"kv_transfer_params": lease})
        if status not in (200, _NOT_THERE):
            raise UtilityError(f"{REJECT}: status {status}: {answer[:200]!r}")
        return status == 200

    async def _have_refused(self, params: dict[str, Any]) -> None:
        """vLLM tells its KV connector of a request that it refuses after it has read it."""
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        status, answer = await self._post(COMPLETIONS, body)
        if status != _NOT_THERE or NO_MODEL.encode() not in answer:
            raise UtilityError(f"{COMPLETIONS}: status {status}, and not the refusal of a model")

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        try:
            async with self._session.post(
                path, json=body, timeout=_TIMEOUT, allow_redirects=False
            ) as response:
                return response.status, await read_body(response, MAX_PAGE_BYTES)
        except CONNECTION_ERRORS as exc:
            raise NotConnectedError(f"{path} of {self._address}: {exc!r}") from exc

    async def _page(self, path: str) -> bytes:
        status, body = await self._get(path)
        if status != 200:
            raise UtilityError(f"{path}: status {status}")
        return body

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(path, timeout=_TIMEOUT, allow_redirects=False) as response:
                return response.status, await read_body(response, MAX_PAGE_BYTES)
        except TimeoutError as exc:
            raise TimeoutError(f"{path}: no connection within {CONNECT_S:g} s") from exc
        except CONNECTION_ERRORS as exc:
            raise NotConnectedError(f"{path} of {self._address}: {exc!r}") from exc
