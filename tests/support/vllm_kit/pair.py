"""A prefill and a decode server that compute nothing, and a router that has found them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from service_kit import make_router
from vllm_kit.fake_server import DONE, METRICS, Exchange, FakeVllm, event, lent

from diptych_protocol import SamplingParams
from diptych_router.requests.pool_client import PoolClient

PROMPT = [11, 12, 13, 14]
NIXL_METRICS = """\
vllm:nixl_bytes_transferred_sum{engine="0"} %d.0
vllm:nixl_bytes_transferred_count{engine="0"} %d.0
# TYPE vllm:nixl_num_notifications_after_expiry_total counter
vllm:nixl_num_notifications_after_expiry_total{engine="0"} %d.0
"""


@dataclass
class Pair:
    """A prefill and a decode server, which compute nothing."""

    p: FakeVllm
    d: FakeVllm
    lent: list[dict[str, Any]] = field(default_factory=list)
    """All references that P has made."""
    late: int = 0
    usage: float = 0.25
    """The part of their blocks that is in use."""

    def __post_init__(self) -> None:
        for server in (self.p, self.d):
            server.models["data"][0]["id"] = "smollm2"
        self.p.script, self.d.script = self.prefill, self.decode
        self.moves(0)

    def moves(self, number: int) -> None:
        """The servers say that so many hand-offs were made."""
        for server, late in ((self.p, self.late), (self.d, 0)):
            page = METRICS.replace('"tiny"} 0.25', f'"tiny"}} {self.usage}')
            server.metrics = page + NIXL_METRICS % (4096 * number, number, late)

    async def prefill(self, exchange: Exchange) -> None:
        if "kv_transfer_params" not in exchange.body:
            await self.decode(exchange)
            return
        name = f"{len(self.lent):032x}"
        reference = {"do_remote_prefill": True, "lease_id": name, "new": 1}
        self.lent.append(reference)
        await exchange.write(lent(token_at(exchange.body["token_ids"]), reference))

    async def decode(self, exchange: Exchange) -> None:
        """Goes on with numbers that only the place of each token decides."""
        if exchange.body.get("kv_transfer_params"):
            self.moves(len(self.lent))
        known = list(exchange.body["token_ids"])
        num_known = len(known)
        for _ in range(exchange.body["sampling_params"]["max_tokens"]):
            known.append(token_at(known))
        *tokens, last = known[num_known:]
        ends = event(last, finish="length")
        if exchange.body["sampling_params"].get("logprobs"):
            logprobs = {"content": [{"token_id": 0, "logprob": -1.0, "rank": 1}]}
            ends = event(last, finish="length", logprobs=logprobs)
            await exchange.write(*(event(x, logprobs=logprobs) for x in tokens), ends, DONE)
        else:
            await exchange.write(*map(event, tokens), ends, DONE)

    @property
    def leases(self) -> list[str]:
        """All leases, by their names."""
        return [reference["lease_id"] for reference in self.lent]

    @property
    def read(self) -> list[dict[str, Any]]:
        """The references that D was sent."""
        bodies = (exchange.body for exchange in self.d.exchanges)
        return [b["kv_transfer_params"] for b in bodies if "kv_transfer_params" in b]


def token_at(tokens: list[int]) -> int:
    """The token that follows so many."""
    return (5 + len(tokens) - len(PROMPT)) % 60


@contextlib.asynccontextmanager
async def routed(
    smollm2: str, pair: Pair, eventually: Callable[..., Any], **settings: Any
) -> AsyncIterator[PoolClient]:
    """A router that has found both servers."""
    router = make_router(
        smollm2, pair.p.address, pair.d.address, list, **{"runtime": "vllm", **settings}
    )
    router.start()
    try:
        await eventually(lambda: not router.why_not_ready())
        yield router
    finally:
        router.shutdown()


async def answer(router: PoolClient, request_id: str = "r", **params: Any) -> list[int]:
    asked = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "temperature": 0.0, **params})
    tokens: list[int] = []
    prompt = {"prompt_token_ids": PROMPT}
    async for output in router.generate(prompt, asked, request_id):  # type: ignore[arg-type]
        tokens = list(output.outputs[0].token_ids)
    return tokens
