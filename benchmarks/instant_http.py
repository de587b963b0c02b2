"""An OpenAI server that computes nothing, for other projects' routers.

`python -m benchmarks.instant_http PORT` answers every POST with the same completion, which also
says where KV would be fetched, and every GET with what those routers ask of a worker.
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


TO_POST, TO_GET = response(COMPLETION), response(INFO)


class Server(asyncio.Protocol):
    """One connection."""

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
            self._received = self._received[end + 4 + size :]
            self._transport.write(TO_POST if head.startswith(b"post") else TO_GET)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
