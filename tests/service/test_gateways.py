"""A real Envoy, which knows no engine and no router, sends requests to where a router's endpoint
picker says: bodies in all modes, told by header or by metadata."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_kit.environment import needs_client
from free_ports import free_port
from gateway_kit import BUFFERED, DESTINATION, DUPLEX, STREAMED, envoy
from model_kit.questions import COUNTING
from service_kit import Core, cores, engine_config, router_command
from waits import PATIENCE_S, wait_until

from diptych_protocol import RouterConfig

HEADER = {"destination": "header"}
METADATA = {"destination": "metadata"}
WAYS: dict[str, dict[str, Any]] = {
    "in full duplex": HEADER | {"mode": DUPLEX},
    "buffered": METADATA | {"mode": BUFFERED},
    "streamed": HEADER | {"mode": STREAMED},
}
PROMPT = {"model": "first", "prompt": COUNTING.words, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def engines(smollm2: str, keys_dir: Path) -> Iterator[list[Core]]:
    configs = [engine_config(name, smollm2) for name in ("prefill-0", "decode-0")]
    with cores(keys_dir, *configs) as started:
        yield started


@pytest.fixture
def routers(
    smollm2: str, keys_dir: Path, engines: list[Core], tmp_path: Path
) -> Iterator[list[tuple[subprocess.Popen[bytes], str, int]]]:
    """Two, by which model they serve: their processes, where their API is, their pickers' ports."""
    started = []
    for name in ("first", "second"):
        port, picker_port = free_port(), free_port()
        (tmp_path / name).mkdir()
        arguments = (
            *("--port", port, "--picker-port", picker_port, "--keys", keys_dir),
            *("--prefill", engines[0].address, "--decode", engines[1].address),
        )
        config = RouterConfig(model=smollm2, served_name=name, drain_seconds=PATIENCE_S)
        process = subprocess.Popen(router_command(tmp_path / name, config, *arguments))
        started.append((process, f"127.0.0.1:{port}", picker_port))
    try:
        for _, address, _ in started:
            wait_until(lambda at=address: is_ready(at), "the router is ready")  # type: ignore[misc]
        yield started
    finally:
        for process, _, _ in started:
            process.kill()
            process.wait()


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


def served_by(http: httpx.Client, port: int, headers: dict[str, str] | None = None) -> str:
    answer = http.get(f"http://127.0.0.1:{port}/v1/models", headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["data"][0]["id"])


@needs_client("envoy")
def test_a_gateway_reaches_the_engines_through_the_router_that_is_picked(
    routers: list[tuple[subprocess.Popen[bytes], str, int]], tmp_path: Path
) -> None:
    (process, own, pickers), (_, other, _) = routers
    ports = {name: free_port() for name in (*WAYS, "other", "both", "none")}
    listeners = {ports[name]: about for name, about in WAYS.items()}
    for name, subset in (("other", [other]), ("both", [other, own]), ("none", [])):
        listeners[ports[name]] = METADATA | {"mode": DUPLEX, "subset": subset}
    with envoy(tmp_path, pickers, listeners), httpx.Client(timeout=PATIENCE_S) as http:
        for name in WAYS:
            url = f"http://127.0.0.1:{ports[name]}/v1/completions"
            answer = http.post(url, json=PROMPT)
            assert answer.json()["choices"][0]["text"].startswith(COUNTING.answer), name
            # In many pieces; the padding is JSON too.
            padded = json.dumps(PROMPT).encode() + b" " * 500_000
            json_type = {"content-type": "application/json"}
            answer = http.post(url, content=padded, headers=json_type)
            assert answer.json()["choices"][0]["text"].startswith(COUNTING.answer), name
            forged = {DESTINATION: "127.0.0.1:1"}
            assert served_by(http, ports[name], forged) == "first"
        assert served_by(http, ports["other"]) == "second"
        assert served_by(http, ports["both"]) == "first"
        answer = http.get(f"http://127.0.0.1:{ports['none']}/v1/models")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "overloaded"

        # The router, and with it the picker, is told to end while it answers.
        asked = PROMPT | {"stream": True, "max_tokens": 60, "ignore_eos": True}
        url = f"http://127.0.0.1:{ports['in full duplex']}/v1/completions"
        with http.stream("POST", url, json=asked) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert first.startswith("data: ")
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        assert len([line for line in rest if line.startswith("data: {")]) > 10
        wait_until(lambda: process.poll() is not None, "the router has ended")
        assert process.returncode == 0
