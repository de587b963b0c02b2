"""Requests that wait, each for a limited time: for an engine, or for their tenant's turn.

The caller passes the time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from diptych_frontend.fair_share import FairShare
from diptych_protocol import EngineOverloadedError
from diptych_router.requests.routed_request import RoutedRequest


class HeldRequests:
    """Waiting requests by urgency: priority, then deadline. The turn of a tenant depends on how
    much it was served."""

    def __init__(self, hold_seconds: float, max_held: int, tenants: FairShare) -> None:
        self.hold_seconds = hold_seconds
        self._max_held = max_held
        self._tenants = tenants
        self._held: dict[str, RoutedRequest] = {}
        self._lanes: dict[str, list[RoutedRequest]] = {}
        """By tenant, the most urgent first; none is empty."""
        self.num_crowded = 0
        """Those that wait because their tenant has many requests at the engines."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """The requests that wait now, the most urgent first."""
        return iter(sorted(self._held.values(), key=_urgency))

    def add(self, routed: RoutedRequest, now: float, why: str = "no engine is usable") -> float:
        """Let a request wait until the end of its time for that, which is returned.

        Raises `EngineOverloadedError` if requests do not wait here, or if too many do already. The
        latter refuses no request that was accepted before. If engines exist and are full, they
        refuse a request without any output: a queue here, before theirs, would only hide the
        overload.
        """
        if routed.full and not routed.generated:
            raise EngineOverloadedError("no other engine has room; retry later")
        if self.hold_seconds <= 0:
            raise EngineOverloadedError(f"{why}; retry later")
        is_new = routed.record.num_attempts == 0
        if is_new and len(self) >= self._max_held and not self._has_few(routed):
            raise EngineOverloadedError(f"{why} and {len(self)} requests wait already; retry later")
        routed.full.clear()
        if routed.hold_until is None:
            routed.hold_until = now + self.hold_seconds
        self._held[routed.request_id] = routed
        self.num_crowded += routed.crowded
        lane = self._lanes.get(routed.account.tenant)
        if lane is None:
            lane = self._lanes[routed.account.tenant] = []
            self._tenants.begin_to_wait(routed.account)
        insort(lane, routed, key=_urgency)
        return routed.hold_until

    def _has_few(self, routed: RoutedRequest) -> bool:
        """Another tenant has more requests here, even with this one."""
        mine = self._lanes.get(routed.account.tenant, ())
        return any(len(lane) > len(mine) + 1 for lane in self._lanes.values())

    def surplus(self, newcomer: RoutedRequest) -> RoutedRequest | None:
        """Return a request to refuse after all, because too many wait with this one: the least
        urgent one of the tenant that has most here, of those that were not accepted before."""
        if len(self) <= self._max_held or newcomer.record.num_attempts > 0:
            return None
        longest = max(self._lanes.values(), key=len)
        return next((r for r in reversed(longest) if r.record.num_attempts == 0), None)

    def release(self, request_id: str) -> bool:
        """End the waiting of a request; False if it did not wait."""
        routed = self._held.pop(request_id, None)
        if routed is None:
            return False
        self.num_crowded -= routed.crowded
        routed.crowded = False
        lane = self._lanes[routed.account.tenant]
        at = bisect_left(lane, routed.urgency, key=_urgency)
        while lane[at] is not routed:
            at += 1
        del lane[at]
        if not lane:
            del self._lanes[routed.account.tenant]
            self._tenants.cease_to_wait(routed.account)
        return True

    def next_crowded(self, still_crowded: Collection[str]) -> RoutedRequest | None:
        """Return the next request that waits for its tenant's turn: of the tenant that was served
        least, but of none of these."""
        firsts = [lane[0] for tenant, lane in self._lanes.items() if tenant not in still_crowded]
        crowded = [routed for routed in firsts if routed.crowded]
        return min(crowded, key=lambda routed: routed.account.served, default=None)

    def overdue(self, now: float) -> list[RoutedRequest]:
        """Return the requests whose time is up."""
        return [r for r in self if r.hold_until is not None and r.hold_until <= now]


def _urgency(routed: RoutedRequest) -> tuple[int, float]:
    return routed.urgency
