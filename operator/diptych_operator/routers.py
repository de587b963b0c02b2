"""Polls routers for their reports, over their admin port."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import aiohttp
import msgspec

from diptych_operator.api.base import ServiceKey
from diptych_operator.api.names import ADMIN_PORT
from diptych_protocol import UNREADABLE
from diptych_protocol.admin import RouterReport

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
WAIT_S = 30.0
"""So long a router without a request may keep back its answer, where one is waited for."""
REST_S = 5.0
"""Between two questions to a router of an older release, which never keeps its answer back."""
MAX_REPORT_BYTES = 8 << 20


class Routers:
    """One HTTP session for all admin ports. Use it as an async context manager."""

    def __init__(self, wake: Callable[[ServiceKey], None] = lambda _: None) -> None:
        """`wake` is called for a service that sleeps once one of its routers holds a request."""
        self._wake = wake
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # or a small answer could be a large one
            trust_env=False,
            connector=aiohttp.TCPConnector(limit=0),  # those that wait are no limit to others
        )
        self._followed: dict[ServiceKey, tuple[tuple[str, ...], asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in list(self._followed):
            self.follow(key, [], [])
        await self._session.close()

    def follow(self, key: ServiceKey, addresses: Sequence[str], tokens: Sequence[str]) -> None:
        """Have `wake` called for a service that sleeps, and whose routers are these. It ends with
        a call that names none."""
        asked = (*addresses, *tokens) if addresses else ()
        known, task = self._followed.get(key, ((), None))
        if known == asked:
            return
        if task is not None:
            del self._followed[key]
            task.cancel()
        if asked:
            watch = asyncio.create_task(self._watch(key, addresses, tokens))
            self._followed[key] = asked, watch

    async def _watch(
        self, key: ServiceKey, addresses: Sequence[str], tokens: Sequence[str]
    ) -> None:
        async def watch_one(address: str) -> None:
            while True:
                began = time.monotonic()
                report = await self._ask(address, tokens, WAIT_S)
                if report is not None and report.held_requests:
                    self._wake(key)
                # Also after that: the pass may not have come to it.
                await asyncio.sleep(max(0.0, REST_S - (time.monotonic() - began)))

        await asyncio.gather(*map(watch_one, addresses))

    async def poll(
        self, addresses: Sequence[str], tokens: Sequence[str]
    ) -> Mapping[str, RouterReport | None]:
        """Return what each router reports, by its address; None if it does not answer."""
        answers = await asyncio.gather(*(self._ask(address, tokens) for address in addresses))
        return dict(zip(addresses, answers, strict=True))

    async def _ask(
        self, address: str, tokens: Sequence[str], wait_s: float = 0.0
    ) -> RouterReport | None:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{ADMIN_PORT}/admin/state" + (f"?wait={wait_s:g}" if wait_s else "")
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S + wait_s)
        for token in tokens:  # during a rotation a router may still know only the older one
            try:
                headers = {"Authorization": f"Bearer {token}"}
                ask = self._session.get(
                    url, headers=headers, allow_redirects=False, timeout=timeout
                )
                async with ask as answer:
                    if answer.status == 401:
                        continue
                    answer.raise_for_status()
                    if (answer.content_length or MAX_REPORT_BYTES) >= MAX_REPORT_BYTES:
                        raise OSError(f"its report is longer than {MAX_REPORT_BYTES} bytes")
                    return msgspec.json.decode(await answer.read(), type=RouterReport)
            except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as exc:
                # Not louder: a router that starts is asked again and again. Status tells of it.
                log.debug("router at %s does not report: %s", address, exc or type(exc).__name__)
                return None
        log.warning("router at %s refuses every admin token of its service", address)
        return None
