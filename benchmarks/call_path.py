"""The path of a request through a router's process, counted: `python -m benchmarks.call_path`.

It asks a router for a chat of four streamed tokens, in front of engines that compute nothing, and
counts calls, functions, files, and how often a call is of another file than the one before. Counts
are nearly the same on every machine, unlike times. Only how often the event loop wakes up for the
engines' messages is up to the machine, so the request that cost the least is the one that counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.scenarios.router import engines
from benchmarks.servers import MODEL, free_port

from diptych_frontend.app import build_app
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.openai.exchange import PARTS_KEY
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import RouterConfig
from diptych_router.engines.discovery import parse_targets
from diptych_router.engines.engine_table import Role
from diptych_router.requests.pool_client import PoolClient

REQUESTS = 20
STEP_MS = 20
TOKENS = 4
START_TIMEOUT_S = 60.0
PACKAGES = ("diptych_router", "diptych_frontend", "diptych_protocol")
ROOT = Path(__file__).parents[1]
COMPLETION = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 2}
CHAT = {
    "model": "smollm2", "stream": True, "max_tokens": TOKENS,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}  # fmt: skip


@dataclass(slots=True)
class CallPath:
    """The calls of one request."""

    total: int = 0
    """Calls of Python and built-in functions, whoever's."""
    own: Counter[CodeType] = field(default_factory=Counter)
    """Calls of functions of Diptych's own packages; each time that a coroutine or generator goes on
    is a call."""
    changes: int = 0
    """How many of those are of another file than the one before."""
    _last: str = ""

    def saw(self, frame: FrameType, event: str, argument: object) -> None:
        """For `sys.setprofile`."""
        if event not in ("call", "c_call"):
            return
        self.total += 1
        code = frame.f_code
        if event == "call" and any(package in code.co_filename for package in PACKAGES):
            self.own[code] += 1
            self.changes += code.co_filename != self._last
            self._last = code.co_filename

    @property
    def calls(self) -> int:
        """Calls of own functions."""
        return self.own.total()

    @property
    def files(self) -> Counter[str]:
        """Calls by the files of the functions."""
        files = Counter[str]()
        for code, calls in self.own.items():
            files[str(Path(code.co_filename).relative_to(ROOT))] += calls
        return files

    def __str__(self) -> str:
        return (
            f"{self.calls} calls of {len(self.own)} functions in {len(self.files)} files, "
            f"{self.changes} changes of file; {self.total} calls with those of libraries"
        )


async def path_of(request: Coroutine[Any, Any, None]) -> CallPath:
    """What is called until a request is answered."""
    path = CallPath()
    sys.setprofile(path.saw)
    try:
        await request
    finally:
        sys.setprofile(None)
    return path


@contextlib.asynccontextmanager
async def routing(model: str, step_ms: int | None = None) -> AsyncIterator[Any]:
    """A router's app, in front of engines that answer at once. With step_ms, its decode engine
    makes steps of one token."""
    source = resolve_model(model, weights=False)
    renderer = TextRenderer(source)
    limit = source.config.max_position_embeddings
    inputs = InputProcessor(renderer, max_model_len=limit, vocab_size=source.config.vocab_size)
    ports: dict[Role, int] = {"prefill": free_port(), "decode": free_port()}
    with engines("benchmarks.instant_core", list(ports.values()), step_ms):
        client = PoolClient(
            RouterConfig(model=model, served_name="smollm2", verify="Off"),
            inputs,
            OutputProcessor(renderer.tokenizer),
            targets={role: parse_targets(f"127.0.0.1:{port}") for role, port in ports.items()},
            read_keys=None,
        )
        client.start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while client.why_not_ready():
                    await asyncio.sleep(0.01)
            yield build_app(client)
        finally:
            client.shutdown()


@dataclass
class Parts:
    """As a server's `PartWriter`."""

    answer: bytearray

    def may_write(self) -> bool:
        return True

    def write(self, part: bytes) -> None:
        self.answer.extend(part)

    def watch(self, on_lost: Callable[[], object] | None) -> None:
        """Its client stays."""


async def ask(app: Any, question: dict[str, Any]) -> None:
    """Ask for a chat, or for a completion if there is a prompt, and read all of the answer."""
    body = json.dumps(question).encode()
    path = "/v1/completions" if "prompt" in question else "/v1/chat/completions"
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": path, "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"accept", b"*/*")],
    }  # fmt: skip
    coming = [{"type": "http.request", "body": body, "more_body": False}]
    answer = bytearray()
    scope[PARTS_KEY] = Parts(answer)

    async def receive() -> dict[str, Any]:
        if not coming:
            await asyncio.Event().wait()
        return coming.pop()

    async def send(message: dict[str, Any]) -> None:
        answer.extend(message.get("body", b""))

    await app(scope, receive, send)
    if b'"finish_reason":"length"' not in answer:
        raise RuntimeError(f"the router answers {answer.decode()}")


async def shortest(app: Any, question: dict[str, Any], requests: int = REQUESTS) -> CallPath:
    """The path of the one of some equal requests that took the fewest calls."""
    await ask(app, question)
    paths = [await path_of(ask(app, question)) for _ in range(requests)]
    return min(paths, key=lambda path: path.total)


async def main(model: str, functions: bool) -> None:
    """Print the counts of a chat, and where the calls are."""
    gc.disable()
    async with routing(model, STEP_MS) as app:
        path = await shortest(app, CHAT)
    print(f"a chat of {TOKENS} streamed tokens: {path}\n")
    for name, calls in path.files.most_common():
        print(f"{calls:5} {name}")
        if functions:
            of_file = [(n, code) for code, n in path.own.items() if code.co_filename.endswith(name)]
            for n, code in sorted(of_file, key=lambda pair: -pair[0]):
                print(f"      {n:5} {code.co_qualname}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.call_path", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="whose tokenizer and template to use")
    parser.add_argument("--functions", action="store_true", help="also calls of each function")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.functions))
