"""A prompt is half computed and half lent when all KV is to be forgotten."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from sim_clock import Clock
from sim_direct import DirectClient
from sim_engine import Shape, SimEngine
from sim_network import Network
from sim_streams import Stream

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)
NEEDED = 5
"""Blocks of the prompt."""
LENT = 3
"""How many of these are lent when the reset comes."""


@pytest.mark.parametrize("num_blocks", [NEEDED + LENT - 1, 2 * NEEDED])
def test_a_prefill_whose_kv_is_forgotten_halfway_lends_only_what_it_computes_anew(
    num_blocks: int,
) -> None:
    """In the smaller pool, what it has lent leaves it too little to go on: it must not wait for
    the end of its own promise."""
    clock, lent = Clock(), list[dict[str, Any]]()
    shape = Shape(
        "p0", "prefill", num_blocks, max_num_seqs=1, max_num_batched_tokens=3, max_num_waiting=1,
        max_model_len=14, lease_seconds=2.0, load_timeout_s=3.0,
    )  # fmt: skip
    engine = SimEngine(shape, 1, Network(clock, Random(0), lambda _: None), lent)
    stream = Stream("request", PROMPT, 2)
    DirectClient(stream, engine, lambda: engine, lent=lambda _: True).begin()
    leased = engine.core.scheduler.leased
    while sum(map(len, leased._blocks.values())) < LENT:
        clock.step()
    [promised] = leased._blocks
    engine.core.call("reset_prefix_cache", [True])
    while not stream.ended and clock.next_time < 10.0:
        clock.step()
    [params] = lent
    assert params["lease_id"] != promised
    assert len(params["remote_block_ids"][0]) == NEEDED
    assert promised not in leased
