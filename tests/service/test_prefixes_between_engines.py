"""A router and three real processes: a prefix goes from one prefill engine to the other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from engine_kit.handoff import prompt_of, save_toy
from service_kit import Core, all_usable, cores, engine_config, generate, link_of, routing
from waits import PATIENCE_S

from diptych_protocol import TokensPrompt
from diptych_protocol.admin import EngineReport
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.requests.pool_client import PoolClient
from diptych_router.telling.admin_port import router_report


def send_by_way_of(client: PoolClient, prefill: Core, holder: Core | None) -> None:
    """Have prompts computed there from now on, with what that holder remembers."""
    pools = client.pools
    honest = type(pools).choose

    def choose(request: RequestView, full: Collection[str] = ()) -> Decision | None:
        decision = honest(pools, request, full)
        if decision is None:
            return None
        fetch = None if holder is None else link_of(client, holder).key
        there = link_of(client, prefill).key
        return replace(decision, prefill=there, fetch=fetch, fetch_tokens=request.prompt_tokens)

    pools.choose = choose  # type: ignore[method-assign]


async def report_of(client: PoolClient, name: str) -> EngineReport:
    await client.refresh_stats()
    [report] = [x for x in router_report(client).engines if x.engine_id == name]
    return report


async def test_a_prefix_travels_sideways_and_a_frozen_holder_costs_no_answer(
    tmp_path: Path, keys_dir: Path
) -> None:
    toy = save_toy(tmp_path / "toy")
    small = {"num_blocks": 128, "max_num_seqs": 4, "block_size": 4}
    known, other = prompt_of(3, 38), prompt_of(5, 38)
    configs = [engine_config(name, toy, **small) for name in ("p0", "p1", "d")]
    with cores(keys_dir, *configs) as (holder, taker, decode):
        addresses = [holder.address, taker.address]
        async with routing(toy, keys_dir, addresses, [decode.address]) as client:
            await all_usable(client, 3)

            async def answer(prompt: list[int]) -> tuple[list[int], str]:
                tokens = TokensPrompt(prompt_token_ids=prompt)
                output = await generate(client, tokens, ignore_eos=True)
                return list(output.outputs[0].token_ids), str(output.metrics.get("fetches", ""))

            send_by_way_of(client, holder, None)
            expected = [(await answer(prompt))[0] for prompt in (known, other)]
            send_by_way_of(client, taker, holder)
            assert await answer(known) == (expected[0], "38 tokens from p0")
            report = await report_of(client, "p1")
            assert (report.prefix_fetches, report.prefix_fetches_failed) == (1, 0)
            assert report.prefix_tokens_fetched == 36
            holder.signal(signal.SIGSTOP)
            try:
                made, _ = await asyncio.wait_for(answer(other), PATIENCE_S)
            finally:
                holder.signal(signal.SIGCONT)
            assert made == expected[1]
            async with asyncio.timeout(PATIENCE_S):
                while (report := await report_of(client, "p1")).prefix_fetches_failed == 0:
                    await asyncio.sleep(0.05)
            assert (report.prefix_fetches, report.prefix_tokens_fetched) == (2, 36)
            assert not report.leases_held
