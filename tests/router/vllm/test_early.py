"""Requests that a decode server is sent while prefill computes their prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from free_ports import free_port
from vllm_kit.fake_server import Exchange, data, lent, serving
from vllm_kit.pair import PROMPT, Pair, answer, routed, token_at

from diptych_router.requests.pool_client import PoolClient

ENGINE = {
    "remote_engine_id": "p1", "remote_host": "10.0.0.1", "remote_port": 5558, "epoch": "e",
    "compat": "c", "tp_size": 2,
}  # fmt: skip


class EarlyPair(Pair):
    """P waits with its answers until it may give them."""

    min_tokens = len(PROMPT)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def prefill(self, exchange: Exchange) -> None:
        await self.may_answer.wait()
        reference = ENGINE | {
            "do_remote_prefill": True,
            "lease_id": exchange.body["kv_transfer_params"]["lease_id"],
            "expires_at": 1 << 40,
            "remote_num_tokens": len(exchange.body["token_ids"]),
            "remote_block_ids": [[1, 2]],
            "proof": "of the lease",
            "announcing": {"proof": "of the engine", "min_tokens": self.min_tokens},
        }
        self.lent.append(reference)
        await exchange.write(lent(token_at(exchange.body["token_ids"]), reference))

    @property
    def early(self) -> list[Exchange]:
        """What D was asked before P had answered."""
        asked = [x for x in self.d.exchanges if "kv_transfer_params" in x.body]
        return [x for x in asked if "expires_at" not in x.body["kv_transfer_params"]]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[EarlyPair]:
    async with serving(free_port()) as p, serving(free_port()) as d:
        yield EarlyPair(p, d)


@pytest_asyncio.fixture
async def router(
    smollm2: str, pair: EarlyPair, eventually: Callable[..., Any]
) -> AsyncIterator[PoolClient]:
    async with routed(smollm2, pair, eventually, connector="diptych", verify="off") as client:
        yield client


async def ask_twice(
    router: PoolClient, pair: EarlyPair, eventually: Any
) -> asyncio.Task[list[int]]:
    """P is known after the first request, and computes the prompt of the second now."""
    assert await answer(router, "first") == [5, 6, 7, 8]
    assert pair.early == []
    pair.may_answer.clear()
    asking = asyncio.create_task(answer(router, "second"))
    await eventually(lambda: len(pair.p.exchanges) == 2)
    return asking


async def test_decode_is_asked_while_prefill_computes_and_generates_all_tokens(
    pair: EarlyPair, router: PoolClient, eventually: Any
) -> None:
    asking = await ask_twice(router, pair, eventually)
    await eventually(lambda: pair.early)
    [early], lease_id = pair.early, pair.p.exchanges[1].body["kv_transfer_params"]["lease_id"]
    assert early.body["token_ids"] == PROMPT
    assert early.body["sampling_params"]["max_tokens"] == 4
    assert early.body["kv_transfer_params"] == ENGINE | {
        "do_remote_prefill": True,
        "lease_id": lease_id,
        "remote_num_tokens": len(PROMPT),
        "proof": "of the engine",
    }
    pair.may_answer.set()
    assert await asking == [5, 6, 7, 8]
    assert len(pair.d.exchanges) == 2, "it was sent once"
    assert pair.p.given_back == pair.d.given_back == []


@pytest.mark.parametrize("when", ["before prefill answers", "afterwards"])
async def test_a_request_whose_early_leg_fails_is_sent_with_the_reference_of_prefill(
    pair: EarlyPair, router: PoolClient, eventually: Any, when: str
) -> None:
    may_fail = asyncio.Event()

    async def fail_early(exchange: Exchange) -> None:
        if "expires_at" in exchange.body["kv_transfer_params"]:
            await pair.decode(exchange)
            return
        await exchange.write()
        await may_fail.wait()
        await exchange.write(data({"error": {"message": "no KV", "code": 500}}))

    pair.d.script = fail_early
    asking = await ask_twice(router, pair, eventually)
    await eventually(lambda: pair.early)
    if when == "before prefill answers":
        may_fail.set()
        await eventually(lambda: not router.pools._vllm.early)  # type: ignore[union-attr]
    pair.may_answer.set()
    await eventually(lambda: len(pair.lent) == 2)
    may_fail.set()
    assert await asking == [5, 6, 7, 8]
    again = pair.d.exchanges[-1].body
    assert again["kv_transfer_params"] == pair.lent[1]
    kept = [5] if when == "before prefill answers" else []
    assert again["token_ids"] == [*PROMPT, *kept]
    assert len(pair.lent) == 2, "prefill has computed it once"


async def test_the_early_leg_of_a_client_that_goes_is_closed(
    pair: EarlyPair, router: PoolClient, eventually: Any
) -> None:
    assert await answer(router, "first") == [5, 6, 7, 8]
    pair.may_answer.clear()
    pair.d.script = Exchange.hang
    asking = asyncio.create_task(answer(router, "second"))
    await eventually(lambda: pair.early)
    asking.cancel()
    await eventually(pair.early[0].gone.is_set)
    await eventually(pair.p.exchanges[1].gone.is_set)


async def test_an_answer_that_ends_with_prefill_s_token_ends_the_early_leg(
    pair: EarlyPair, router: PoolClient, eventually: Any
) -> None:
    assert await answer(router, "first") == [5, 6, 7, 8]

    async def ends(exchange: Exchange) -> None:
        await eventually(lambda: pair.early)
        await exchange.write(lent(5, None, "stop"))

    pair.d.script, pair.p.script = Exchange.hang, ends
    assert await answer(router, "second") == [5]
    await eventually(pair.early[0].gone.is_set)


async def test_prefill_that_fails_ends_the_early_leg_and_the_request_begins_again(
    pair: EarlyPair, router: PoolClient, eventually: Any
) -> None:
    assert await answer(router, "first") == [5, 6, 7, 8]

    async def waits(exchange: Exchange) -> None:
        if "expires_at" in exchange.body["kv_transfer_params"]:
            await pair.decode(exchange)
        else:
            await exchange.hang()

    async def fail_once(exchange: Exchange) -> None:
        pair.p.script = pair.prefill
        await eventually(lambda: pair.early)
        pair.d.script = pair.decode
        exchange.response = exchange.response.__class__(status=500)
        await exchange.write(b'{"error": {"message": "dead", "code": 500}}')

    pair.d.script, pair.p.script = waits, fail_once
    assert await answer(router, "second") == [5, 6, 7, 8]
    assert pair.early[0].gone.is_set()


@pytest.mark.parametrize("why", ["short", "no room"])
async def test_what_would_bring_nothing_or_take_too_much_is_not_announced(
    pair: EarlyPair, router: PoolClient, eventually: Any, why: str
) -> None:
    if why == "short":
        pair.min_tokens = len(PROMPT) + 1
    else:
        pair.usage = 0.99
        pair.moves(0)
        await eventually(lambda: router.pools.of("decode")[0].stats.blocks_free < 2)
    asking = await ask_twice(router, pair, eventually)
    pair.may_answer.set()
    assert await asking == [5, 6, 7, 8]
    assert pair.early == []
