"""How long streams wait whose engine is killed: without `kv_keep`, with it, and with a standby.

`python -m benchmarks.kv_keep [--streams 16] [--prompt 512] [--rounds 3]`. An engine's program
streams answers to a client of its core, as a router is, and the core gets SIGKILL. The client sends
each request again, with its tokens so far, to the next core: of the same program, or of one that is
started when it has ended. A stream waits from the kill to its next token. Its tokens are compared
with those of a stream that nobody disturbed. The ways take turns. Seconds of processors do not
depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import psutil
from benchmarks.machine import machine
from benchmarks.servers import MODEL, START_TIMEOUT_S, free_port

from diptych_frontend.core_client.client import CoreClient
from diptych_frontend.core_client.curve import new_keys, read_keys
from diptych_protocol import EngineCoreOutputs, EngineCoreRequest, SamplingParams

TOLD: Final = 64
"""Tokens of each answer before the kill, and after it."""
STANDS_BY: Final = "the engine core stands by"
WAYS: Final = ("none", "kv_keep", "standby")
NAMES: Final = ("first, s", "last, s", "of processors, s", "cached", "same")


class Engine:
    """The program, and a client of its core."""

    def __init__(self, folder: Path, way: str, streams: int) -> None:
        self._log, self._config = folder / "log", folder / "engine.json"
        config: dict[str, Any] = {
            "model": MODEL,
            "kv_cache_bytes": 1 << 30,
            "max_num_seqs": streams,
        }
        if way != "none":
            config |= {"kv_keep": str(folder), "standby": way == "standby"}
        self._config.write_text(json.dumps(config))
        keys = new_keys()
        (folder / "curve-public").write_text(keys.public)
        (folder / "curve-secret").write_text(keys.secret)
        self._keys, self._port = folder, free_port()
        self.tokens: dict[str, list[int]] = {}
        self.came_at: dict[str, float] = {}
        """When each stream had its first token since `ask`."""
        self._news, self._lost = asyncio.Event(), asyncio.Event()
        self.start()
        self.client = CoreClient(
            f"tcp://127.0.0.1:{self._port}",
            read_keys(folder),
            on_outputs=self._take,
            on_lost=lambda cause: self._lost.set(),
        )

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.program = psutil.Popen(
                [
                    *(sys.executable, "-m", "diptych_engine", "--config", str(self._config)),
                    *("--port", "0", "--core-port", str(self._port), "--keys", str(self._keys)),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    async def has_logged(self, line: str) -> None:
        while line not in self._log.read_text():
            await asyncio.sleep(0.05)

    def _take(self, message: EngineCoreOutputs) -> None:
        for output in message.outputs:
            self.tokens[output.request_id] += output.new_token_ids
            self.came_at.setdefault(output.request_id, time.monotonic())
        self._news.set()

    def ask(self, prompts: dict[str, list[int]], count: int) -> None:
        """Go on with each stream until it has so many tokens."""
        self.came_at.clear()
        for name, prompt in prompts.items():
            had = list(self.tokens.setdefault(name, []))
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            self.client.add(
                EngineCoreRequest(
                    name, prompt, None, params, None, None, time.time(), None, None, None,
                    generated_token_ids=had or None,
                )
            )  # fmt: skip

    async def have(self, count: int) -> None:
        while min(map(len, self.tokens.values())) < count:
            self._news.clear()
            await self._news.wait()

    def processor_seconds(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self.program.children(recursive=True))

    async def kill_core(self) -> float:
        """Kill it, and return when."""
        pid = (await self.client.describe()).pid
        self._lost.clear()
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await self._lost.wait()
        return killed_at

    async def restart(self) -> None:
        """As a kubelet does, the first time."""
        await asyncio.to_thread(self.program.wait)
        self.start()

    def stop(self) -> None:
        self.client.close()
        self.program.terminate()
        self.program.wait()


@contextlib.asynccontextmanager
async def streaming(way: str, prompts: dict[str, list[int]]) -> AsyncIterator[Engine]:
    """An engine that has begun to answer; with a standby, if there is one, that is ready."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        engine = Engine(Path(folder), way, len(prompts))
        try:
            await engine.client.describe(START_TIMEOUT_S)
            if way == "standby":
                await engine.has_logged(STANDS_BY)
            engine.ask(prompts, 2 * TOLD)
            yield engine
        finally:
            engine.stop()


async def undisturbed(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    async with streaming("none", prompts) as engine:
        await engine.have(2 * TOLD)
        return engine.tokens


async def measure(
    way: str, prompts: dict[str, list[int]]
) -> tuple[tuple[float, ...], dict[str, list[int]]]:
    """Return the figures of `NAMES` but the last, and the tokens of each stream."""
    async with streaming(way, prompts) as engine:
        await engine.have(TOLD)
        killed_at = await engine.kill_core()
        if way != "standby":
            await engine.restart()
        before = engine.processor_seconds()
        await engine.client.describe(START_TIMEOUT_S)
        engine.ask(prompts, 2 * TOLD)
        while len(engine.came_at) < len(prompts):
            await asyncio.sleep(0.001)
        processors = engine.processor_seconds() - before
        waited = [at - killed_at for at in engine.came_at.values()]
        await engine.have(2 * TOLD)
        cached = (await engine.client.fetch_stats()).prefix_cache_hits
        return (min(waited), max(waited), processors, cached), engine.tokens


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(machine())
    rows: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for number in range(given.rounds):
        rng = random.Random(number)
        prompts = {
            f"stream {n}": rng.choices(range(100, 40_000), k=given.prompt)
            for n in range(given.streams)
        }
        expected = await undisturbed(prompts)
        for way, found in rows.items():
            figures, tokens = await measure(way, prompts)
            same = sum(tokens[name] == expected[name] for name in prompts)
            found.append((*figures, same))
            print(way, *(f"{x:.2f}" for x in found[-1]), flush=True)
    print("medians:", *NAMES, sep="  ")
    for way, found in rows.items():
        print(way, *(f"{statistics.median(x):.2f}" for x in zip(*found, strict=True)))


if __name__ == "__main__":
    asyncio.run(main())
