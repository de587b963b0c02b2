"""A router in front of a prefill and a decode server, both real vLLM, over either KV connector."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from free_ports import free_port
from service_kit import make_router
from vllm_kit.environment import START_S, needs_nixl, needs_vllm
from vllm_kit.real_server import RealVllm, vllm_servers
from vllm_kit.sent import request
from vllm_kit.tiny_model import save_tiny_model
from waits import PATIENCE_S, Deadline, wait_until

from diptych_protocol import SamplingParams
from diptych_protocol.config import Connector
from diptych_router.requests.pool_client import PoolClient

pytestmark = [*needs_vllm, pytest.mark.timeout(START_S + 900)]

LEASE_S = 30
EARLY = "fetches its KV before prefill has answered"
PROMPTS = [[3 + (number * 31 + place * 7) % 900 for place in range(40 + 29 * number)]
           for number in range(12)]  # fmt: skip


def transfer_options(connector: Connector) -> tuple[str, ...]:
    """vLLM's options for a connector."""
    if connector == "nixl":
        config: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
    else:
        config = {
            "kv_connector": "DiptychConnector",
            "kv_connector_module_path": "diptych_vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lease_seconds": LEASE_S},
        }
    own = ("--max-num-batched-tokens", "128")
    return (
        "--block-size", "32", "--kv-transfer-config", json.dumps(config),
        *(own if connector == "diptych" else ()),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["diptych", pytest.param("nixl", marks=needs_nixl)])
def connector(request: pytest.FixtureRequest) -> Connector:
    wanted: Connector = request.param
    return wanted


@pytest.fixture(scope="module")
def servers(
    model: str, connector: Connector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RealVllm]]:
    """P, then D."""
    variables = [
        {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        for _ in range(2)
    ]
    logs = tmp_path_factory.mktemp(f"logs-{connector}")
    with vllm_servers(model, logs, 2, *transfer_options(connector), variables=variables) as started:
        yield started


@pytest_asyncio.fixture
async def router(model: str, servers: list[RealVllm], eventually: Any) -> AsyncIterator[PoolClient]:
    """It has verified the pair."""
    p, d = servers
    client = make_router(
        model, p.address, d.address, None, served_name="tiny", policy="prefix_aware",
    )  # fmt: skip
    client.start()
    try:
        await eventually(lambda: not client.why_not_ready())
        yield client
    finally:
        client.shutdown()


async def answer(
    router: PoolClient, prompt: list[int], request_id: str, **params: Any
) -> list[int]:
    asked = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, **params})
    tokens: list[int] = []
    given = {"prompt_token_ids": prompt}
    async for output in router.generate(given, asked, request_id):  # type: ignore[arg-type]
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def alone(server: RealVllm, prompt: list[int], **params: Any) -> list[int]:
    """What a server answers without a router and without a hand-off."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0,
        "return_token_ids": True, **params,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        said = (await client.post("/v1/completions", json=body)).json()
    tokens: list[int] = said["choices"][0]["token_ids"]
    return tokens


def said(server: RealVllm) -> str:
    return Path(server.log.name).read_text(errors="replace")


def holds_nothing(server: RealVllm) -> bool:
    """No block is in use, by a request or for another server."""
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    [usage] = [line for line in lines if line.startswith("vllm:kv_cache_usage_perc{")]
    return float(usage.rsplit(" ", 1)[1]) == 0.0


@pytest.mark.parametrize(
    "params",
    [{}, {"frequency_penalty": 1.5}, {"max_tokens": 2}],
    ids=["greedy", "penalised", "two tokens"],
)
async def test_a_pair_answers_as_one_server_does(
    router: PoolClient, connector: Connector, servers: list[RealVllm], params: dict[str, Any]
) -> None:
    """With our connector, prompts of more than 128 tokens are sent ahead to the decode server."""
    p, d = servers
    before = said(d).count(EARLY)
    got = await asyncio.gather(
        *(answer(router, prompt, f"r{n}", **params) for n, prompt in enumerate(PROMPTS))
    )
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        assert len(tokens) == params.get("max_tokens", 12)
        assert tokens == await alone(d, prompt, **params), "nothing foreign is remembered"
    wait_until(lambda: holds_nothing(p) and holds_nothing(d))
    assert (said(d).count(EARLY) > before) == (connector == "diptych")


async def test_a_client_that_goes_leaves_no_blocks_behind(
    router: PoolClient, servers: list[RealVllm]
) -> None:
    """At three moments: when P was asked, after the first token, and while D answers."""
    [prefill] = router.pools.of("prefill")
    for number, tokens_seen in enumerate((0, 1, 3)):
        prompt = [7 + (number * 13 + place) % 800 for place in range(600)]
        asked = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
        stream = router.generate({"prompt_token_ids": prompt}, asked, f"goes{number}")

        async def follow(stream: Any = stream, most: int = tokens_seen) -> None:
            async for output in stream:
                if most and len(output.outputs[0].token_ids) >= most:
                    return

        following = asyncio.create_task(follow())
        if tokens_seen:
            await following
        else:
            deadline = Deadline("P is asked")
            while not prefill.open_tokens:
                deadline.check()
                await asyncio.sleep(0)
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        await stream.aclose()
    wait_until(lambda: all(holds_nothing(server) for server in servers))


async def test_what_nobody_will_decode_is_given_back(
    router: PoolClient, servers: list[RealVllm]
) -> None:
    [prefill] = router.pools.of("prefill")
    lends = {"kv_transfer_params": {"do_remote_decode": True}}
    asked = request(prompt=40, max_tokens=1, extra_args=lends)
    [output] = await prefill.complete(asked)
    assert output.kv_transfer_params is not None
    assert not holds_nothing(servers[0])
    await router.pools.reject(asked.request_id, output.kv_transfer_params)
    wait_until(lambda: holds_nothing(servers[0]))
