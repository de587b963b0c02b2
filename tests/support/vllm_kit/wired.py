"""Real vLLM servers that answer the wire, and clients of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from free_ports import free_port
from model_kit.sensitive_model import ANSWER_TOKENS, Question
from vllm_kit.environment import WIRE
from vllm_server import VllmServer
from waits import PATIENCE_S

from diptych_frontend.core_client.client import CoreClient
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDescription,
    SamplingParams,
)
from diptych_protocol.kv_transfer_params import PARAM

DRAIN = ("--shutdown-timeout", "60")
LENDS: dict[str, Any] = {"do_remote_decode": True}


class Wired:
    """A server, and a client of its wire."""

    def __init__(self, server: VllmServer, port: int) -> None:
        self.server = server
        self.heard: list[EngineCoreOutputs] = []
        self.lost = ""
        self.about = EngineDescription("", "", "", 0, 0, 0, 0, "", {}, 0, 0)
        self.client = CoreClient(
            f"tcp://127.0.0.1:{port}", None, on_outputs=self.heard.append, on_lost=self._lose
        )

    def _lose(self, cause: Exception) -> None:
        self.lost = str(cause)

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        return [x for message in self.heard for x in message.outputs if x.request_id == request_id]

    async def run(self, prompt: list[int], **fields: Any) -> list[EngineCoreOutput]:
        """The whole answer."""
        asked = sent(prompt, **fields)
        self.client.add(asked)
        async with asyncio.timeout(PATIENCE_S):
            while not any(x.finished for x in self.outputs(asked.request_id)):
                await asyncio.sleep(0.01)
        return self.outputs(asked.request_id)

    async def blocks_free(self) -> int:
        return (await self.client.fetch_stats()).blocks_free


def sent(prompt: list[int], **fields: Any) -> EngineCoreRequest:
    """fields: of the request, or else of its sampling parameters."""
    own = {x: fields.pop(x) for x in list(fields) if x in EngineCoreRequest.__struct_fields__}
    transfer = fields.pop("transfer", None)
    if transfer is not None:
        fields["extra_args"] = {PARAM: transfer}
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS, **fields}
    made = EngineCoreRequest(
        request_id=secrets.token_hex(8), prompt_token_ids=prompt, mm_features=None,
        sampling_params=SamplingParams(**params), pooling_params=None, eos_token_id=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    return msgspec.structs.replace(made, **own)


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def started_servers(
    model: str,
    folder: Path,
    transfers: Sequence[dict[str, Any] | None],
    *options: str,
    ranks: Sequence[int] = (1, 1),
    environment: Mapping[str, str] | None = None,
    tells_kv: bool = True,
) -> Iterator[list[tuple[VllmServer, int]]]:
    """Servers with the ports of their wires. ranks: the tensor-parallel ones of each."""
    started = []
    try:
        for number, transfer in enumerate(transfers):
            port = free_port()
            variables = dict(environment or {}) | {
                "DIPTYCH_CORE_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }  # fmt: skip
            events = {
                "enable_kv_cache_events": True, "publisher": "zmq",
                "endpoint": f"ipc://{folder}/events-{number}",
                "replay_endpoint": f"ipc://{folder}/replay-{number}",
            }  # fmt: skip
            size = ("--tensor-parallel-size", str(ranks[number]))
            told = ("--kv-events-config", msgspec.json.encode(events).decode()) if tells_kv else ()
            more = (*told, *size, *options)
            log = folder / f"vllm-{number}.log"
            server = VllmServer(model, log, transfer, *WIRE, *DRAIN, *more, environment=variables)
            started.append((server, port))
        for server, _ in started:
            server.wait_until_ready()
        yield started
    finally:
        for server, _ in started:
            server.kill()


async def wired(servers: list[tuple[VllmServer, int]]) -> list[Wired]:
    clients = [Wired(*server) for server in servers]
    for each in clients:
        each.about = await each.client.describe(PATIENCE_S)
    return clients


async def handed_over(
    p: Wired, d: Wired, question: Question, **fields: Any
) -> tuple[list[int], int]:
    """An answer whose prompt P computes, and how many tokens of the prompt D says came from it."""
    lent = await p.run(question.prompt, max_tokens=1, transfer=LENDS, **fields)
    known = tokens_of(lent)
    rest = await d.run(
        question.prompt,
        transfer=lent[-1].kv_transfer_params,
        generated_token_ids=known or None,
        **fields,
    )
    return known + tokens_of(rest), sum(output.num_received_tokens for output in rest)
