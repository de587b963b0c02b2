"""Which ranks are read by whom, for every pair of numbers of ranks that the connector admits."""

from __future__ import annotations

from collections import defaultdict

import pytest
from cases import each

from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.tables.load import LeaseRef
from diptych_kv_transfer.tables.shares import Share, share_named
from diptych_protocol.config import RANKS_OF_CONNECTOR
from diptych_vllm.ranks import Ranks, Source, epoch_of_rank, every_rank, sources_of

LEASE = LeaseRef("lease", ("10.0.0.1", 7000), "p", "epoch", num_ranks=2)


def kv_of(ranks: Ranks) -> list[int]:
    """The KV in a rank's block: its heads, in order."""
    return list(range(ranks.first_head, ranks.first_head + ranks.local_heads))


def cut(kv: list[int], part: Part) -> slice:
    size, rest = divmod(len(kv), part.count)
    assert not rest
    return slice(part.index * size, (part.index + 1) * size)


@each("heads", [1, 2, 8, 16])
@each("there", RANKS_OF_CONNECTOR)
@each("here", RANKS_OF_CONNECTOR)
def test_each_rank_gets_its_heads_and_every_lease_has_all_its_readers(
    here: int, there: int, heads: int
) -> None:
    readers: dict[int, list[Share]] = defaultdict(list)
    for rank in range(here):
        mine = Ranks(heads, here, rank)
        got: list[int | None] = [None] * mine.local_heads
        for source in sources_of(mine, there):
            share = Share("lease", source.reader, source.readers, source.slices)
            readers[source.rank].append(share)
            if source.part is None:
                continue
            theirs = kv_of(Ranks(heads, there, source.rank))
            place = cut(kv_of(mine), source.part)
            assert got[place] == [None] * len(got[place]), "filled twice"
            got[place] = theirs[cut(theirs, share.part)]
        assert got == kv_of(mine)
    assert readers.keys() == set(range(there))
    for shares in readers.values():
        assert shares == shares[0].all


def test_ranks_that_have_the_same_kv_are_read_once_and_the_others_rejected() -> None:
    assert sources_of(Ranks(1, 1, 0), 4) == [
        Source(0, 4),
        Source(1, 4, None),
        Source(2, 4, None),
        Source(3, 4, None),
    ]


@pytest.mark.parametrize(
    ("mine", "num_ranks", "problem"),
    [
        (Ranks(6, 2), 3, "one number has to divide the other"),
        (Ranks(8, 2), 0, "one number has to divide the other"),
        (Ranks(8, 1), 128, "one number has to divide the other"),
        (Ranks(6, 1), 4, "6 KV heads are not shared out evenly"),
        (Ranks(8, 1, heads_first=False), 2, "VLLM_KV_CACHE_LAYOUT=LBHNC"),
        (Ranks(8, 2, heads_first=False), 1, "VLLM_KV_CACHE_LAYOUT=LBHNC"),
    ],
)
def test_engines_that_cannot_exchange_kv_are_told_why(
    mine: Ranks, num_ranks: int, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        sources_of(mine, num_ranks)


@pytest.mark.parametrize(
    ("mine", "num_ranks"),
    [(Ranks(8, 4, 1, heads_first=False), 4), (Ranks(1, 1, heads_first=False), 2)],
    ids=["as many", "all the same"],
)
def test_whole_blocks_may_have_any_layout(mine: Ranks, num_ranks: int) -> None:
    assert sources_of(mine, num_ranks)[0] == Source(mine.rank, num_ranks)


def test_a_rank_s_lease_has_its_port_and_its_epoch() -> None:
    lease = Source(1, 2, Part(1, 2)).lease(LEASE)
    assert (lease.lease_id, lease.address, lease.epoch) == (
        "lease",
        ("10.0.0.1", 7001),
        epoch_of_rank("epoch", 1, 2),
    )
    assert len({epoch_of_rank("epoch", rank, 2) for rank in (0, 1)} | {"epoch"}) == 3
    assert epoch_of_rank("epoch", 0, 1) == "epoch"


def test_one_of_several_readers_has_a_share_of_the_lease() -> None:
    lease = Source(0, 1, WHOLE, 1, 2, 2).lease(LEASE)
    assert share_named(lease.lease_id) == Share("lease", 1, 2, 2)
    assert (lease.address, lease.epoch) == (LEASE.address, "epoch")


def test_every_rank_of_an_engine_is_a_source_and_their_number_has_a_limit() -> None:
    assert [source.rank for source in every_rank(3)] == [0, 1, 2]
    assert len(every_rank(1 << 40)) == 64
