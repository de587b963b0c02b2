"""What a router does while its pools come and go: real engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from engine_kit.executor import PACED
from service_kit import LIGHT, Core, Streaming, cores, engine_config, generate, healthy, routing
from waits import FOR_EVER_S, PATIENCE_S

from diptych_frontend.core_client.curve import new_keys, read_keys
from diptych_protocol import EngineOverloadedError, KVTransferConfig
from diptych_protocol.admin import RouterReport
from diptych_router.choosing.fleet_table import FOR_A_PAIR
from diptych_router.requests.pool_client import PoolClient
from diptych_router.telling.admin_port import MOST_WAIT_S, admin_app, router_report
from diptych_router.telling.explanations import Explanations

ABSENT = ["nobody.localhost:1"]
"""A name without addresses, as that of a pool without pods."""
NOBODY = "127.0.0.1:1"
"""An address where no engine is."""
PROMPT = "The lighthouse keeper climbed the stairs every evening, and "


@pytest.fixture(scope="module")
def two_pools(keys_dir: Path) -> Iterator[dict[str, Core]]:
    """Engines of revision r1: one for prefill, one for decode."""
    names = ("prefill-0", "decode-0")
    configs = [engine_config(x, LIGHT, revision="r1", executor_class=PACED) for x in names]
    with cores(keys_dir, *configs) as started:
        yield dict(zip(names, started, strict=True))


def say(path: Path, **serving: Any) -> None:
    path.write_bytes(msgspec.json.encode(serving))


# --- verification -------------------------------------------------------------------------------


async def test_new_engines_prove_the_hinge_before_they_are_ready(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core]
) -> None:
    pools = [core.address for core in two_pools.values()]
    async with routing(smollm2, keys_dir, pools[:1], pools[1:]) as client:
        assert not router_report(client).ready
        await healthy(client)
        report = router_report(client)
        await generate(client, PROMPT)
        later = router_report(client)
    assert report.ready
    assert report.quiet_s is None, "a canary is nobody's request"
    assert later.open_requests == 0
    assert isinstance(later.quiet_s, float)
    assert [(e.engine_id, e.revision, e.verified, e.usable) for e in report.engines] == [
        ("prefill-0", "r1", True, True),
        ("decode-0", "r1", True, True),
    ]
    (canary,) = report.canaries
    assert (canary.ok, canary.error) == (True, "")
    assert (canary.prefill, canary.decode, canary.revision) == ("prefill-0", "decode-0", "r1")
    assert (canary.prompt_tokens, canary.computed_by_decode, canary.blocks) == (33, 0, 3)
    assert canary.bytes > 0
    assert canary.transport
    assert canary.milliseconds > 0


async def test_a_hinge_that_does_not_work_keeps_users_away_and_says_why(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core], eventually: Any
) -> None:
    """Its address for KV is one where nobody listens; a sound engine ends the outage."""
    misled = KVTransferConfig(lease_seconds=5.0, advertise_host="127.0.0.9")
    config = engine_config("misled", LIGHT, revision="r1", kv_transfer=misled)
    sound, decode = two_pools["prefill-0"], two_pools["decode-0"]
    with cores(keys_dir, config) as (broken,):
        async with routing(
            smollm2, keys_dir, [broken.address], [decode.address], hold_seconds=0.5
        ) as client:
            await eventually(lambda: client.pools.canaries)
            report = router_report(client)
            assert not report.ready
            assert not report.canaries[0].ok
            assert report.canaries[0].error in report.reason
            assert not any(engine.usable for engine in report.engines)
            with pytest.raises(EngineOverloadedError, match=r"no engine within .*: no usable pair"):
                await generate(client, PROMPT)
        async with routing(
            smollm2, keys_dir, [broken.address], [decode.address], verify="Warn"
        ) as client:
            await eventually(lambda: client.pools.canaries)
            assert all(engine.usable for engine in router_report(client).engines)
        async with routing(
            smollm2, keys_dir, [broken.address, sound.address], [decode.address]
        ) as client:
            await healthy(client)
            assert client.pools.choose(FOR_A_PAIR) is not None
            usable = [e.engine_id for e in router_report(client).engines if e.usable]
            assert usable == ["prefill-0", "decode-0"]


async def test_a_decode_engine_without_any_partner_serves_alone(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core]
) -> None:
    """Nothing is to cross the hinge then, so there is nothing to prove."""
    async with routing(smollm2, keys_dir, [NOBODY], [two_pools["decode-0"].address]) as client:
        output = await generate(client, PROMPT)
        assert output.metrics["prefill"] == "decode-0"
        assert "prefill pool" in client.why_not_ready()


async def test_the_longest_request_is_what_every_usable_engine_can_take(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core], eventually: Any
) -> None:
    prefill, decode = two_pools.values()
    with cores(keys_dir, engine_config("small", LIGHT, num_blocks=8)) as (small,):
        async with routing(
            smollm2, keys_dir, [prefill.address], [decode.address, small.address], verify="Warn"
        ) as client:
            await eventually(lambda: client.max_model_len == 8 * 16)
            small.kill()
            await eventually(lambda: client.max_model_len > 8 * 16)


# --- holding, and which revisions may serve ---------------------------------------------------


async def next_report(client: PoolClient, keys_dir: Path) -> RouterReport:
    """The router's report once it holds a request."""
    (keys_dir / "admin-token").write_text("sesame")
    known = Explanations(client.table.records, client.name_of, policy="", disaggregate="")
    transport = httpx.ASGITransport(admin_app(client, known, keys_dir, None))
    async with httpx.AsyncClient(transport=transport, timeout=FOR_EVER_S) as admin:
        found = await admin.get(
            "http://admin/admin/state",
            params={"wait": MOST_WAIT_S},
            headers={"Authorization": "Bearer sesame"},
        )
    return msgspec.json.decode(found.content, type=RouterReport)


async def test_requests_wait_for_a_revision_that_may_serve(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core], tmp_path: Path, eventually: Any
) -> None:
    serving = tmp_path / "serving.json"
    say(serving, revisions=["r2"])
    pools = [core.address for core in two_pools.values()]
    async with routing(
        smollm2, keys_dir, pools[:1], pools[1:], serving=serving, max_held=2
    ) as client:
        await eventually(lambda: any(r.ok for r in client.pools.canaries.values()))
        report = router_report(client)
        assert report.serving_revisions == ["r2"]
        assert [(e.verified, e.usable) for e in report.engines] == [(True, False)] * 2
        news = asyncio.create_task(next_report(client, keys_dir))
        waiting = [asyncio.create_task(generate(client, PROMPT)) for _ in range(2)]
        await eventually(lambda: client.num_held == 2)
        assert router_report(client).held_requests == 2
        assert (await asyncio.wait_for(news, PATIENCE_S)).held_requests > 0
        with pytest.raises(EngineOverloadedError, match="2 requests wait already"):
            await generate(client, "one too many")
        waiting[1].cancel()
        await eventually(lambda: client.num_held == 1)
        say(serving, revisions=["r2", "r1"])
        output = await asyncio.wait_for(waiting[0], PATIENCE_S)
        assert len(output.outputs[0].token_ids) == 16
        assert client.num_held == 0
        await client.check_health()


async def test_a_stream_goes_on_when_its_revision_may_serve_no_more(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core], tmp_path: Path, eventually: Any
) -> None:
    serving = tmp_path / "serving.json"
    say(serving, revisions=["r1"])
    pools = [core.address for core in two_pools.values()]
    async with routing(smollm2, keys_dir, pools[:1], pools[1:], serving=serving) as client:
        await healthy(client)
        stream = Streaming(client, PROMPT, max_tokens=200)
        await eventually(lambda: len(stream.token_ids) > 3)
        say(serving, revisions=["r2"])
        await eventually(lambda: client.pools.choose(FOR_A_PAIR) is None)
        assert len(stream.token_ids) < 200
        await stream.done()
        assert len(stream.token_ids) == 200


async def test_a_request_stays_in_the_revision_that_it_was_given_to(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core], tmp_path: Path, eventually: Any
) -> None:
    serving = tmp_path / "serving.json"
    pools = [core.address for core in two_pools.values()]
    async with routing(smollm2, keys_dir, pools[:1], pools[1:], serving=serving) as client:
        await healthy(client)
        say(serving, revisions=["r1", "r2"], canary="r1", weight=50)
        await eventually(lambda: client.pools.trial is not None)
        assert [(await generate(client, PROMPT)).metrics.get("revision") for _ in range(4)] == [
            "r2", "r1", "r2", "r1",
        ]  # fmt: skip
        seen = router_report(client).trial
        assert seen is not None
        assert (seen.revision, seen.weight, seen.requests, seen.failed) == ("r1", 50, 2, 0)
        assert (seen.ended, seen.handed_over) == (2, 2)
        say(serving, revisions=["r1", "r2"], canary="r2", weight=100)
        await eventually(lambda: client.pools.trial and client.pools.trial.weight == 100)
        output = await generate(client, PROMPT)  # nobody of r2 is there: better r1 than nobody
        assert (output.metrics["revision"], output.metrics["decode"]) == ("r2", "decode-0")
        say(serving, revisions=["r1"])
        await eventually(lambda: client.pools.trial is None)
        assert "revision" not in (await generate(client, PROMPT)).metrics


async def test_asleep_on_purpose_is_ready(
    smollm2: str, keys_dir: Path, tmp_path: Path, eventually: Any
) -> None:
    serving = tmp_path / "serving.json"
    say(serving, revisions=[], asleep=True)
    for hold, ready in ((1.0, True), (0.0, False)):
        async with routing(
            smollm2, keys_dir, ABSENT, ABSENT, serving=serving, hold_seconds=hold
        ) as client:
            await eventually(lambda: client.pools.serving.asleep and client.pools.had_pair)
            assert router_report(client).ready is ready
            begin = time.monotonic()
            with pytest.raises(EngineOverloadedError):
                await generate(client, PROMPT)
            assert time.monotonic() - begin >= hold


async def test_one_that_may_sleep_and_has_engines_is_not_ready_before_they_have_proven_themselves(
    smollm2: str, keys_dir: Path, tmp_path: Path, eventually: Any
) -> None:
    serving = tmp_path / "serving.json"
    say(serving, revisions=[], asleep=True)
    async with routing(smollm2, keys_dir, [NOBODY], [NOBODY], serving=serving) as client:
        await eventually(lambda: client.pools.serving.asleep and client.pools.links)
        await asyncio.sleep(0.1)
        assert not router_report(client).ready


async def test_one_that_may_sleep_is_ready_after_a_pair_was_whatever_becomes_of_engines(
    smollm2: str, keys_dir: Path, tmp_path: Path
) -> None:
    """The file that says so may come long before the sleep, and go long after it."""
    serving = tmp_path / "serving.json"
    say(serving, revisions=[], asleep=True)
    names = ("prefill-0", "decode-0")
    configs = [engine_config(name, LIGHT) for name in names]
    with cores(keys_dir, *configs) as started:
        pools = [core.address for core in started]
        async with routing(
            smollm2, keys_dir, pools[:1], pools[1:], serving=serving, hold_seconds=0.1
        ) as client:
            await healthy(client)
            for core in started:
                core.kill()
            await asyncio.sleep(1.0)
            assert client.pools.choose(FOR_A_PAIR) is None
            assert not client.pools.may_hold()
            await client.check_health()
            assert router_report(client).ready


# --- keys -----------------------------------------------------------------------------------------


async def test_engines_with_the_previous_key_are_reached_too(
    smollm2: str, keys_dir: Path, two_pools: dict[str, Core], eventually: Any
) -> None:
    ring = [new_keys(), new_keys()]
    pools = [core.address for core in two_pools.values()]
    async with routing(
        smollm2, keys_dir, pools[:1], pools[1:], read_keys=lambda: list(ring)
    ) as client:
        await asyncio.sleep(1.0)
        assert not any(link.up for link in client.pools.links.values()), "two wrong keys"
        ring[1] = read_keys(keys_dir)
        await eventually(lambda: all(link.up for link in client.pools.links.values()))
        await healthy(client)
