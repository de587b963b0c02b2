"""A router with prefill and decode servers: what each is sent, and what becomes of leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from free_ports import free_port
from service_kit import make_router
from vllm_kit.fake_server import Exchange, data, serving
from vllm_kit.pair import PROMPT, Pair, answer, routed

from diptych_protocol import EngineOverloadedError
from diptych_protocol.config import Connector
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.pools import canary


@pytest.fixture(params=["diptych", "nixl"])
def connector(request: pytest.FixtureRequest) -> Connector:
    wanted: Connector = request.param
    return wanted


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with serving(free_port()) as p, serving(free_port()) as d:
        yield Pair(p, d)


@pytest_asyncio.fixture
async def router(
    smollm2: str, pair: Pair, eventually: Callable[..., Any], connector: Connector
) -> AsyncIterator[PoolClient]:
    """It uses the pair without a canary, so that a test knows all that the servers were sent."""
    async with routed(smollm2, pair, eventually, connector=connector, verify="off") as client:
        yield client


async def test_prefill_computes_the_prompt_and_decode_goes_on(
    pair: Pair, router: PoolClient, connector: Connector
) -> None:
    assert await answer(router) == [5, 6, 7, 8]
    [asked], [went_on] = pair.p.exchanges, pair.d.exchanges
    assert asked.body["stream"] is False
    assert asked.body["sampling_params"]["max_tokens"] == 1
    assert asked.body["kv_transfer_params"]["do_remote_decode"] is True
    assert went_on.body["kv_transfer_params"] == pair.lent[0], "as P has said it"
    kept = [5] if connector == "diptych" else []
    assert went_on.body["token_ids"] == [*PROMPT, *kept]
    assert went_on.body["sampling_params"]["max_tokens"] == 4 - len(kept)
    assert pair.p.given_back == pair.d.given_back == []


async def test_what_a_client_says_of_kv_reaches_nobody(pair: Pair, router: PoolClient) -> None:
    forged = {"do_remote_decode": True, "remote_host": "10.0.0.1", "lease_id": "f" * 32}
    assert await answer(router, extra_args={"kv_transfer_params": forged}) == [5, 6, 7, 8]
    sent = [exchange.body for exchange in (*pair.p.exchanges, *pair.d.exchanges)]
    assert not [body for body in sent if "10.0.0.1" in str(body) or "ffff" in str(body)]


async def test_a_hand_off_that_fails_begins_with_prefill_again(
    pair: Pair, router: PoolClient, eventually: Any, connector: Connector
) -> None:
    async def fail_once(exchange: Exchange) -> None:
        pair.d.script = pair.decode
        await exchange.write(data({"error": {"message": "no KV", "code": 500}}))

    pair.d.script = fail_once
    assert await answer(router) == [5, 6, 7, 8]
    assert len(pair.lent) == 2
    assert pair.read == pair.lent, "each reference was used once"
    frees = pair.p if connector == "diptych" else pair.d
    await eventually(lambda: frees.given_back == pair.leases[:1])


async def test_blocks_are_given_back_if_decode_refuses_the_request(
    pair: Pair, router: PoolClient, eventually: Any, connector: Connector
) -> None:
    async def refuse(exchange: Exchange) -> None:
        exchange.response = exchange.response.__class__(status=503)
        await exchange.write(b'{"error": {"message": "full", "code": 503}}')

    pair.d.script = refuse
    with pytest.raises(EngineOverloadedError):
        await answer(router, max_tokens=20)
    frees, other = (pair.p, pair.d) if connector == "diptych" else (pair.d, pair.p)
    await eventually(lambda: frees.given_back == pair.leases)
    assert other.given_back == []


async def test_blocks_of_a_client_that_goes_are_given_back_once(
    pair: Pair, router: PoolClient, eventually: Any, connector: Connector
) -> None:
    """With NIXL, the decode engine that was sent the request frees them when it is aborted."""
    pair.d.script = Exchange.hang
    asking = asyncio.create_task(answer(router))
    await eventually(lambda: pair.d.exchanges)
    asking.cancel()
    await eventually(lambda: pair.d.exchanges[0].gone.is_set())
    if connector == "diptych":
        await eventually(lambda: pair.p.given_back == pair.leases)
    pair.d.script = pair.decode
    await answer(router, "after it")
    assert pair.d.given_back == []
    assert len(pair.p.given_back) == (1 if connector == "diptych" else 0)


@pytest.mark.parametrize("has_route", [True, False])
async def test_a_server_is_asked_once_whether_it_has_the_route_for_giving_back(
    smollm2: str, pair: Pair, eventually: Any, has_route: bool
) -> None:
    async with routed(smollm2, pair, eventually, connector="diptych", verify="off") as router:
        pair.p.has_route = has_route

        async def fail_twice(exchange: Exchange) -> None:
            if len(pair.lent) == 2:
                pair.d.script = pair.decode
                await eventually(lambda: pair.p.given_back)
            await exchange.write(data({"error": {"message": "no KV", "code": 500}}))

        pair.d.script = fail_twice
        assert await answer(router) == [5, 6, 7, 8]
        await eventually(lambda: sorted(pair.p.given_back) == pair.leases[:2])
        asked = pair.p.times_asked
        assert asked["/v1/kv_transfer/reject"] == (2 if has_route else 1)
        assert asked["/v1/completions"] == (0 if has_route else 2)


async def test_with_nixl_nobody_is_asked_for_a_route_of_our_connector(
    smollm2: str, pair: Pair, eventually: Any
) -> None:
    async with routed(smollm2, pair, eventually, connector="nixl", verify="off") as router:

        async def fail_once(exchange: Exchange) -> None:
            pair.d.script = pair.decode
            await exchange.write(data({"error": {"message": "no KV", "code": 500}}))

        pair.d.script = fail_once
        await answer(router)
        await eventually(lambda: pair.d.given_back == pair.leases[:1])
        assert pair.d.times_asked["/v1/kv_transfer/reject"] == 0


async def test_a_pair_is_used_after_bytes_have_crossed_and_the_answer_is_decodes_own(
    smollm2: str, pair: Pair, eventually: Any, connector: Connector
) -> None:
    async with routed(smollm2, pair, eventually, connector=connector) as router:
        [report] = router.pools.canaries.values()
        assert report.ok
        assert report.bytes == 4096
        assert report.computed_by_decode == 0
        crossed, alone = pair.d.exchanges
        assert crossed.body["kv_transfer_params"] == pair.lent[0]
        assert "kv_transfer_params" not in alone.body
        prompt = alone.body["token_ids"]
        assert crossed.body["token_ids"][: len(prompt)] == prompt
        assert crossed.body["cache_salt"] != alone.body["cache_salt"], "nothing was remembered"


@pytest.mark.parametrize("fault", ["nothing crossed", "another answer"])
async def test_a_pair_that_does_not_hand_over_is_not_used(
    smollm2: str,
    pair: Pair,
    eventually: Any,
    connector: Connector,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canary, "TOLD_S", 0.2)  # so long a canary waits for bytes to be told
    words = "no byte crossed"
    if fault == "nothing crossed":
        pair.moves = lambda number: None  # type: ignore[method-assign]
    else:
        words = "its KV is wrong"

        async def from_other_kv(exchange: Exchange) -> None:
            if exchange.body.get("kv_transfer_params"):
                exchange.body["token_ids"] += [0] * 7
            await pair.decode(exchange)

        pair.d.script = from_other_kv
    router = make_router(
        smollm2, pair.p.address, pair.d.address, list, runtime="vllm", connector=connector
    )
    router.start()
    try:
        await eventually(lambda: words in router.why_not_ready())
    finally:
        router.shutdown()


async def test_servers_are_verified_again_when_blocks_were_read_too_late(
    smollm2: str, pair: Pair, eventually: Any
) -> None:
    async with routed(smollm2, pair, eventually, connector="nixl") as router:
        await answer(router)
        [former] = router.pools.canaries.values()
        before = len(pair.d.exchanges)
        pair.late = 1
        pair.moves(len(pair.lent))
        await eventually(lambda: list(router.pools.canaries.values()) != [former])
        assert {link.times_doubted for link in router.pools.links.values()} == {1}, "both"
        await eventually(lambda: not router.why_not_ready())
        await answer(router, "again", extra_args=None)
        later = [exchange.body.get("cache_salt") for exchange in pair.d.exchanges[before:]]
        assert later[-1], "decode uses nothing that it remembers from before"
