"""Loads from an engine of another geometry: staged, validated, unpacked; refused if they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from diptych_kv_transfer.memory.shard import Part
from diptych_kv_transfer.memory.staging import StagedCopies, Staging
from diptych_kv_transfer.tables.actions import (
    Action,
    Fence,
    LoadEnded,
    ReceiveBlocks,
    Send,
    Stage,
    Unpack,
)
from diptych_kv_transfer.tables.load import LeaseRef, LoadState
from diptych_kv_transfer.tables.loads import LoadTable
from diptych_kv_transfer.tables.messages import (
    Close,
    Closed,
    Hello,
    Open,
    Opened,
    Refused,
    Reject,
    Sending,
)

COMPAT: dict[str, str | int] = {
    "num_layers": 2, "kv_heads": 4, "head_dim": 8, "dtype": "float32",
}  # fmt: skip
TOKEN_BYTES = 2 * 2 * 4 * 8 * 4
ADDRESS = ("p", 1)
PEER, TAG = 3, 70


def hello(block_size: int, ranks: int = 1, name: str = "prefill", **compat: Any) -> Hello:
    geometry = {"block_size": block_size, "tensor_parallel_size": ranks}
    return Hello(name, f"{name}'s", COMPAT | compat, geometry=geometry)


def lease(lease_id: str = "lease") -> LeaseRef:
    return LeaseRef(lease_id, ADDRESS, "prefill", "prefill's")


def table(mine: Hello, theirs: Hello, room: int = 1 << 30) -> LoadTable:
    """In touch with P."""
    made = LoadTable(mine, 60.0, room)
    made.reach(ADDRESS)
    made.connected(ADDRESS, PEER, 0.0)
    made.greeted(PEER, theirs, 0.0)
    return made


def begin(
    loads: LoadTable, name: str = "r", tag: int = TAG, *, tokens: int = 100, **options: Any
) -> list[Action]:
    """All the blocks of so many tokens of a lease of the same name, into our blocks from 10 on."""
    wanted = options.pop("wanted", {i: 10 + i for i in range(-(-tokens // 32))})
    return loads.start(name, lease(name), "digest", tag, wanted, tokens, 0.0, **options)


def arrive(loads: LoadTable, name: str, num_blocks: int, tag: int = TAG) -> list[Action]:
    """P opens, sends everything in one run, and D has received it."""
    loads.receive(PEER, Opened(name, tag), 1.0)
    [posted] = loads.receive(PEER, Sending(name, tag, tag, [(0, num_blocks)]), 1.0)
    assert posted == ReceiveBlocks(PEER, name, tag, [range(num_blocks)], staged=True)
    return loads.receives_ended(name, tag, ok=True, now=2.0)


D, P = hello(32, 1, "decode"), hello(16, 2)


def test_p_s_blocks_are_asked_for_and_unpacked_only_when_the_lease_was_held() -> None:
    loads = table(D, P)
    stage, opened = begin(loads)
    assert isinstance(stage, Stage)
    staging = stage.staging
    assert isinstance(staging, Staging)
    assert (staging.first, staging.num_blocks, staging.start, staging.end) == (0, 7, 0, 100)
    assert staging.local_block_ids == [10, 11, 12, 13]
    assert staging.num_bytes == 7 * 16 * TOKEN_BYTES
    assert opened == Send(PEER, Open("r", "digest", TAG, [(0, 7)]))
    [close] = arrive(loads, "r", 7)
    assert isinstance(close, Send)
    unpack, ended = loads.receive(PEER, Closed("r", held=True, tag=TAG), 3.0)
    assert unpack == Unpack("r")
    assert isinstance(ended, LoadEnded)
    assert ended.ok
    assert ended.num_blocks == 4


def test_a_cached_prefix_is_not_fetched_but_for_what_shares_a_block_with_the_rest() -> None:
    loads = table(hello(16, 1, "decode"), hello(64))
    stage, opened = begin(loads, tokens=150, wanted={5: 1, 6: 2, 7: 3, 8: 4, 9: 5})
    assert isinstance(stage, Stage)
    staging = stage.staging
    assert isinstance(staging, Staging)
    assert (staging.first, staging.num_blocks, staging.start, staging.end) == (1, 2, 80, 150)
    assert opened == Send(PEER, Open("r", "digest", TAG, [(1, 2)]))


def test_nothing_is_staged_when_everything_is_cached() -> None:
    assert begin(table(D, P), wanted={}) == [Send(PEER, Open("r", "digest", TAG, []))]


def test_equal_geometry_needs_no_staging() -> None:
    actions = begin(table(D, hello(32, 1)))
    assert actions == [Send(PEER, Open("r", "digest", TAG, [(0, 4)]))]


@pytest.mark.parametrize(
    "answer", [Closed("r", held=False, tag=TAG), Refused("r", "the lease has expired", TAG)]
)
def test_what_was_not_valid_is_never_unpacked(answer: Closed | Refused) -> None:
    loads = table(D, P)
    begin(loads)
    if isinstance(answer, Closed):
        arrive(loads, "r", 7)
    ends = loads.receive(PEER, answer, 3.0)
    assert not any(isinstance(action, Unpack) for action in ends)
    [ended] = [action for action in ends if isinstance(action, LoadEnded)]
    assert not ended.ok


def test_an_early_load_is_unpacked_once_and_kept() -> None:
    loads = table(D, P)
    begin(loads, early=True)
    arrive(loads, "r", 7)
    unpack, ended = loads.receive(PEER, Closed("r", held=True, tag=TAG), 3.0)
    assert unpack == Unpack("r")
    assert isinstance(ended, LoadEnded)
    assert loads.loads["r"].state is LoadState.KEPT
    assert loads.adopt("r", 4.0) == []


def test_those_that_find_no_room_wait_in_their_order() -> None:
    loads = table(D, P, room=200 * TOKEN_BYTES)
    assert len(begin(loads, "a", 1)) == 2
    assert begin(loads, "b", 2, tokens=120) == []
    assert begin(loads, "c", 3, tokens=20) == [], "it would fit, but it is not its turn"
    assert len(begin(loads, "d", 4, wanted={})) == 1, "it needs no room"
    arrive(loads, "a", 7, 1)
    ends = loads.receive(PEER, Closed("a", held=True, tag=1), 3.0)
    assert [type(action) for action in ends] == [Unpack, LoadEnded, Stage, Send, Stage, Send]
    assert [action.request_id for action in ends if isinstance(action, Stage)] == ["b", "c"]


def test_one_that_is_alone_may_be_larger_than_all_the_room() -> None:
    assert len(begin(table(D, P, room=1))) == 2


def test_who_waits_goes_before_what_is_only_announced() -> None:
    """Each load takes 112 tokens: early ones never have more than half of the room."""
    loads = table(D, P, room=350 * TOKEN_BYTES)
    assert len(begin(loads, "early", 1, early=True)) == 2
    assert begin(loads, "second", 2, early=True) == [], "there is room, but not for early ones"
    assert len(begin(loads, "a", 3)) == 2
    assert len(begin(loads, "b", 4)) == 2
    assert begin(loads, "c", 5) == []
    assert begin(loads, "third", 6, early=True) == []
    assert loads.adopt("third", 1.0) == []
    arrive(loads, "early", 7, 1)
    ends = loads.receive(PEER, Closed("early", held=True, tag=1), 3.0)
    assert [action.request_id for action in ends if isinstance(action, Stage)] == ["c"]
    arrive(loads, "a", 7, 3)
    ends = loads.receive(PEER, Closed("a", held=True, tag=3), 3.0)
    assert [action.request_id for action in ends if isinstance(action, Stage)] == ["third"]


def test_one_that_somebody_waits_for_goes_even_if_early_ones_have_the_room() -> None:
    loads = table(D, P, room=2 * 112 * TOKEN_BYTES)
    assert len(begin(loads, "early", 1, early=True)) == 2
    assert len(begin(loads, "a", 2, tokens=200)) == 2
    assert begin(loads, "b", 3) == []
    assert loads.adopt("early", 1.0) == [Send(PEER, Open("early", "digest", 1, [(0, 7)]))]
    arrive(loads, "early", 7, 1)
    ends = loads.receive(PEER, Closed("early", held=True, tag=1), 3.0)
    assert not [action for action in ends if isinstance(action, Stage)]


def test_an_early_one_larger_than_half_the_room_begins_when_it_is_waited_for() -> None:
    loads = table(D, P, room=112 * TOKEN_BYTES)
    assert begin(loads, early=True) == []
    assert [type(action) for action in loads.adopt("r", 1.0)] == [Stage, Send]


def test_one_that_waits_for_room_can_be_given_up_without_harm_to_others() -> None:
    loads = table(D, P, room=1)
    begin(loads, "a", 1)
    begin(loads, "b", 2)
    [ended, reject] = loads.cancel("b", 1.0)
    assert isinstance(ended, LoadEnded)
    assert reject == Send(PEER, Reject("b"))
    assert list(loads.loads) == ["a"]


def test_the_time_of_one_that_waits_for_room_begins_when_it_has_room() -> None:
    """A stalled engine holds up who comes after its load, but is not the end of them."""
    loads = table(D, P, room=1)
    begin(loads, "stalled", 1)
    begin(loads, "waits", 2)
    begin(loads, "early", 3, early=True)
    assert Send(PEER, Close("stalled", False, 1)) in loads.tick(60.0)
    assert list(loads.loads) == ["stalled", "waits"], "an announced one has its time at once"
    assert LoadEnded("early", False, "no hand-off within 60 s") not in loads.tick(64.0)
    ends = loads.receive(PEER, Closed("stalled", held=False, tag=1), 64.0)
    assert [type(action) for action in ends] == [LoadEnded, Stage, Send]
    loads.tick(64.0)
    assert loads.loads["waits"].deadline == 124.0
    assert Send(PEER, Close("waits", False, 2)) in loads.tick(124.0)


def test_a_fence_gives_the_room_to_a_load_from_another_engine() -> None:
    loads = table(D, P, room=1)
    loads.reach(("q", 1))
    loads.connected(("q", 1), PEER + 1, 0.0)
    loads.greeted(PEER + 1, hello(16, 2, "another"), 0.0)
    begin(loads, "stalled", 1)
    other = LeaseRef("other", ("q", 1), "another", "another's")
    assert loads.start("other", other, "digest", 2, {0: 1}, 20, 30.0) == []
    loads.tick(60.0)
    assert Fence(PEER) in loads.tick(65.0)
    ended, stage, opened = loads.peer_lost(PEER, 1.0)
    assert ended == LoadEnded("stalled", False, "no hand-off within 60 s")
    assert isinstance(stage, Stage)
    assert opened == Send(PEER + 1, Open("other", "digest", 2, [(0, 2)]))


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (hello(16, 3), "block_size: 16 there, 32 here; tensor_parallel_size: 3 there, 1 here"),
        (hello(1 << 40), f"block_size: {1 << 40} there, 32 here"),
        (
            hello(16, 2, dtype="bfloat16", head_dim=16),
            "dtype: 'bfloat16' there, 'float32' here; head_dim: 16 there, 8 here",
        ),
        (
            Hello("prefill", "prefill's", COMPAT, geometry={**P.geometry, "page": 4}),
            "block_size: 16 there, 32 here; page: 4 there, None here; "
            "tensor_parallel_size: 2 there, 1 here",
        ),
        (
            Hello("prefill", "prefill's", COMPAT),
            "block_size: None there, 32 here; tensor_parallel_size: None there, 1 here",
        ),
    ],
)
def test_what_cannot_be_is_refused_field_by_field(theirs: Hello, reason: str) -> None:
    ends = begin(table(D, theirs))
    [ended] = [action for action in ends if isinstance(action, LoadEnded)]
    assert ended.reason == f"the engines cannot exchange KV ({reason})"
    assert Send(PEER, Reject("r")) in ends


def test_copies_of_blocks_like_ours_need_no_layout_and_no_order() -> None:
    """If a load fills only a part of each block, there is room for these parts only."""
    mine, theirs = (
        Hello("decode", "d", {"model": "m"}),
        Hello("prefill", "prefill's", {"model": "m"}),
    )
    loads = LoadTable(mine, 60.0, copied_block_bytes=600)
    loads.reach(ADDRESS)
    loads.connected(ADDRESS, PEER, 0.0)
    loads.greeted(PEER, theirs, 0.0)
    wanted = {2: 9, 0: 4, 3: 5}
    part = Part(1, 3)
    stage, opened = loads.start("r", lease("r"), "digest", TAG, wanted, 9, 0.0, part=part)
    assert isinstance(stage, Stage)
    assert stage.staging == StagedCopies([2, 0, 3], [9, 4, 5], 600, part)
    assert (stage.staging.num_bytes, stage.staging.places) == (3 * 200, {2: 0, 0: 1, 3: 2})
    assert opened == Send(PEER, Open("r", "digest", TAG, [(2, 1), (0, 1), (3, 1)]))
    loads.receive(PEER, Opened("r", TAG), 1.0)
    [posted] = loads.receive(PEER, Sending("r", TAG, TAG, [(0, 1), (3, 1)]), 1.0)
    places = [range(1, 2), range(2, 3)]
    assert posted == ReceiveBlocks(PEER, "r", TAG, places, staged=True, part=part)


def test_of_a_prefix_only_the_first_copies_are_unpacked() -> None:
    staging = StagedCopies([1, 2, 3], [7, 8, 9], 100)
    assert staging.shortened(48, 2) == StagedCopies([1, 2], [7, 8], 100)
