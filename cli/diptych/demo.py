"""`diptych demo`: sends one question through both pools and shows what the hand-off took."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.table import Table

from diptych.answer_stream import AnswerError, stream_chat
from diptych.chat.conversation import TIMEOUT
from diptych.chat.loop import printer
from diptych.engine_load import items_of
from diptych.errors import RunError
from diptych.laptop.rundir import RunState, options

QUESTION = "What is the name of the capital of France?"
"""The example's model answers this question alike on every processor: each word leads by more than
2 logits. (With "What is the capital of France?" two first words differ by 0.08.)"""
MAX_TOKENS = 64
METRICS_WAIT_S = 3.0
"""Engines report once per step, so the report of the last step may come after the answer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one streamed answer, as its client saw them."""

    ttft_s: float
    last_token_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of the tokens after the first; None if there were none."""
        seconds = self.last_token_s - self.ttft_s
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class HandOff:
    """Totals of all engines, from the router's /metrics."""

    blocks: int
    bytes: int
    seconds: float
    loads: int
    transports: tuple[str, ...]

    def since(self, before: HandOff) -> HandOff:
        """Return the difference to `before`, without the canaries of a router's start, say."""
        return HandOff(
            self.blocks - before.blocks,
            self.bytes - before.bytes,
            self.seconds - before.seconds,
            self.loads - before.loads,
            self.transports,
        )


def read_hand_off(metrics: str) -> HandOff:
    """Sum up the hand-off's metrics in a text exposition. Raises `ValueError` if it is none."""
    totals: dict[str, float] = defaultdict(float)
    transports: set[str] = set()
    for sample in items_of(metrics):
        if sample.labels.get("outcome", "completed") == "completed":
            totals[sample.name] += sample.value
        if sample.name == "diptych:kv_transfer_transport_info":
            transports.add(sample.labels["transport"])
    return HandOff(
        blocks=int(totals["diptych:kv_transfer_blocks_received_total"]),
        bytes=int(totals["diptych:kv_transfer_bytes_received_total"]),
        seconds=totals["diptych:kv_transfer_receive_seconds_total"],
        loads=int(totals["diptych:kv_transfer_loads_total"]),
        transports=tuple(sorted(transports)),
    )


async def demonstrate(state: RunState, console: Console) -> None:
    """Ask, print the answer as it streams, then the table. Raises `RunError`."""
    async with httpx.AsyncClient(timeout=TIMEOUT, **options(state)) as client:
        console.print(f"\n[bold]you>[/] {QUESTION}")
        try:
            before = await _hand_off_now(client, state)
            timing = await _ask(client, state, console)
            hand_off = await _hand_off_after(client, state, before)
        except (AnswerError, httpx.HTTPError, ValueError) as exc:
            raise RunError(f"the demo failed: {exc}") from exc
    console.print("\n")
    console.print(summary(timing, hand_off))


async def _ask(client: httpx.AsyncClient, state: RunState, console: Console) -> Timing:
    show = printer(console)
    body = {
        "model": state.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
    }
    begun = time.perf_counter()
    arrivals: list[float] = []
    tokens: int | None = None
    async with aclosing(stream_chat(client, state.url, body)) as chunks:
        async for chunk in chunks:
            if chunk.text:
                arrivals.append(time.perf_counter() - begun)
                show(chunk.text)
            tokens = tokens if chunk.usage is None else chunk.usage.completion_tokens
    if not arrivals:
        raise AnswerError("the answer was empty")
    return Timing(arrivals[0], arrivals[-1], tokens if tokens is not None else len(arrivals))


async def _hand_off_after(client: httpx.AsyncClient, state: RunState, before: HandOff) -> HandOff:
    """What was handed off since, once there is anything, or after `METRICS_WAIT_S`."""
    deadline = time.monotonic() + METRICS_WAIT_S
    while True:
        found = (await _hand_off_now(client, state)).since(before)
        if found.loads or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(0.1)


async def _hand_off_now(client: httpx.AsyncClient, state: RunState) -> HandOff:
    response = await client.get(f"{state.url.removesuffix('/v1')}/metrics")
    response.raise_for_status()
    return read_hand_off(response.text)


def summary(timing: Timing, hand_off: HandOff) -> Table:
    """Describe one answer, with units."""
    table = Table(title="one answer, two pools", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    speed = timing.tokens_per_s
    milliseconds = f"{1000 * hand_off.seconds / hand_off.loads:.1f}" if hand_off.loads else "-"
    for measure, value in (
        ("time to first token (ms)", f"{1000 * timing.ttft_s:.1f}"),
        ("tokens", str(timing.tokens)),
        ("tokens per second", f"{speed:.1f}" if speed is not None else "-"),
        ("KV blocks handed off", str(hand_off.blocks)),
        ("KV bytes handed off", f"{hand_off.bytes:,}"),
        ("waited for them (ms)", milliseconds),
        ("transport", ", ".join(hand_off.transports) or "-"),
    ):
        table.add_row(measure, value)
    return table
