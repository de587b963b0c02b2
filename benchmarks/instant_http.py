"""An OpenAI server that computes nothing, for other projects' routers.

`python -m benchmarks.instant_http PORT` answers every POST with the same completion, which also
says where KV would be fetched, and every GET with what those routers ask of a worker. With a second
argument, STEP_MS, it takes steps of so many milliseconds; a POST for a stream has `max_tokens`
events, one each step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

COMPLETION = {
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "smollm2",
    "choices": [{"index": 0, "text": " ok", "finish_reason": "length", "logprobs": None}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14},
    "kv_transfer_params": {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 5600, "tp_size": 1,
    },
}  # fmt: skip
INFO = {"data": [{"id": "smollm2", "object": "model"}], "model_path": "smollm2", "dp_size": 1}


def response(body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


CHUNK = {
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "smollm2",
    "choices": [{"index": 0, "text": " ok", "logprobs": None, "finish_reason": None,
                 "stop_reason": None}],
}  # fmt: skip
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def chunked(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


EVENT = chunked(b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n")
TO_POST, TO_GET = response(COMPLETION), response(INFO)


class Steps:
    """Streams that get an event each step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[asyncio.Transport, int] = {}
        """Events to come."""

    def add(self, transport: asyncio.Transport, events: int) -> None:
        transport.write(STREAM_HEAD)
        if not self._left:
            loop = asyncio.get_running_loop()
            self._next = loop.time() + self._step_s
            loop.call_at(self._next, self._step)
        self._left[transport] = events

    def _step(self) -> None:
        for transport, left in list(self._left.items()):
            transport.write(EVENT if left > 1 else EVENT + STREAM_END)
            self._left[transport] = left - 1
            if left <= 1:
                del self._left[transport]
        if self._left:
            self._next += self._step_s
            asyncio.get_running_loop().call_at(self._next, self._step)


class Server(asyncio.Protocol):
    """One connection."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            _, found, length = head.partition(b"content-length:")
            size = int(length.split(b"\r\n")[0]) if found else 0
            if len(self._received) < end + 4 + size:
                return
            body = self._received[end + 4 : end + 4 + size]
            self._received = self._received[end + 4 + size :]
            if b'"stream":true' in body or b'"stream": true' in body:
                self._steps.add(self._transport, json.loads(body)["max_tokens"])
            else:
                self._transport.write(TO_POST if head.startswith(b"post") else TO_GET)


async def main(port: int, step_s: float) -> None:
    steps = Steps(step_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(steps), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    step_ms = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    uvloop.run(main(int(sys.argv[1]), step_ms / 1e3))
