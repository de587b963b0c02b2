"""Which blocks a lease has: what the next token attends to, and what both engines hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_scheduler import num_out_of_window

from diptych_kv_transfer.memory.layout import KVGroup
from diptych_protocol import InvalidRequestError
from diptych_vllm.kv_groups import VllmKVGroups, group_of

windows = st.none() | st.integers(2, 12)
groups = st.builds(KVGroup, st.sampled_from([1, 2, 4]), windows)
models = st.lists(groups, min_size=1, max_size=4).map(lambda found: VllmKVGroups(tuple(found)))


def lists(model: VllmKVGroups, num_tokens: int, first_id: int) -> list[list[int]]:
    """A request's blocks in vLLM when it has computed so many tokens."""
    found = []
    for group in model.groups:
        num_blocks = -(-num_tokens // group.block_size)
        null = num_out_of_window(group, num_tokens)
        found.append([0] * null + list(range(first_id + null, first_id + num_blocks)))
        first_id += num_blocks
    return found


@given(model=models, num_tokens=st.integers(1, 40), data=st.data())
def test_a_lease_fills_all_that_a_decode_engine_reads(
    model: VllmKVGroups, num_tokens: int, data: st.DataObject
) -> None:
    unit = math.lcm(*(group.block_size for group in model.groups))
    num_here = unit * data.draw(st.integers(0, (num_tokens - 1) // unit))
    theirs, ours = lists(model, num_tokens, 1), lists(model, num_tokens, 1000)
    lent = model.lent(num_tokens, theirs)
    wanted = model.wanted(num_tokens, num_here, ours)
    assert lent is not None
    assert wanted is not None
    assert len(lent) == model.num_blocks(num_tokens)
    holds = {ours_id: lent[place] for place, ours_id in wanted.items()}
    for group, here, there in zip(model.groups, ours, theirs, strict=True):
        num_known = num_here // group.block_size
        assert [holds.get(block, 0) for block in here[num_known:]] == there[num_known:]
        assert reads(group, here, num_tokens, num_tokens)
    assert model.serves_last(num_tokens) == all(
        reads(group, ids, num_tokens - 1, num_tokens)
        for group, ids in zip(model.groups, ours, strict=True)
    )


def reads(group: KVGroup, ids: list[int], token: int, num_computed: int) -> bool:
    """Whether all earlier tokens that a token attends to are in blocks that are not null."""
    first = 0 if group.window is None else max(0, token + 1 - group.window)
    return all(ids[place // group.block_size] for place in range(first, min(token, num_computed)))


def test_the_last_token_reads_a_dropped_one_where_a_window_begins_with_a_block() -> None:
    model = VllmKVGroups((KVGroup(32), KVGroup(32, 64)))
    assert [n for n in range(1, 200) if not model.serves_last(n)] == [95, 127, 159, 191]
    assert all(VllmKVGroups((KVGroup(16),)).serves_last(n) for n in range(1, 200))


@pytest.mark.parametrize(
    ("kind", "window", "found"),
    [
        ("FullAttentionSpec", None, KVGroup(32)),
        ("FullAttentionSpec", 64, KVGroup(32)),
        ("MLAAttentionSpec", None, KVGroup(32)),
        ("SlidingWindowSpec", 64, KVGroup(32, 64)),
    ],
    ids=["all", "a window whose blocks are all kept", "latent", "a window"],
)
def test_tested_kinds_are_read_as_vllm_keeps_them(
    kind: str, window: int | None, found: KVGroup
) -> None:
    assert group_of(kind, 32, window) == found


@pytest.mark.parametrize(
    "kind", ["MambaSpec", "ChunkedLocalAttentionSpec", "SlidingWindowMLASpec", "SlidingWindowSpec"]
)
def test_a_kind_that_was_not_tested_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"kind {kind} was not tested"):
        group_of(kind, 32, None)


def test_layers_of_a_group_that_are_kept_differently_are_refused() -> None:
    one, other = KVGroup(32), KVGroup(32, 64)
    assert str(VllmKVGroups.of([[one, one], [other]])) == "32 32/64"
    with pytest.raises(InvalidRequestError, match="group 1 mixes"):
        VllmKVGroups.of([[one], [one, other]])
