"""Two real vLLM servers, prefill (P) and decode (D), that hand KV over by NIXL.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import httpx
from free_ports import free_port
from vllm_server import VllmServer
from waits import wait_until

NOBODY = [5, 7]
"""A prompt of no test."""


@dataclass(frozen=True)
class NixlEngine:
    """How a server is started, so that another can take its place."""

    role: str
    """`kv_producer` or `kv_consumer`."""
    lease_s: int
    engine_id: str | None = None
    """None: vLLM draws one at each start."""
    options: tuple[str, ...] = ()

    def start(self, model: str, log: Path, side_port: int | None = None) -> VllmServer:
        """side_port: where P tells other engines of its memory; None: a free one."""
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": self.role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": self.lease_s},
        }
        if self.engine_id is not None:
            transfer["engine_id"] = self.engine_id
        variables = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port or free_port()),
        }
        more = ("--enable-scale-out", *self.options)
        return VllmServer(model, log, transfer, *more, environment=variables)


@dataclass(frozen=True)
class Counters:
    """What a pair's metrics say of its hand-offs."""

    transfers: float = 0
    """Reads that D finished."""
    failed: float = 0
    """Reads, hand-shakes and notifications that failed at D."""
    failed_notifications: float = 0
    expired: float = 0
    """Requests whose lease ended at P."""
    after_expiry: float = 0
    """Reads that P was told of when it no longer knew the request."""

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Pair:
    p: VllmServer
    d: VllmServer

    def counters(self) -> Counters:
        """Each engine computes a token first: figures come with its steps, and none of an engine
        that rests."""
        for engine in (self.p, self.d):
            engine.post(NOBODY, 1)
        return Counters(
            self.d.metric("vllm:nixl_bytes_transferred_count"),
            self.d.metric("vllm:nixl_num_failed_transfers_total"),
            self.d.metric("vllm:nixl_num_failed_notifications_total"),
            self.p.metric("vllm:nixl_num_kv_expired_reqs_total"),
            self.p.metric("vllm:nixl_num_notifications_after_expiry_total"),
        )

    @contextlib.contextmanager
    def counts(self, *expected: Counters) -> Iterator[None]:
        """The counters rise by this in the block, or by another of these, and by no more."""
        before = self.counters()
        yield
        seen: list[Counters] = []

        def as_expected() -> bool:
            seen.append(self.counters() - before)
            return seen[-1] in expected

        try:
            wait_until(as_expected, seconds=30)
        except AssertionError:
            wanted = " or ".join(map(str, expected))
            raise AssertionError(f"counted {seen[-1]}, and not {wanted}") from None

    def seconds_until(self, condition: Callable[[], bool]) -> float:
        started = time.monotonic()
        wait_until(condition)
        return time.monotonic() - started

    def generate(self, prompt: list[int], max_tokens: int, **fields: Any) -> httpx.Response:
        """By D's route of tokens."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": False}
        return self.d.client.post("/inference/v1/generate", json=body | fields)
