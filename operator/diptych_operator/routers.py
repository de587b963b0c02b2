"""Polls routers for their reports, over their admin port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp
import msgspec

from diptych_operator.api.names import ADMIN_PORT
from diptych_protocol import UNREADABLE
from diptych_protocol.admin import RouterReport

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
MAX_REPORT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Polled:
    reports: tuple[RouterReport, ...]
    unreachable: int


class Routers:
    """One HTTP session for all admin ports. Use it as an async context manager."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # or a small answer could be a large one
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def poll(self, addresses: Iterable[str], tokens: Sequence[str]) -> Polled:
        """Return the reports of all routers that answer. Never raises for one that does not."""
        answers = await asyncio.gather(*(self._ask(address, tokens) for address in addresses))
        reports = tuple(report for report in answers if report is not None)
        return Polled(reports, len(answers) - len(reports))

    async def _ask(self, address: str, tokens: Sequence[str]) -> RouterReport | None:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{ADMIN_PORT}/admin/state"
        for token in tokens:  # during a rotation a router may still know only the older one
            try:
                headers = {"Authorization": f"Bearer {token}"}
                ask = self._session.get(url, headers=headers, allow_redirects=False)
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
