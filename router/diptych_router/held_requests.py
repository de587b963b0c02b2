"""Requests that wait for an engine, each for a limited time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial

from diptych_protocol import EngineOverloadedError, RouterConfig
from diptych_router.routed_request import RoutedRequest

log = logging.getLogger(__name__)


class HeldRequests:
    """In the order in which they came. Needs a running event loop."""

    def __init__(
        self, config: RouterConfig, give_up: Callable[[RoutedRequest, EngineOverloadedError], None]
    ) -> None:
        """`give_up` is called with a request that has waited for too long."""
        self._config = config
        self._give_up = give_up
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[str]:
        """The ids of those that wait now."""
        return iter(list(self._timers))

    def add(self, routed: RoutedRequest) -> None:
        """Let a request wait until the time is up that it has for that.

        Raises `EngineOverloadedError` if requests do not wait here, or if too many do already;
        the latter turns nobody away who was taken on before. Engines that are there and full turn
        away who has nothing yet: a queue here, before theirs, would only hide the overload.
        """
        if routed.full and not routed.generated:
            raise EngineOverloadedError("no other engine has room; retry later")
        if self._config.hold_seconds <= 0:
            raise EngineOverloadedError("no engine is usable; retry later")
        if routed.attempts == 0 and len(self) >= self._config.max_held:
            raise EngineOverloadedError(
                f"no engine is usable and {len(self)} requests wait already; retry later"
            )
        log.info("request %s waits for an engine", routed.request_id)
        routed.full.clear()
        loop = asyncio.get_running_loop()
        if routed.hold_until is None:
            routed.hold_until = loop.time() + self._config.hold_seconds
        timer = loop.call_at(routed.hold_until, partial(self._time_out, routed))
        self._timers[routed.request_id] = timer

    def release(self, request_id: str) -> bool:
        """A request waits no more; False if it did not."""
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _time_out(self, routed: RoutedRequest) -> None:
        del self._timers[routed.request_id]
        reason = f"no engine within {self._config.hold_seconds:g} s"
        log.warning("request %s: %s", routed.request_id, reason)
        self._give_up(routed, EngineOverloadedError(reason))
