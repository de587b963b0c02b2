"""What a router asks a vLLM server about itself. Every answer is bounded, every wait ends."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp

from diptych_frontend.core_client.client import NotConnectedError
from diptych_protocol import EngineDescription, UtilityError
from diptych_router.vllm.description import ServedModel, check_generate, description_of
from diptych_router.vllm.event_socket import EventSource, source_of
from diptych_router.vllm.messages import GENERATE
from diptych_router.vllm.metrics import ServerFigures, read_metrics

CONNECT_S: Final = 3.0
PAGE_S: Final = 10.0
MAX_PAGE_BYTES: Final = 8 << 20
COMPLETIONS: Final = "/v1/completions"
NO_MODEL: Final = "no model: this request only gives blocks back"
_UNKNOWN_MODEL: Final = 404
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

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session, self._address = session, address

    async def describe(self, served: ServedModel, timeout_s: float) -> EngineDescription:
        """Who it is. Raises as `figures`, and `UnfitServerError`."""
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
        """Say that nobody wants the KV that these parameters describe. Raises as `figures`.

        vLLM tells its KV connector of a request that it refuses after it has read it.
        """
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(
                    COMPLETIONS, json=body, timeout=_TIMEOUT, allow_redirects=False
                ) as response,
            ):
                answer = await read_body(response, MAX_PAGE_BYTES)
        except CONNECTION_ERRORS as exc:
            raise NotConnectedError(f"{COMPLETIONS} of {self._address}: {exc!r}") from exc
        if response.status != _UNKNOWN_MODEL or NO_MODEL.encode() not in answer:
            raise UtilityError(
                f"{COMPLETIONS}: status {response.status}, and not the refusal of a model"
            )

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
