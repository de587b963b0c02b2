"""Computes which ranks of another engine a rank reads, and which part of their blocks.

The KV heads of the model are divided among the ranks of an engine. Rank r has those from r * heads
/ num_ranks on. An engine with more ranks than heads has each head at several ranks: with MLA, which
has one KV head, every rank has all KV. Two engines may have different numbers of ranks if one
number divides the other:

    P has more ranks:   each rank of D reads several ranks of P, each into a part of its blocks
    P has fewer ranks:  several ranks of D read one rank of P, each its share of P's lease

(P is the prefill engine, D the decode engine.) So each rank of P has its readers, and its lease
ends when all of them have read or rejected it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.tables.load import LeaseRef
from diptych_kv_transfer.tables.shares import Share
from diptych_protocol.engine_settings import MAX_RANKS


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of an engine."""

    heads: int = 1
    """Number of KV heads of the model. 1 with MLA."""
    num_ranks: int = 1
    rank: int = 0
    heads_first: bool = True
    """Whether each head's KV is contiguous in a block, one head after the other."""

    @property
    def local_heads(self) -> int:
        """Number of heads that each rank has."""
        return max(1, self.heads // self.num_ranks)

    @property
    def first_head(self) -> int:
        return self.rank * self.heads // self.num_ranks

    @property
    def divides_heads(self) -> bool:
        """Whether every rank has equally many heads, and every head is at equally many ranks."""
        return not self.heads % self.num_ranks or not self.num_ranks % self.heads


@dataclass(frozen=True, slots=True)
class Source:
    """A rank of another engine that this rank reads, alone or with others."""

    rank: int
    num_ranks: int
    """How many ranks the other engine has."""
    part: Part | None = WHOLE
    """The part of each of our blocks that it fills. None: another rank fills it with the same KV,
    so this one's blocks are not needed."""
    reader: int = 0
    readers: int = 1
    slices: int = 1
    """See `Share`."""

    def lease(self, named: LeaseRef) -> LeaseRef:
        """Return what this rank reads of the lease that a reference names: the lease of this rank,
        or our share of it. The hinge of rank r listens at the named port plus r."""
        host, port = named.address
        share = Share(named.lease_id, self.reader, self.readers, self.slices)
        return dataclasses.replace(
            named,
            lease_id=named.lease_id if self.readers == 1 else share.name,
            address=(host, port + self.rank),
            epoch=epoch_of_rank(named.epoch, self.rank, self.num_ranks),
        )


def epoch_of_rank(epoch: str, rank: int, num_ranks: int) -> str:
    """Return the epoch of a rank's hinge, which no other rank has. `epoch` is the engine's."""
    return epoch if num_ranks == 1 else f"{epoch}/{rank}/{num_ranks}"


def sources_of(mine: Ranks, num_ranks: int) -> list[Source]:
    """Return the ranks of an engine with `num_ranks` ranks that this rank reads.

    Together, the ranks of an engine read every rank of the other one. Raises `ValueError` with the
    reason if the engines cannot exchange KV.
    """
    fewer, more = sorted((mine.num_ranks, num_ranks))
    if not 1 <= fewer <= more <= MAX_RANKS or more % fewer:
        raise ValueError(
            f"the engine has {num_ranks} ranks and this one has {mine.num_ranks}: one number has "
            "to divide the other"
        )
    theirs = Ranks(mine.heads, num_ranks)
    if not (mine.divides_heads and theirs.divides_heads):
        raise ValueError(
            f"{mine.heads} KV heads are not shared out evenly among {num_ranks} ranks there and "
            f"{mine.num_ranks} here"
        )
    if num_ranks >= mine.num_ranks:
        sources = _several(mine, theirs)
    else:
        readers = mine.num_ranks // num_ranks
        slices = theirs.local_heads // mine.local_heads
        rank, reader = divmod(mine.rank, readers)
        sources = [Source(rank, num_ranks, WHOLE, reader, readers, slices)]
    if not mine.heads_first and any(x.part not in (WHOLE, None) or x.slices > 1 for x in sources):
        raise ValueError(
            f"the engine has {num_ranks} ranks and this one has {mine.num_ranks}, and vLLM keeps "
            "the KV of a head in many pieces: start both with VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    return sources


def every_rank(num_ranks: int) -> list[Source]:
    """Return all ranks of an engine, as if this rank were the only reader of each."""
    return [Source(rank, num_ranks) for rank in range(min(num_ranks, MAX_RANKS))]


def _several(mine: Ranks, theirs: Ranks) -> list[Source]:
    """The ranks of an engine with at least as many ranks as ours."""
    per_rank = theirs.num_ranks // mine.num_ranks
    parts = mine.local_heads // theirs.local_heads
    sources, seen = [], set()
    for rank in range(mine.rank * per_rank, (mine.rank + 1) * per_rank):
        first = dataclasses.replace(theirs, rank=rank).first_head
        part = Part((first - mine.first_head) // theirs.local_heads, parts)
        sources.append(Source(rank, theirs.num_ranks, None if first in seen else part))
        seen.add(first)
    return sources
