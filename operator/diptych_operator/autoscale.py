"""Computes how many pods each pool should have from the routers' reports. It reads no clock and no
metrics server.

Each pool has a signal of its own, so that a shortage scales the pool that is short:

    prefill = queued prompt tokens / queuedTokensPerReplica
    decode  = the larger of  KV in use / kvUtilization  and  waiting requests / waitingPerReplica

`attainment` adds a signal of its own: the share of requests that kept the pool's promise
(`attainment.py`). The pool gets the larger of what its signals ask for.

Queued prompt tokens are those that no step has computed and no cached prefix covers. Tokens whose
blocks wait for decode to read them are subtracted. They occupy prefill's memory and so lengthen its
queue, but decode is the bottleneck: more prefill pods would only make more blocks wait.

There is no limit on the ratio of the pools. The mix of prompts and answers changes within minutes,
and a limit would scale a pool that has nothing to do.

A pool grows at once: each decision at most doubles it and adds one. It shrinks when fewer pods
would have been enough for all of scaleDownSeconds. Both pools are scaled to 0 together after as
long without any work, and up again together with the first request that a router holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from diptych_operator.api.names import POOLS
from diptych_operator.api.pools import (
    NOTHING,
    Counts,
    DecodeAutoscaling,
    DecodePool,
    PrefillAutoscaling,
    PrefillPool,
)
from diptych_operator.attainment import NEW, Learned, attainment, need
from diptych_protocol.admin import EngineReport, RouterReport

Autoscaling = PrefillAutoscaling | DecodeAutoscaling
TOLERANCE = 0.1
"""Decode keeps its size while its use of KV differs from the target by at most this share."""
_NOISE = 1e-6
"""Sums of shares are not exact; so little more than a whole pod is none."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A number of pods that was enough at a certain time."""

    at: float
    pods: int


Recent = tuple[Recommendation, ...]
"""Oldest first. Each is larger than all after it, since only the largest of a window counts."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision passes to the next. If it is lost, nothing shrinks for a while."""

    prefill: Recent = ()
    decode: Recent = ()
    busy_at: float | None = None
    """When the service was last busy, or could not be shown to be idle."""
    prefill_learned: Learned = NEW
    decode_learned: Learned = NEW


@dataclass(frozen=True, slots=True)
class Scaling:
    desired: Counts
    memory: Memory
    reason: str
    """One line for people."""


def autoscale(
    prefill: PrefillPool | None,
    decode: DecodePool,
    wanted: Counts,
    ready: Counts,
    reports: Sequence[RouterReport],
    memory: Memory,
    now: float,
    *,
    block_size: int,
    unreachable_routers: int = 0,
    rolls: bool = False,
) -> Scaling:
    """Return the pods of both pools now. A pool without autoscaling keeps its `replicas`.

    `prefill`: None if the engines of decode compute prompts too. `wanted`: the current target size
    of the service. `ready`: ready pods by the kubelet, of all revisions; if no router lists one of
    them, it is out of reach, and its pool does not shrink. `now`: seconds of a clock that does not
    jump back. `block_size`: tokens in a KV block. `rolls`: another revision has pods beside the
    newest. It would not come back from sleep, even if the newest has failed.
    """
    engines = merged(reports)
    pools = [pool for pool in (prefill, decode) if pool is not None]
    may_sleep = all(pool.autoscaling and pool.autoscaling.min_replicas == 0 for pool in pools)
    if may_sleep and not (wanted.decode and (wanted.prefill or prefill is None)):
        return _woken(reports, memory, now, Counts(0 if prefill is None else 1, 1))

    in_view = Counts(*(sum(engine.role == role for engine in engines) for role in POOLS))
    in_reach = bool(reports) and not unreachable_routers
    all_in_view = in_view.prefill >= ready.prefill and in_view.decode >= ready.decode
    # Pods that load have something to do, and it may take longer than any patience.
    serves = ready.decode and (ready.prefill or prefill is None)
    idle = in_reach and all_in_view and serves and not (rolls or _busy(reports, engines))
    quiet = min((each.quiet_s for each in reports if each.quiet_s is not None), default=math.inf)
    known_busy_at = now if memory.busy_at is None else max(memory.busy_at, now - quiet)
    busy_at = known_busy_at if idle else now
    scalings = (pool.autoscaling for pool in pools if pool.autoscaling)
    patience = max((scaling.scale_down_seconds for scaling in scalings), default=0)
    if may_sleep and idle and memory.busy_at is not None and now - busy_at >= patience:
        asleep = replace(memory, prefill=(), decode=(), busy_at=busy_at)
        return Scaling(NOTHING, asleep, f"asleep: nothing to do for {patience} s")

    look = _Look(reports, engines, ready, now)
    p = _prefill(prefill, engines, wanted.prefill, block_size)
    d = _decode(decode, engines, wanted.decode)
    p_known, d_known = (in_reach and in_view.of(role) >= ready.of(role) for role in POOLS)
    promised = prefill.autoscaling if prefill is not None else None
    p, p_learned = _promising(p, promised, memory.prefill_learned, look, known=p_known)
    d, d_learned = _promising(d, decode.autoscaling, memory.decode_learned, look, known=d_known)
    p_pods, p_recent, p_why = p.settle(memory.prefill, now, known=p_known)
    d_pods, d_recent, d_why = d.settle(memory.decode, now, known=d_known)
    after = Memory(p_recent, d_recent, busy_at, p_learned, d_learned)
    return Scaling(Counts(p_pods, d_pods), after, f"{p_why}; {d_why}")


def merged(reports: Sequence[RouterReport]) -> list[EngineReport]:
    """Return each engine that any router lists, once.

    An engine reports the same to all routers, but not at the same moment. Of two numbers the one
    that asks for more pods is taken.
    """
    engines: dict[str, EngineReport] = {}
    for report in reports:
        for engine in report.engines:
            if engine.listed:
                known = engines.get(engine.engine_id)
                engines[engine.engine_id] = _busier(known, engine) if known else engine
    return list(engines.values())


def _busier(a: EngineReport, b: EngineReport) -> EngineReport:
    return msgspec.structs.replace(
        a,
        open_tokens=max(a.open_tokens, b.open_tokens),
        num_running=max(a.num_running, b.num_running),
        num_waiting=max(a.num_waiting, b.num_waiting),
        queued_prompt_tokens=max(a.queued_prompt_tokens, b.queued_prompt_tokens),
        kv_usage=max(a.kv_usage, b.kv_usage),
        leases_held=max(a.leases_held, b.leases_held),
        blocks_held=min(a.blocks_held, b.blocks_held),
    )


def _busy(reports: Sequence[RouterReport], engines: Sequence[EngineReport]) -> bool:
    """Any request anywhere, or blocks that somebody may still read."""
    return any(report.open_requests or report.held_requests for report in reports) or any(
        engine.num_running or engine.num_waiting or engine.leases_held or engine.open_tokens
        for engine in engines
    )


@dataclass(frozen=True, slots=True)
class _Pool:
    """One pool's bounds, and what its signal asks for."""

    role: str
    current: int
    asked: int
    why: str
    least: int
    most: int
    patience: int

    def settle(self, recent: Recent, now: float, *, known: bool) -> tuple[int, Recent, str]:
        """The pods to have, the recommendations to remember, and why.

        `known`: every ready engine is in view. If not, what is seen may only add pods.
        """
        current = self._bounded(self.current)
        asked = self._bounded(min(self.asked, 2 * current + 1))
        if not known:
            asked = max(asked, current)
        kept = _remember(recent or (Recommendation(now, current),), now, asked, self.patience)
        pods = asked if asked >= current else min(current, kept[0].pods)
        return pods, kept, f"{self.role}: {self._reason(pods, asked, known)}"

    def _bounded(self, pods: int) -> int:
        return min(max(pods, self.least), self.most)

    def _reason(self, pods: int, asked: int, known: bool) -> str:
        count = f"{pods} pod{'s' * (pods != 1)}"
        if pods > asked:
            return f"{self.why}: {count}, fewer if that lasts {self.patience} s"
        if not known:
            return f"{self.why}, not all engines in view: {count}"
        return f"{self.why}: {count}"


def _remember(recent: Recent, now: float, asked: int, patience: int) -> Recent:
    """The window's recommendations that may still be its largest, the newest last."""
    fresh = [r for r in recent if now - r.at < patience and r.pods > asked]
    return (*fresh, Recommendation(now, asked))


def _prefill(
    pool: PrefillPool | None, engines: Sequence[EngineReport], current: int, block_size: int
) -> _Pool:
    if pool is None:
        return _Pool("prefill", 0, 0, "none", 0, 0, 0)
    scaling = pool.autoscaling
    if scaling is None:
        return _fixed("prefill", pool.replicas)
    tokens = sum(
        max(0, engine.queued_prompt_tokens - engine.blocks_held * block_size)
        for engine in engines
        if engine.role == "prefill"
    )
    each = scaling.queued_tokens_per_replica
    why = f"{tokens} uncached tokens wait, {each} each"
    return _scaled("prefill", current, -(-tokens // each), why, scaling)


def _decode(pool: DecodePool, engines: Sequence[EngineReport], current: int) -> _Pool:
    scaling = pool.autoscaling
    if scaling is None:
        return _fixed("decode", pool.replicas)
    mine = [engine for engine in engines if engine.role == "decode"]
    used = sum(min(1.0, max(0.0, engine.kv_usage)) for engine in mine)
    waiting = sum(max(0, engine.num_waiting) for engine in mine)
    by_memory = _proportional(used * 100 / scaling.kv_utilization, current)
    by_queue = -(-waiting // scaling.waiting_per_replica)
    if by_queue > by_memory:
        why = f"{waiting} requests wait, {scaling.waiting_per_replica} each"
    else:
        why = f"KV of {used:.1f} pods in use, {scaling.kv_utilization} % each"
    return _scaled("decode", current, max(by_memory, by_queue), why, scaling)


def _scaled(role: str, current: int, asked: int, why: str, scaling: Autoscaling) -> _Pool:
    least, most = max(1, scaling.min_replicas), scaling.max_replicas
    return _Pool(role, current, asked, why, least, most, scaling.scale_down_seconds)


def _proportional(exact: float, current: int) -> int:
    """Pods for so much use, or those there are if that is near enough."""
    if abs(exact - current) <= TOLERANCE * current + _NOISE:
        return current
    return math.ceil(exact - _NOISE)


def _fixed(role: str, replicas: int | None) -> _Pool:
    number = replicas or 1
    return _Pool(role, number, number, "fixed", number, number, 0)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one decision sees."""

    reports: Sequence[RouterReport]
    engines: Sequence[EngineReport]
    ready: Counts
    now: float


def _promising(
    pool: _Pool, scaling: Autoscaling | None, learned: Learned, look: _Look, *, known: bool
) -> tuple[_Pool, Learned]:
    """The pool, with at least the pods that its promise needs, and what was learned of that.

    known: every ready engine is in view, and every router was asked. If not, nothing is learned.
    """
    if scaling is None or scaling.attainment is None:
        return pool, learned
    mine = [engine for engine in look.engines if engine.role == pool.role]
    found = need(
        scaling.attainment,
        attainment(look.reports, pool.role),
        learned,
        look.now,
        current=pool.current,
        ready=look.ready.of(pool.role),
        crowded=sum(engine.num_running + engine.num_waiting for engine in mine) > len(mine),
    )
    asked = max(pool.asked, found.pods)
    return replace(pool, asked=asked, why=pool.why + found.why), found.learned if known else learned


def _woken(reports: Sequence[RouterReport], memory: Memory, now: float, first: Counts) -> Scaling:
    """From no pods: stay asleep until a router holds a request, then one pod in each pool."""
    held = sum(report.held_requests for report in reports)
    if not held:
        asleep = replace(memory, prefill=(), decode=(), busy_at=None)
        return Scaling(NOTHING, asleep, "asleep: no request is held")
    reason = f"woken: {held} request{'s' * (held != 1)} held, 1 pod in each pool"
    return Scaling(first, replace(memory, busy_at=now), reason)
