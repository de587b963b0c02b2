"""A real, small pod program for the tests of the laptop runtime; options say how it misbehaves.

Serves /health, /live, /metrics and a streaming /v1/chat/completions on the port of its environment.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

ANSWER = ["The capital", " of France", " is Paris."]
METRICS = """\
# TYPE diptych:kv_transfer_blocks_received_total counter
diptych:kv_transfer_blocks_received_total{engine="decode-0"} 3
# TYPE diptych:kv_transfer_bytes_received_total counter
diptych:kv_transfer_bytes_received_total{engine="decode-0"} 2.2118e+06
# TYPE diptych:kv_transfer_receive_seconds_total counter
diptych:kv_transfer_receive_seconds_total{engine="decode-0"} 0.004
# TYPE diptych:kv_transfer_loads_total counter
diptych:kv_transfer_loads_total{engine="decode-0",outcome="completed"} 2
diptych:kv_transfer_loads_total{engine="decode-0",outcome="failed"} 1
# TYPE diptych:kv_transfer_transport_info gauge
diptych:kv_transfer_transport_info{engine="decode-0",transport="tcp"} 1
"""


class Handler(http.server.BaseHTTPRequestHandler):
    sick = False
    has_answered = False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if Handler.sick else 200, b"")
        elif self.path == "/control":
            path = os.environ.get("DIPTYCH_PAGE_CONTROL")
            self.answer(200, Path(path).read_bytes() if path else b"null")
        elif self.path == "/live":
            self.answer(200, b"")
        elif self.path == "/metrics":
            self.answer(200, METRICS.encode() if Handler.has_answered else b"")
        elif self.path == "/v1/models":
            self.answer(200, b'{"data": [{"id": "small"}]}')
        else:
            self.answer(404, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][-1]["content"]
        images = 0
        if isinstance(said, list):
            images, said = len(said) - 1, said[-1]["text"]
        if said == "refuse":
            self.answer(400, b'{"error": {"message": "too long"}}')
            return
        self.send_response(200)
        self.end_headers()
        count = [f"{len(body['messages'])} messages" + (f", {images} images" if images else "")]
        for text in count if said == "count" else ANSWER:
            self.event(json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}))
        if said == "endless":
            self.connection.recv(1)  # until the client leaves
        if said in ("break", "endless"):
            return
        usage = {"completion_tokens": 7, "prompt_tokens": len(body["messages"])}
        self.event(json.dumps({"choices": [], "usage": usage}))
        Handler.has_answered = True
        self.event("[DONE]")

    def event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def fall_sick(*_: object) -> None:
    Handler.sick = not Handler.sick


def hesitate(file: Path, *_: object) -> None:
    def end(*_: object) -> None:
        file.touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--crash", action="store_true", help="end at once, in words")
    parser.add_argument("--crash-once", type=Path, help="end at once if this file is not there")
    parser.add_argument("--child", action="store_true", help="have a child that never ends")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--slow-to-end", type=Path, help="end at the second SIGTERM, and touch it")
    parser.add_argument("--admin-host", help="as routers take it; there is no admin port")
    options = parser.parse_args()
    if options.crash:
        sys.exit("error: no such model\n1 thread was busy")
    if options.crash_once is not None and not options.crash_once.exists():
        options.crash_once.touch()
        sys.exit("came too early")
    if options.child:
        subprocess.Popen([sys.executable, "-c", "import signal\nwhile True: signal.pause()"])
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.slow_to_end is not None:
        signal.signal(signal.SIGTERM, partial(hesitate, options.slow_to_end))
    signal.signal(signal.SIGUSR1, fall_sick)
    address = (os.environ["DIPTYCH_BIND_HOST"], int(os.environ["DIPTYCH_HTTP_PORT"]))
    server = http.server.ThreadingHTTPServer(address, Handler)
    print(f"pod {os.environ['POD_NAME']} listens at {address}")
    server.serve_forever()


if __name__ == "__main__":
    main()
