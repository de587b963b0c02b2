"""Requests that wait for an engine, each for a limited time. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Iterator

from diptych_protocol import EngineOverloadedError
from diptych_router.routed_request import RoutedRequest


class HeldRequests:
    """In the order in which they came."""

    def __init__(self, hold_seconds: float, max_held: int) -> None:
        self.hold_seconds = hold_seconds
        self._max_held = max_held
        self._held: dict[str, RoutedRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Those that wait now."""
        return iter(list(self._held.values()))

    def add(self, routed: RoutedRequest, now: float) -> float:
        """Let a request wait until the time is up that it has for that, which is returned.

        Raises `EngineOverloadedError` if requests do not wait here, or if too many do already;
        the latter turns nobody away who was taken on before. Engines that are there and full turn
        away who has nothing yet: a queue here, before theirs, would only hide the overload.
        """
        if routed.full and not routed.generated:
            raise EngineOverloadedError("no other engine has room; retry later")
        if self.hold_seconds <= 0:
            raise EngineOverloadedError("no engine is usable; retry later")
        if routed.attempts == 0 and len(self) >= self._max_held:
            raise EngineOverloadedError(
                f"no engine is usable and {len(self)} requests wait already; retry later"
            )
        routed.full.clear()
        if routed.hold_until is None:
            routed.hold_until = now + self.hold_seconds
        self._held[routed.request_id] = routed
        return routed.hold_until

    def release(self, request_id: str) -> bool:
        """A request waits no more; False if it did not."""
        return self._held.pop(request_id, None) is not None

    def overdue(self, now: float) -> list[RoutedRequest]:
        """Those whose time is up."""
        return [r for r in self if r.hold_until is not None and r.hold_until <= now]
