"""Real engines tell a router whose KV came slowly, and the router chooses others."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from engine_kit import slow_sender
from service_kit import all_usable, engine_config, generate, healthy, make_router, start_engine

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.curve import read_keys
from diptych_router.requests.pool_client import PoolClient
from diptych_router.telling.admin_port import router_report
from diptych_router.telling.explanations import report_of

PROMPT = "The harbour master counts the ships that come in before the storm. " * 30
MOVES = 8
"""From each prefill engine."""


async def hand_over(prefill: AsyncLLM, decode: AsyncLLM) -> None:
    wanted: dict[str, Any] = {"do_remote_decode": True}
    first = await generate(prefill, PROMPT, max_tokens=1, extra_args={"kv_transfer_params": wanted})
    lent = {"kv_transfer_params": first.kv_transfer_params}
    await generate(decode, PROMPT, max_tokens=2, extra_args=lent)


def forget_what_was_sent(router: PoolClient) -> None:
    """For some seconds a router expects that an engine remembers what it was sent. The decode
    engine does not, so its prompt has to be handed over each time."""
    for _ in range(2):
        router.pools.fleet.known.index.age()


def rates(router: PoolClient) -> dict[str, float]:
    """Seconds of a token to the decode engine, by the prefill engine that sends it."""
    fleet = router.pools.fleet
    rows = fleet.tables["decode"].column["trip_token_s"]
    ways = fleet.pairs.ways(rows, rows)
    assert ways.token_s is not None
    names = [router.name_of(row.key) for row in fleet.tables["prefill"].rows]
    return dict(zip(names, ways.token_s[0].tolist(), strict=True))


async def test_an_engine_that_sends_slowly_gets_no_long_prompts_while_another_can_have_them(
    smollm2: str, keys_dir: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = Path(slow_sender.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=os.pathsep)  # for the engines
    configs = [
        engine_config("prefill-0", smollm2, node="n0", zone="a"),
        engine_config(
            "prefill-1", smollm2, node="n1", zone="a",
            executor_class="engine_kit.slow_sender:SlowSender",
        ),
        # It remembers nothing, so that each hand-over brings the whole prompt.
        engine_config("decode-0", smollm2, node="n2", zone="a", enable_prefix_caching=False),
    ]  # fmt: skip
    started = await asyncio.gather(*(start_engine(config, keys_dir) for config in configs))
    [(p0, at0), (p1, at1), (decode, at_d)] = started
    keys = read_keys(keys_dir)
    router = make_router(
        smollm2, f"{at0},{at1}", at_d, lambda: [keys],
        policy="prefix_aware", disaggregate="always", verify="Off",
    )  # fmt: skip
    router.start()
    try:
        await healthy(router)
        await all_usable(router, len(configs))
        told = {
            engine.engine_id: (engine.node, engine.zone) for engine in router_report(router).engines
        }
        assert told == {"prefill-0": ("n0", "a"), "prefill-1": ("n1", "a"), "decode-0": ("n2", "a")}
        for _ in range(MOVES):
            await hand_over(p0, decode)
            await hand_over(p1, decode)
        stats = await decode.refresh_stats()
        assert stats.kv_transfer is not None
        moves = stats.kv_transfer.newest_moves
        assert [move.sender for move in moves] == ["prefill-0", "prefill-1"] * MOVES
        assert sum(move.num_blocks for move in moves) == stats.kv_transfer.blocks_received
        total_s = sum(move.seconds for move in moves)
        assert total_s == pytest.approx(stats.kv_transfer.seconds_receiving)

        await eventually(lambda: router.pools.fleet.pairs.learned)
        known = rates(router)
        assert known["prefill-1"] > 2 * known["prefill-0"]
        for _ in range(8):
            forget_what_was_sent(router)
            output = await generate(router, PROMPT, max_tokens=2)
            assert output.metrics["prefill"] == "prefill-0"
        why = report_of(next(iter(router.table.records)), router.name_of)
        (candidate,) = why.attempts[0].choices[1].candidates
        assert candidate.near == "same zone"
    finally:
        router.shutdown()
        for engine, _ in started:
            engine.shutdown()
