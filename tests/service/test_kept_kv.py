"""Engines are killed in the middle of many streams, and the next ones go on with their KV."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from engine_kit.core import BATCHED
from engine_kit.executor import PACED
from free_ports import free_port
from service_kit import (
    LIGHT,
    Streaming,
    all_usable,
    cores,
    engine_config,
    generate,
    importing_support,
    link_of,
    routing,
    start_engine,
)
from waits import PATIENCE_S

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, KVTransferConfig, RequestOutput
from diptych_router.requests.pool_client import PoolClient

pytestmark = pytest.mark.asyncio

STREAMS, LENGTH, TOLD = 6, 120, 40
IN_BLOCKS = 96
"""Tokens of each prompt that fill blocks."""
PROMPT = list(range(1000, 1103))
"""Its last block is not full."""
PROMPTS = [
    f"Chapter {n}. The lighthouse keeper climbed the stairs, and " * 8 for n in range(STREAMS)
]


@pytest.fixture(autouse=True)
def _paced() -> Iterator[None]:
    """Engines that rest: their answers last, and take little of the processor."""
    with importing_support():
        yield


def keeping(name: str, folder: Path, **changes: Any) -> EngineConfig:
    return engine_config(
        name,
        LIGHT,
        **{
            "weight_packing": BATCHED,
            "executor_class": PACED,
            "num_blocks": 1024,
            "kv_keep": str(folder / name),
            **changes,
        },
    )


async def streams_over(client: PoolClient, kill: Callable[[], Awaitable[None]]) -> None:
    """Kill engines under many streams, which go on as if nothing had happened."""
    first = [Streaming(client, prompt, LENGTH) for prompt in PROMPTS]
    expected = [await stream.done() for stream in first]
    assert await client.reset_prefix_cache()  # nothing is left of that
    streams = [Streaming(client, prompt, LENGTH) for prompt in PROMPTS]
    async with asyncio.timeout(PATIENCE_S):
        while min(len(stream.token_ids) for stream in streams) < TOLD:
            await asyncio.sleep(0.01)
    await kill()
    assert [await stream.done() for stream in streams] == expected


async def test_streams_of_killed_engines_go_on_with_what_was_computed(
    smollm2: str, keys_dir: Path, tmp_path: Path
) -> None:
    configs = [keeping(name, tmp_path) for name in ("prefill-0", "decode-0")]
    with cores(keys_dir, *configs) as engines:

        async def kill() -> None:
            for core in engines:
                core.kill()
            engines[0].start()
            async with asyncio.timeout(PATIENCE_S):
                while link_of(client, engines[0]).times_up < 2:  # or decode computes the prompts
                    await asyncio.sleep(0.01)
            engines[1].start()

        places = [[core.address] for core in engines]
        async with routing(smollm2, keys_dir, *places) as client:
            await all_usable(client, 2)
            await streams_over(client, kill)
            of_p, of_d = [await link_of(client, core).refresh_stats() for core in engines]
            assert of_p.prefix_cache_hits >= STREAMS * IN_BLOCKS
            assert of_d.prefix_cache_hits >= STREAMS * (IN_BLOCKS + TOLD // 16 * 16)


async def handed_over(
    engine: AsyncLLM, max_tokens: int, params: dict[str, Any] | None
) -> RequestOutput:
    extra = None if params is None else {"kv_transfer_params": params}
    return await generate(
        engine,
        {"prompt_token_ids": PROMPT},
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args=extra,
    )


async def test_a_killed_prefill_engine_s_next_core_lends_what_was_granted(
    keys_dir: Path, tmp_path: Path
) -> None:
    hinge = KVTransferConfig(listen_port=free_port())
    at_p = keeping("prefill-0", tmp_path, kv_transfer=hinge)
    prefill, _ = await start_engine(at_p, keys_dir)
    decode, _ = await start_engine(keeping("decode-0", tmp_path, kv_keep=""), keys_dir)
    try:
        expected = await handed_over(prefill, TOLD, None)
        assert await prefill.reset_prefix_cache()
        lent = await handed_over(prefill, 1, {"do_remote_decode": True})
        assert prefill.description is not None
        os.kill(prefill.description.pid, signal.SIGKILL)
        prefill.shutdown()
        prefill, _ = await start_engine(at_p, keys_dir)
        answer = await handed_over(decode, TOLD, lent.kv_transfer_params)
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        of_p, of_d = [await engine.refresh_stats() for engine in (prefill, decode)]
        assert of_d.remote_kv_tokens == len(PROMPT)
        assert of_p.prompt_tokens_computed == of_d.prompt_tokens_computed == 0
        assert of_p.kv_transfer is not None
        assert of_p.kv_transfer.leases_released == of_p.kv_transfer.leases_granted == 1
        assert not list((tmp_path / "prefill-0").glob("*/*/leases/*"))
    finally:
        prefill.shutdown()
        decode.shutdown()


# --- a core that stands by ------------------------------------------------------------------------


class Pod:
    """The program of a decode engine with a standby, beside a prefill engine, and a router."""

    def __init__(self, folder: Path, keys_dir: Path, address: str) -> None:
        self.address, self.kept = address, folder / "decode-0"
        (folder / "engine.json").write_bytes(
            msgspec.json.encode(keeping("decode-0", folder, standby=True))
        )
        core_port = address.rpartition(":")[2]
        command = [
            *(sys.executable, "-m", "diptych_engine", "--config", str(folder / "engine.json")),
            *("--port", "0", "--core-port", core_port, "--kv-port", str(free_port())),
            *("--keys", str(keys_dir)),
        ]
        self.program = psutil.Popen(command)
        self.serving = 0

    def cores(self) -> list[psutil.Process]:
        """From the oldest to the youngest. The server that forks them has one thread."""
        children = [child for child in self.program.children() if child.num_threads() > 1]
        return sorted(children, key=lambda core: float(core.create_time()))

    async def kill(self, place: int = 0) -> None:
        """Kill one of two cores, of which the older one serves."""
        cores = self.cores()
        cores.pop(place).send_signal(signal.SIGKILL)
        [left] = cores
        self.serving = left.pid


@contextlib.asynccontextmanager
async def beside_a_standby(
    smollm2: str, keys_dir: Path, folder: Path, eventually: Any
) -> AsyncIterator[tuple[PoolClient, Pod]]:
    with cores(keys_dir, keeping("prefill-0", folder, kv_keep="")) as [prefill]:
        pod = Pod(folder, keys_dir, f"127.0.0.1:{free_port()}")
        try:
            async with routing(smollm2, keys_dir, [prefill.address], [pod.address]) as client:
                await all_usable(client, 2)
                await eventually(lambda: len(pod.cores()) == 2)
                yield client, pod
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                pod.program.kill()
            pod.program.wait()


async def test_a_core_that_stood_by_goes_on_and_another_one_stands_by(
    smollm2: str, keys_dir: Path, tmp_path: Path, eventually: Any
) -> None:
    async with beside_a_standby(smollm2, keys_dir, tmp_path, eventually) as (client, pod):
        [link] = [x for x in client.pools.links.values() if x.role == "decode"]
        await streams_over(client, pod.kill)
        assert link.description is not None
        assert link.description.pid == pod.serving, "the one that stood by"
        stats = await link.refresh_stats()
        assert stats.prefix_cache_hits >= STREAMS * (IN_BLOCKS + TOLD // 16 * 16)
        await eventually(lambda: len(pod.cores()) == 2)
        await streams_over(client, pod.kill)
        assert link.description.pid == pod.serving
        await eventually(lambda: len(pod.cores()) == 2)
        left = pod.cores()
        pod.program.terminate()
        assert await asyncio.to_thread(pod.program.wait, PATIENCE_S) == 0
        assert not psutil.wait_procs(left, PATIENCE_S)[1]
        assert not [path for path in pod.kept.rglob("*") if path.is_file()]


async def test_an_engine_whose_standby_has_died_serves_on_and_ends_with_its_core(
    smollm2: str, keys_dir: Path, tmp_path: Path, eventually: Any
) -> None:
    async with beside_a_standby(smollm2, keys_dir, tmp_path, eventually) as (client, pod):
        await pod.kill(1)
        await Streaming(client, PROMPTS[0], TOLD).done()
        os.kill(pod.serving, signal.SIGKILL)
        assert await asyncio.to_thread(pod.program.wait, PATIENCE_S) == 1
