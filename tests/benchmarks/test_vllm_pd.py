"""1P1D of vLLM as the benchmark drives it: both legs of a request, by the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from benchmarks.vllm_pd import NIXL, OURS, WHOLE, systems, two_legs

from diptych.bench.stream import Sample

REFERENCE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
P, D = "http://p", "http://d"


async def streamed(events: list[dict[str, object]]) -> AsyncIterator[bytes]:
    for event in events:
        yield b"data: %s\n\n" % json.dumps(event).encode()
    yield b"data: [DONE]\n\n"


class Servers:
    """What answers for P and D, and what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, object]]] = []
        self.prefill_status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.sent.append((request.url.host, body))
        if request.url.host == "p":
            return httpx.Response(self.prefill_status, json={"kv_transfer_params": REFERENCE})
        events: list[dict[str, object]] = [{"choices": [{"text": "a"}]} for _ in range(3)]
        events.append({"choices": [], "usage": {"completion_tokens": 3}})
        return httpx.Response(200, content=streamed(events))

    def ask(self) -> Sample:
        async def run() -> Sample:
            transport = httpx.MockTransport(self)
            async with httpx.AsyncClient(base_url=D, transport=transport) as client:
                return await two_legs(P, client, "smollm2", [5, 6, 7], 3)

        return asyncio.run(run())


def test_the_prompt_is_computed_at_p_and_its_reference_goes_to_d_as_it_is() -> None:
    servers = Servers()
    sample = servers.ask()
    (first, prefill), (second, decode) = servers.sent
    assert (first, second) == ("p", "d")
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True}
    assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 3)
    assert decode["kv_transfer_params"] == REFERENCE
    assert decode["stream"]
    assert sample.output_tokens == 3


def test_a_refusal_of_p_ends_the_benchmark() -> None:
    servers = Servers()
    servers.prefill_status = 503
    with pytest.raises(RuntimeError, match="503"):
        servers.ask()


def test_a_pair_has_a_server_for_each_role_and_all_systems_the_same_cores() -> None:
    made = systems("/v/bin/python")
    assert [len(made[name]) for name in (WHOLE, NIXL, OURS)] == [1, 2, 2]
    whole = made[WHOLE][0].environment["VLLM_CPU_OMP_THREADS_BIND"]
    for name in (NIXL, OURS):
        cores = [part.environment["VLLM_CPU_OMP_THREADS_BIND"] for part in made[name]]
        assert ",".join(cores) == whole
