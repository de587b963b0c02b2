"""A long prompt is checked, and its blocks are named, beside the event loop, and only once."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from benchmarks.scenarios.router import engines
from benchmarks.servers import free_port
from hypothesis import given
from hypothesis import strategies as st
from service_kit import make_router

from diptych_frontend.core_client.async_engine import MANY_TOKENS
from diptych_protocol import EngineCoreRequest, SamplingParams
from diptych_protocol.block_hashes import extend_block_hashes, salted
from diptych_router.engines.known_prefixes import PART_BLOCKS, BlockNamer, BlockNaming, keys_of
from diptych_router.requests.pool_client import PoolClient

PROMPT = [token % 1000 for token in range(MANY_TOKENS + 1000)]


@pytest.fixture(params=[False, True], ids=["one cache", "a cache per key"])
async def client(
    request: pytest.FixtureRequest, smollm2: str, eventually: Callable[..., Awaitable[Any]]
) -> AsyncIterator[PoolClient]:
    """A router in front of engines that compute nothing."""
    ports = [free_port(), free_port()]
    prefill, decode = (f"127.0.0.1:{port}" for port in ports)
    with engines("benchmarks.instant_core", ports):
        router = make_router(
            smollm2, prefill, decode, None,
            policy="prefix_aware", verify="Off", cache_per_key=request.param,
        )  # fmt: skip
        router.start()
        await eventually(lambda: not router.why_not_ready())
        yield router
        router.shutdown()


async def test_its_blocks_are_named_beside_the_event_loop_and_once(client: PoolClient) -> None:
    namer, named_by = client.table.namer, list[int]()
    put = namer.remembered.put

    def noted(name: bytes, value: bytes) -> None:
        named_by.append(threading.get_ident())
        put(name, value)

    namer.remembered.put = noted  # type: ignore[method-assign]
    for number in range(2):
        prompt: Any = {"prompt_token_ids": PROMPT}
        params = SamplingParams(max_tokens=2)
        answers = client.generate(prompt, params, f"long-{number}", tenant="alice")
        assert [answer async for answer in answers][-1].finished
    assert len(named_by) == len(PROMPT) // (PART_BLOCKS * 16)
    assert threading.get_ident() not in named_by


def keys(namer: BlockNamer, tokens: list[int], salt: str | None, size: int) -> bytes:
    request = EngineCoreRequest(
        "name", tokens, None, SamplingParams(), None, None, 0.0, None, salt, None
    )
    return namer.keys(request, tokens, BlockNaming(size)).tobytes()


SHARED = BlockNamer()


@given(
    length=st.integers(0, 400),
    start=st.sampled_from([0, 0, 0, 7]),
    changed_at=st.integers(0, 400),
    salt=st.sampled_from([None, "a", "b"]),
    size=st.sampled_from([1, 2, 3]),
)
def test_names_are_those_of_a_prompt_named_alone(
    length: int, start: int, changed_at: int, salt: str | None, size: int
) -> None:
    tokens = [*range(start, start + length)]
    if changed_at < length:
        tokens[changed_at] = 49_151
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, size, salted(salt))
    assert keys(SHARED, tokens, salt, size) == keys_of(hashes).tobytes()
