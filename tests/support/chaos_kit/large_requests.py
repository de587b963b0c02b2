"""Requests that are as large as a server takes, made to cost it as much as they can.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MIB = 1 << 20
LARGEST = 4 * MIB - 1024
"""Nearly the largest body that is taken."""
HARD = [1e300] * 100_000
"""A decoder of JSON would take a second for them."""
TEXT = "It was the best of times, it was the worst of times. "


@dataclass(frozen=True)
class LargeRequest:
    path: str
    asked: dict[str, Any] | bytes
    status: int
    """What it is to be answered with."""

    @cached_property
    def body(self) -> bytes:
        """Written at the first use: writing all of them takes a second."""
        if isinstance(self.asked, bytes):
            return self.asked
        return json.dumps(self.asked, ensure_ascii=False, separators=(",", ":")).encode()


def english(size: int) -> str:
    return (TEXT * (size // len(TEXT) + 1))[:size]


def chat(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a"}] * count


def large_requests(model: str) -> dict[str, LargeRequest]:
    """Those that are refused before anything is tokenised."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    part = {"type": "text", "text": ""}
    transfer = {"do_remote_prefill": True, "x": [[]] * MIB}
    call = {"name": "f", "arguments": json.dumps(HARD)}
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": call}],
    }
    completions: dict[str, tuple[dict[str, Any], int]] = {
        "token ids": ({"prompt": [1] * (2 * MIB - 1024)}, 413),
        "texts": ({"prompt": ["a"] * (MIB - 1024)}, 413),
        "lists in a field that nobody reads": ({"prompt": "a", "echo": [[]] * MIB}, 413),
        "a schema": ({"prompt": "a", "structured_outputs": {"json": _schema(500_000)}}, 413),
        "stop strings": ({"prompt": "a", "stop": ["x"] * 900_000}, 413),
        "fewer stop strings": ({"prompt": "a", "stop": ["x"] * 100_000}, 400),
        "one stop string": ({"prompt": "a", "stop": english(LARGEST)}, 400),
        "biases": ({"prompt": "a", "logit_bias": dict.fromkeys(range(250_000), 1)}, 413),
        "numbers that are hard to convert": ({"prompt": "a", "echo": HARD}, 413),
        "biases that are hard to convert": (
            {"prompt": "a", "logit_bias": dict.fromkeys(range(30_000), 1e300)},
            413,
        ),
        "hard numbers of a hand-off": (
            {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True, "x": HARD[:16_000]}},
            413,
        ),
        "parameters of a hand-off": ({"prompt": "a", "kv_transfer_params": transfer}, 413),
    }
    chats: dict[str, tuple[dict[str, Any], int]] = {
        "messages": ({"messages": chat(100_000)}, 413),
        "hard numbers of a call": ({"messages": [called, *chat(1)]}, 400),
        "fewer messages": ({"messages": chat(5_000)}, 400),
        "parts": ({"messages": [{"role": "user", "content": [part] * 90_000}]}, 413),
        "tools": ({"messages": chat(1), "tools": [tool] * 40_000}, 413),
    }
    deep = b'{"model":"%b","prompt":"a","echo":%b' % (model.encode(), b"[" * 100_000)
    return {
        **{kind: _request("/v1/completions", model, *asked) for kind, asked in completions.items()},
        **{kind: _request("/v1/chat/completions", model, *asked) for kind, asked in chats.items()},
        "inputs": _request("/v1/embeddings", model, {"input": [[1]] * 800_000}, 413),
        "deep lists": LargeRequest("/v1/completions", deep, 400),
    }


def large_texts(model: str) -> dict[str, LargeRequest]:
    """Those that are refused for their length in tokens, as far as that has to be counted."""
    texts = {
        "English": english(LARGEST),
        "digits": "1234567890" * (LARGEST // 10),
        "one letter": "a" * LARGEST,
        "spaces": " " * LARGEST,
        "unicode": "語é" * (LARGEST // 5),
        "English of the context's bytes": english(64 << 10),
        "digits of the context's bytes": "1234567890" * (6 << 10),
        "blanks that nearly fit": "\n" * (600 << 10),
    }
    made = {
        kind: _request("/v1/completions", model, {"prompt": text}, 400)
        for kind, text in texts.items()
    }
    messages = [{"role": "user", "content": english(LARGEST)}]
    made["a message"] = _request("/v1/chat/completions", model, {"messages": messages}, 400)
    many = {"messages": chat(4_000)}
    made["as many messages as there may be"] = _request("/v1/chat/completions", model, many, 400)
    prompts = {"prompt": [english(60 << 10)] * 60}
    made["long prompts"] = _request("/v1/completions", model, prompts, 400)
    schema = {"prompt": "a", "structured_outputs": {"json": _schema(9_000)}, "max_tokens": 1}
    made["a schema of the largest size"] = _request("/v1/completions", model, schema, 400)
    return made


def _schema(count: int) -> dict[str, Any]:
    return {"enum": list(range(count))}


def _request(path: str, model: str, asked: dict[str, Any], status: int) -> LargeRequest:
    return LargeRequest(path, {"model": model} | asked, status)
