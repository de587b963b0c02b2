"""What the page shows of both pools, as values: figures of engines, and what changed. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from diptych_protocol import KVTransferStats
from diptych_router.engine_link import EngineLink

MOST_ENGINES: Final = 64
"""Engines that a page is told of; how many more there are, it is told as a number."""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine at one moment. Totals count from its start. What is left out of JSON is 0."""

    id: str
    """Stays the same when another process answers at the engine's address."""
    name: str
    """The name of the engine that answered last while nobody answers; empty if none ever has."""
    role: str
    state: str
    """ok, new (not verified yet), away, silent, failing, draining or paused."""
    running: int = 0
    """Requests in its batch: rows of a step."""
    waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens that no step has computed and no cached prefix covers."""
    blocks_used: int = 0
    blocks_total: int = 0
    block_tokens: int = 0
    """Tokens in a block."""
    blocks_sent: int = 0
    blocks_received: int = 0
    bytes_received: int = 0
    leases: int = 0
    """Leases that wait to be read, or are read."""
    steps: int = 0
    """The view of an engine with more steps is the newer one."""


class Panels(msgspec.Struct, frozen=True, kw_only=True):
    """Both pools at one moment."""

    engines: list[EngineFigures]
    open_requests: int
    held_requests: int
    """Requests that wait because a pool is empty."""
    left_out: int = 0
    """Engines that are not told, because there are so many."""


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event: what differs from the state that a page knows."""

    engines: list[EngineFigures]
    """Those with other figures than before."""
    gone: list[str] = []
    """Ids of engines that are no longer there."""
    open_requests: int
    held_requests: int
    left_out: int = 0


def figures_of(link: EngineLink, state: str) -> EngineFigures:
    """An engine as a router sees it, with what the engine told last."""
    name = hashlib.blake2b(link.key.encode(), digest_size=6).hexdigest()
    about = link.description
    if about is None:
        return EngineFigures(id=name, name=link.known_as, role=link.role, state=state)
    stats = link.stats
    transfer = stats.kv_transfer or KVTransferStats()
    return EngineFigures(
        id=name,
        name=link.known_as,
        role=link.role,
        state=state,
        running=stats.num_running,
        waiting=stats.num_waiting,
        queued_tokens=stats.queued_prompt_tokens,
        blocks_used=stats.blocks_total - stats.blocks_free,
        blocks_total=stats.blocks_total,
        block_tokens=about.block_size,
        blocks_sent=transfer.blocks_sent,
        blocks_received=transfer.blocks_received,
        bytes_received=transfer.bytes_received,
        leases=transfer.leases_held,
        steps=stats.steps,
    )


def panels_of(engines: Sequence[EngineFigures], open_requests: int, held_requests: int) -> Panels:
    """The pools with no more engines than a page is told of, in a fixed order."""
    told = sorted(engines, key=lambda engine: (engine.role != "prefill", engine.name, engine.id))
    return Panels(
        engines=told[:MOST_ENGINES],
        open_requests=open_requests,
        held_requests=held_requests,
        left_out=max(0, len(told) - MOST_ENGINES),
    )


def panels_of_all(parts: Sequence[Panels]) -> Panels:
    """The views of several processes as that of one router: the newest figures of each engine, and
    the worst state that any process sees it in. Requests add up."""
    views: dict[str, list[EngineFigures]] = {}
    for engine in (engine for part in parts for engine in part.engines):
        views.setdefault(engine.id, []).append(engine)
    joined = panels_of(
        [_newest(of_one) for of_one in views.values()],
        sum(part.open_requests for part in parts),
        sum(part.held_requests for part in parts),
    )
    left_out = max([joined.left_out, *(part.left_out for part in parts)])
    return msgspec.structs.replace(joined, left_out=left_out)


def _newest(views: Sequence[EngineFigures]) -> EngineFigures:
    newest = max(views, key=lambda view: (bool(view.name), view.steps))
    worse = [view.state for view in views if view.state != "ok"]
    return msgspec.structs.replace(newest, state=worse[0] if worse else newest.state)


def change(known: Panels | None, now: Panels) -> Change | None:
    """What a page that knows `known` has to be told; None: nothing. A page that knows nothing is
    told everything."""
    before = _shown(known.engines) if known is not None else {}
    after = _shown(now.engines)
    engines = [engine for name, engine in after.items() if before.get(name) != engine]
    gone = [name for name in before if name not in after]
    if known is not None and not engines and not gone:
        counts = (known.open_requests, known.held_requests, known.left_out)
        if counts == (now.open_requests, now.held_requests, now.left_out):
            return None
    return Change(
        engines=engines,
        gone=gone,
        open_requests=now.open_requests,
        held_requests=now.held_requests,
        left_out=now.left_out,
    )


def _shown(engines: Iterable[EngineFigures]) -> Mapping[str, EngineFigures]:
    """By their ids, without what no page shows and what changes at each step."""
    return {engine.id: msgspec.structs.replace(engine, steps=0) for engine in engines}
