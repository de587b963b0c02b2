"""Admits the requests of keys within their limits.

Requests that come at the same time are entered into the books together, in a thread, so that the
event loop never waits for the disk. A key without limits does not wait either: its requests are
entered when they have ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych_frontend.quotas.books import Books, Wish
from diptych_frontend.quotas.ledger import NO_LIMITS, Bill, Count, Grant, Limits, Window
from diptych_protocol import EngineOverloadedError, InvalidRequestError, QuotaExceededError

log = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
"""How long a request waits for the disk."""
Headers = tuple[tuple[bytes, bytes], ...]


class _Asked(NamedTuple):
    wish: Wish
    answer: asyncio.Future[Grant]


class Quotas(Collector):
    """The limits of a server's keys. As a collector it has the metrics of limits."""

    def __init__(
        self,
        limits: Callable[[], Mapping[str, Limits]],
        books: Books,
        *,
        model_name: str = "",
        num_routers: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """limits: of the keys that have some. num_routers: how many routers there are that count
        for themselves; each then grants its part."""
        self._limits, self._num_routers = limits, num_routers
        self._books, self._clock = books, clock
        self._model_name = model_name
        self._asked: list[_Asked] = []
        self._ended: list[Bill] = []
        self._posting: asyncio.Task[None] | None = None

    async def reserve(self, key: str, tokens: int) -> Grant:
        """Reserve the most tokens that a request can take. `settle` the bill when it has ended."""
        limits = self._limits_of(key)
        if limits == NO_LIMITS:
            return Grant(Bill(key), [], [])
        asked = _Asked(Wish(key, tokens, limits), asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._post_soon()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asked.answer
        except (TimeoutError, asyncio.CancelledError) as exc:
            if not asked.answer.cancelled() and asked.answer.exception() is None:
                self.settle(asked.answer.result().bill)  # granted just before
            if isinstance(exc, TimeoutError):
                late = "the record of usage does not answer; retry later"
                raise EngineOverloadedError(late) from exc
            raise

    def settle(self, bill: Bill) -> None:
        """Record that a request has ended."""
        if bill.reserved or bill.prompt:
            self._ended.append(bill)
            if bill.reserved:
                self._post_soon()

    def refresh(self) -> bool:
        """Enter what has ended, and see what other routers have entered. Call it every second."""
        if self._ended or self._limits():
            self._post_soon()
        return False

    async def close(self) -> None:
        """Enter what has ended."""
        self._post_soon()
        while self._posting is not None:
            await asyncio.wait((self._posting,))
        self._books.close()

    def collect(self) -> Iterator[Metric]:
        """What a scrape shows, as the ledger was at the last post."""
        labels, now = ("model_name", "tenant", "per"), self._clock()
        limit = GaugeMetricFamily(
            "diptych:tenant_tokens_limit", "Tokens that an API key may use.", labels=labels
        )
        left = GaugeMetricFamily(
            "diptych:tenant_tokens_left", "Tokens that it has left of them.", labels=labels
        )
        for key in self._limits():
            count = self._books.ledger.counts.get(key, Count())
            for window in count.windows(self._limits_of(key), now):
                limit.add_metric((self._model_name, key, window.per), window.limit)
                left.add_metric((self._model_name, key, window.per), window.left)
        yield from (limit, left)

    def _limits_of(self, key: str) -> Limits:
        limits = self._limits().get(key, NO_LIMITS)
        share = 1 if self._books.folder is not None else max(self._num_routers(), 1)
        return limits if share == 1 else limits.part(share)

    def _post_soon(self) -> None:
        if self._posting is None:
            self._posting = asyncio.get_running_loop().create_task(self._post())

    async def _post(self) -> None:
        """Enter what there is until there is no more that anybody waits for."""
        try:
            while True:
                await self._post_once()
                if not self._asked and not any(bill.reserved for bill in self._ended):
                    return
        except OSError as exc:  # the next second's look tries again
            log.error("usage cannot be recorded: %s", exc)
        finally:
            self._posting = None

    async def _post_once(self) -> None:
        asked, self._asked = self._asked, []
        ended, self._ended = self._ended, []
        wishes = [wish for wish, _ in asked]
        try:
            if self._books.folder is None:
                grants = self._books.post(ended, wishes, self._clock())
            else:
                grants = await asyncio.to_thread(self._books.post, ended, wishes, self._clock())
        except BaseException as exc:
            self._ended += ended
            lost = f"usage cannot be recorded ({exc}); retry later"
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(EngineOverloadedError(lost))
            raise
        for (_, answer), grant in zip(asked, grants, strict=True):
            if not answer.done():
                answer.set_result(grant)
            elif grant.bill.reserved:  # who asked has left
                self._ended.append(grant.bill)


def check(grant: Grant, tokens: int) -> None:
    """Raise the error of a request that may not begin."""
    if not grant.lacking:
        return
    window = next((each for each in grant.lacking if tokens > each.limit), _told(grant))
    a_window = "" if window.per == "ever" else f" a {window.per}"
    takes = f"this request can take {tokens} tokens (prompt and max_tokens), and this API key"
    if tokens > window.limit:
        raise InvalidRequestError(
            f"{takes} may use {window.limit}{a_window}; send a lower max_tokens",
            param="max_tokens",
            code="rate_limit_exceeded",
        )
    renewed = window.resets_s < math.inf
    when = f"; retry in {math.ceil(window.resets_s)} s" if renewed else ""
    raise QuotaExceededError(
        f"{takes} has {window.left} of {window.limit}{a_window} left{when}",
        retry_after_s=math.ceil(window.resets_s) if renewed else 0,
        code="rate_limit_exceeded" if window.per == "minute" else "insufficient_quota",
    )


def _told(grant: Grant) -> Window:
    """The limit that a client is told of: that which it waits for longest, or has least left of."""
    if grant.lacking:
        return max(grant.lacking, key=lambda window: window.resets_s)
    return min(grant.windows, key=lambda window: window.left)


def headers_of(grant: Grant) -> Headers:
    """Return what OpenAI's API tells of a limit."""
    if not grant.windows:
        return ()
    window = _told(grant)
    headers = (
        (b"x-ratelimit-limit-tokens", b"%d" % window.limit),
        (b"x-ratelimit-remaining-tokens", b"%d" % window.left),
    )
    if window.resets_s == math.inf:
        return headers
    return (*headers, (b"x-ratelimit-reset-tokens", b"%ds" % math.ceil(window.resets_s)))
