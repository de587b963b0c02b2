"""The page's view of both pools as plain values: figures of engines, and changes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from diptych_protocol import KVTransferStats, SchedulerStats
from diptych_protocol.engine_stats import MAX_HOLDERS_TOLD, MAX_MOVES_TOLD
from diptych_router.engines.engine_link import EngineLink
from diptych_router.requests.pool_client import PoolClient

MOST_ENGINES: Final = 64
"""The most engines that a page lists; it gets the number of the others."""


class HolderFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that holds blocks of an engine."""

    whose: str
    """See `whose`."""
    blocks: int
    arriving: int = 0
    """Those of them that another engine is still to fill."""


class MoveFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """KV that one engine has received from another."""

    number: int
    """Counts the moves to the receiver since its start."""
    sender: str
    receiver: str
    """Both are engines' names."""
    whose: str
    is_prefix: bool = False
    """Whether the sender remembered a prefix; otherwise it handed a request over."""
    blocks: int
    bytes: int
    ms: float
    """How long blocks were on their way."""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine at one moment. Totals count from its start. Fields left out of the JSON are 0."""

    id: str
    """It stays the same when another process answers at the engine's address."""
    name: str
    """The name of the last engine that answered, while nobody answers; empty if none ever has."""
    role: str
    home: str = ""
    """The pool that it was taken from, while it has the other one's role."""
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
    blocks_sent: int = 0
    blocks_received: int = 0
    bytes_received: int = 0
    leases: int = 0
    """Leases that wait to be read, or are being read."""
    blocks_lent: int = 0
    """Blocks of these leases."""
    blocks_arriving: int = 0
    """Blocks in use that another engine is still to fill."""
    blocks_remembered: int = 0
    """Blocks that are not in use and have a prefix that a later prompt would find."""
    blocks_pinned: int = 0
    """Blocks, in use or not, that a next turn is expected to need."""
    holders: list[HolderFigures] = []
    tokens_computed: int = 0
    """Tokens of prompts."""
    tokens_generated: int = 0


class Panels(msgspec.Struct, frozen=True, kw_only=True):
    """Both pools at one moment."""

    engines: list[EngineFigures]
    open_requests: int
    held_requests: int
    """Requests that wait because a pool is empty."""
    left_out: int = 0
    """Engines that are not listed, because there are so many."""
    moves: list[MoveFigures] = []
    """The newest to each engine that is listed."""


class Change(Panels, frozen=True, kw_only=True, omit_defaults=True):
    """One event: what differs from the state that a page has. It names engines with other figures
    than before, and moves since then."""

    gone: list[str] = []
    """Ids of engines that no longer exist."""


def whose(core_id: str) -> str:
    """Return the name of a request for those who may not know its id. It stays the same at all
    engines. core_id: the router's id of the request, or an engine's."""
    return _digest(core_id.partition("/")[0])


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def figures_of(link: EngineLink, state: str) -> EngineFigures:
    """Return an engine's figures, as the router sees it, from the engine's last report."""
    about = link.description
    stats = SchedulerStats() if about is None else link.stats
    transfer = stats.kv_transfer or KVTransferStats()
    return EngineFigures(
        id=_digest(link.key),
        name=link.known_as,
        role=link.role,
        home="" if link.home == link.role else link.home,
        state=state,
        running=stats.num_running,
        waiting=stats.num_waiting,
        queued_tokens=stats.queued_prompt_tokens,
        blocks_used=stats.blocks_total - stats.blocks_free,
        blocks_total=stats.blocks_total,
        block_tokens=0 if about is None else about.block_size,
        blocks_sent=transfer.blocks_sent,
        blocks_received=transfer.blocks_received,
        bytes_received=transfer.bytes_received,
        leases=transfer.leases_held,
        blocks_lent=transfer.blocks_held,
        blocks_arriving=stats.blocks_arriving,
        blocks_remembered=stats.blocks_remembered,
        blocks_pinned=stats.blocks_pinned,
        holders=[
            HolderFigures(whose=whose(x.request_id), blocks=x.num_blocks, arriving=x.num_arriving)
            for x in stats.holders[:MAX_HOLDERS_TOLD]
        ],
        tokens_computed=stats.prompt_tokens_computed,
        tokens_generated=stats.tokens_generated,
    )


def moves_to(link: EngineLink, name_of: Mapping[str, str]) -> Iterator[MoveFigures]:
    """Yield the newest moves to an engine. name_of: from an engine's id to its name for people."""
    transfer = link.stats.kv_transfer or KVTransferStats()
    block_bytes = transfer.bytes_received / max(1, transfer.blocks_received)
    for move in transfer.newest_moves[-MAX_MOVES_TOLD:]:
        seconds = move.moving_seconds
        yield MoveFigures(
            number=move.number,
            sender=name_of.get(move.sender, move.sender),
            receiver=link.known_as,
            whose=whose(move.request_id),
            is_prefix=move.is_prefix,
            blocks=move.num_blocks,
            bytes=round(block_bytes * move.num_blocks),
            ms=1000 * seconds if 0 < seconds < math.inf else 0.0,
        )


def panels_of(
    engines: Sequence[EngineFigures],
    open_requests: int,
    held_requests: int,
    moves: Iterable[MoveFigures] = (),
) -> Panels:
    """Return the pools with no more engines than a page lists, in a fixed order."""
    told = sorted(engines, key=lambda engine: (engine.role != "prefill", engine.name, engine.id))
    return Panels(
        engines=told[:MOST_ENGINES],
        open_requests=open_requests,
        held_requests=held_requests,
        left_out=max(0, len(told) - MOST_ENGINES),
        moves=list(moves),
    )


def change(known: Panels | None, now: Panels) -> Change | None:
    """Return the changes for a page that has the state `known`; None if nothing has changed. A page
    without a state gets everything."""
    before = {engine.id: engine for engine in known.engines} if known is not None else {}
    after = {engine.id: engine for engine in now.engines}
    engines = [engine for name, engine in after.items() if before.get(name) != engine]
    gone = [name for name in before if name not in after]
    told = {*(now.moves if known is None else known.moves)}
    moves = [move for move in now.moves if move not in told]
    if known is not None and not engines and not gone and not moves:
        counts = (known.open_requests, known.held_requests, known.left_out)
        if counts == (now.open_requests, now.held_requests, now.left_out):
            return None
    return Change(
        engines=engines,
        gone=gone,
        open_requests=now.open_requests,
        held_requests=now.held_requests,
        left_out=now.left_out,
        moves=moves,
    )


def panels_now(client: PoolClient) -> Panels:
    """Return both pools. No engine is asked, because engines report their figures unasked."""
    links = list(client.pools.links.values())
    figures = [figures_of(link, _state(client, link)) for link in links]
    names = {x.description.engine_id: x.known_as for x in links if x.description is not None}
    moves = [move for link in links[:MOST_ENGINES] for move in moves_to(link, names)]
    return panels_of(figures, len(client.output_processor.answers), client.num_held, moves)


def _state(client: PoolClient, link: EngineLink) -> str:
    """The first of these words that is true of an engine."""
    if not link.up:
        return "away"
    if link.silent:
        return "silent"
    if link.kept_out:
        return "failing"
    if link.stats.draining or not link.listed:
        return "draining"
    if link.stats.paused:
        return "paused"
    return "ok" if client.pools.usable(link) else "new"
