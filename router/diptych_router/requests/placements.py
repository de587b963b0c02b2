"""Which engine has which request, and how each request counts there."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from diptych_frontend.fair_share import FairShare
from diptych_protocol import EngineOverloadedError
from diptych_router.choosing.policy import Decision
from diptych_router.requests.records import Records
from diptych_router.requests.routed_request import MAX_LATE, RoutedRequest, Stage
from diptych_router.requests.table_interface import EngineAccount

MAX_PLACED = 256
"""Limit on the requests that one tenant may have at the engines, for each engine that decodes,
while other tenants have requests too. It is a few times what an engine computes at once, and a
fraction of what an engine lets wait."""
_urgency = attrgetter("urgency")
CREDIT = 4096
"""Number of tokens by which a tenant that comes back may be behind the tenants that wait."""


class Charge(NamedTuple):
    """The work that a request adds to the accounts of engines, until it leaves."""

    tokens: int
    engine: EngineAccount
    planned: EngineAccount | None
    """The engine that is to take it over, if that is another one."""


class Placements:
    """Requests at engines, and the accounts of these engines and of tenants.

    A request is charged from `place` until `leave`. In between, its engine may end its part, before
    the next engine takes over.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.accounts = FairShare(CREDIT)
        """Those of tenants."""
        self.num_engines = 1
        """Engines that decode."""
        self.by_core_id: dict[str, RoutedRequest] = {}
        """By the id under which an engine has it, until that engine has sent its last output."""
        self.charges: dict[str, Charge] = {}
        """By the request's own id."""
        self._num_placed = defaultdict[str, int](int)
        """Number of requests at the engines, by tenant; only tenants that have some are listed."""

    def at(self, engine: str) -> list[RoutedRequest]:
        return [routed for routed in self.by_core_id.values() if routed.engine == engine]

    def late(self, now: float) -> list[RoutedRequest]:
        """Return the requests whose engines should have brought a token by now."""
        return [routed for routed in self.by_core_id.values() if routed.first_token_by <= now]

    def place(
        self,
        routed: RoutedRequest,
        engine: EngineAccount,
        stage: Stage,
        now: float,
        planned: EngineAccount | None = None,
    ) -> None:
        """Charge a request to an engine, and to the engine that is planned to take it over."""
        self._num_placed[routed.account.tenant] += 1
        self.leave(routed)
        tokens = routed.record.prompt_tokens + len(routed.generated)
        self.charges[routed.request_id] = Charge(tokens, engine, planned)
        engine.charge(tokens)
        if planned is not None:
            planned.charge(tokens, planned=1)
        routed.place(engine.key, stage)
        if routed.late < MAX_LATE:
            routed.first_token_by = now + routed.patience_s
        core_id = routed.core_id
        self.records.placed(routed.record, core_id, engine.key, engine.name, now)
        self.by_core_id[core_id] = routed

    def leave(self, routed: RoutedRequest) -> None:
        """Record that it is at no engine any more."""
        charge = self.charges.pop(routed.request_id, None)
        if charge is not None:
            tenant = routed.account.tenant
            self._num_placed[tenant] -= 1
            if not self._num_placed[tenant]:
                del self._num_placed[tenant]
            charge.engine.charge(-charge.tokens)
            if charge.planned is not None:
                charge.planned.charge(-charge.tokens, planned=-1)
        self.by_core_id.pop(routed.core_id, None)
        routed.engine = ""

    def is_crowded(self, tenant: str) -> bool:
        """Whether a tenant has too many requests at the engines while others have any here."""
        if self._num_placed.get(tenant, 0) < MAX_PLACED * max(1, self.num_engines):
            return False
        return self.accounts.others_than(tenant)

    def crowded(self) -> set[str]:
        """All tenants that are crowded: see `is_crowded`."""
        return {tenant for tenant in self._num_placed if self.is_crowded(tenant)}


class HeldRequests:
    """Waiting requests by urgency: priority, then deadline. Who was served least is next."""

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


@dataclass(slots=True)
class Siblings:
    """Several answers to one prompt: one begins first, and the others reuse its KV.

    If all began at once, the prompt would be computed and transferred once for each answer. So the
    others begin when the first one decodes. Then prefill has cached all of the prompt but its last
    block, and so has decode. The others use the same engines if these may still get requests.
    Whatever happens to the first one, the others continue.
    """

    followers: dict[str, tuple[RoutedRequest, list[RoutedRequest]]] = field(default_factory=dict)
    """By the id of who goes ahead: itself, and who waits for it."""

    def wait(self, routed: RoutedRequest, leader: RoutedRequest) -> bool:
        """Let a request wait for another answer to its prompt; False if that is not necessary."""
        if leader.has_decoded:
            return False
        self.followers.setdefault(leader.request_id, (leader, []))[1].append(routed)
        return True

    def take_ready(
        self, requests: Mapping[str, RoutedRequest]
    ) -> list[tuple[RoutedRequest, RoutedRequest]]:
        """Return those of the open requests that need not wait any longer, with their first one."""
        ready = []
        for name, (leader, followers) in list(self.followers.items()):
            open_still = requests.get(name) is leader
            if not open_still or leader.has_decoded or leader.record.num_attempts > 1:
                del self.followers[name]
                ready += [(f, leader) for f in followers if requests.get(f.request_id) is f]
        return ready


def same_way(leader: RoutedRequest, is_open: Callable[[str], bool]) -> Decision | None:
    """Return the engines of the first one, if they may still get requests."""
    prefill, decode = leader.prefill_engine, leader.decode_engine
    if not decode or not is_open(decode) or (prefill and not is_open(prefill)):
        return None
    return Decision(prefill or None, decode, "as another answer to its prompt")
