"""`python -m diptych_router` as an operator and a cluster see it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from engine_kit.executor import PACED
from free_ports import free_port
from gateway_kit import destinations, exchange, headers, picker
from service_kit import LIGHT, Core, cores, engine_config
from waits import PATIENCE_S

from diptych_protocol import RouterConfig
from diptych_protocol.admin import RouterReport

LINGER_S = 6.0
CERTIFICATES = Path(__file__).parents[1] / "support" / "certificates"
STREAMED = 150
"""Tokens of a stream that is still under way when the router has lingered."""
QUESTION = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@dataclass
class Router:
    process: subprocess.Popen[bytes]
    url: str
    admin: str
    http: httpx.Client
    picker_port: int = 0

    def health(self) -> httpx.Response | None:
        """None while nobody listens."""
        with contextlib.suppress(httpx.TransportError):
            return self.http.get(f"{self.url}/health")
        return None

    def is_ready(self) -> bool:
        answer = self.health()
        return answer is not None and answer.status_code == 200


@pytest.fixture(scope="module")
def engines(keys_dir: Path) -> Iterator[list[Core]]:
    """So slow that a stream lasts."""
    names = "prefill-0", "decode-0"
    configs = [engine_config(name, LIGHT, executor_class=PACED) for name in names]
    with cores(keys_dir, *configs) as started:
        yield started


@pytest.fixture
def router(smollm2: str, keys_dir: Path, engines: list[Core], tmp_path: Path) -> Iterator[Router]:
    (keys_dir / "admin-token").write_text("sesame")
    config = RouterConfig(
        model=smollm2, served_name="smollm2", drain_seconds=PATIENCE_S, unknown_fields="refuse"
    )
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(config))
    port, admin_port, picker_port = free_port(), free_port(), free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "diptych_router", "--config", tmp_path / "router.json"),
            *("--port", str(port), "--admin-port", str(admin_port), "--keys", keys_dir),
            *("--serving", tmp_path / "serving.json", "--linger-seconds", str(LINGER_S)),
            *("--prefill", engines[0].address, "--decode", engines[1].address),
            *("--picker-port", str(picker_port), "--advertise-host", "fd00::1"),
        ]
    )
    try:
        with httpx.Client(timeout=PATIENCE_S) as http:
            api, admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
            yield Router(process, api, admin, http, picker_port)
    finally:
        process.kill()
        process.wait()


async def test_its_life(router: Router, eventually: Any) -> None:
    await eventually(router.is_ready)
    assert router.http.get(f"{router.url}/live").status_code == 200

    # The operator's view, for holders of the token only.
    state = f"{router.admin}/admin/state"
    assert router.http.get(state).status_code == 401
    answer = router.http.get(state, headers={"authorization": "Bearer sesame"})
    report = msgspec.json.decode(answer.content, type=RouterReport)
    assert report.ready
    assert [engine.engine_id for engine in report.engines] == ["prefill-0", "decode-0"]
    assert [canary.ok for canary in report.canaries] == [True]

    # A gateway's view; the picker is told ten times a second.
    async with picker(router.picker_port) as channel:

        async def picks() -> Any:
            [answer] = await exchange(channel, headers())
            return answer if answer.HasField("request_headers") else None

        answer = await eventually(picks)
    picked = f"[fd00::1]:{router.url.rpartition(':')[2]}"
    assert destinations(answer) == (picked, picked)

    # It does what its configuration says.
    answer = router.http.post(f"{router.url}/v1/completions", json={**QUESTION, "tempratur": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tempratur")

    # It is told to end while it answers.
    async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S) as client:
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(client, started))
        await asyncio.wait_for(started.wait(), PATIENCE_S)
        router.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        await eventually(lambda: not router.is_ready())
        answer = await client.post("/v1/completions", json={**QUESTION, "max_tokens": 2})
        assert router.health() is not None, "otherwise this shows nothing"
        assert answer.status_code == 200, "whoever has not heard of it yet is served"
        assert answer.headers["connection"] == "close"
        await eventually(lambda: router.health() is None)
        assert time.monotonic() - begin >= LINGER_S
        assert await stream == STREAMED, "an answer under way is finished"
    assert await asyncio.to_thread(router.process.wait, PATIENCE_S) == 0


async def read_stream(client: httpx.AsyncClient, started: asyncio.Event) -> int:
    """How many tokens came before the stream's proper end."""
    tokens, ended = 0, False
    body = {
        **QUESTION,
        "max_tokens": STREAMED,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            started.set()
            ended = ended or line == "data: [DONE]"
            if line.startswith("data: {"):
                usage = msgspec.json.decode(line.removeprefix("data: ")).get("usage") or {}
                tokens = usage.get("completion_tokens", tokens)
    assert ended
    return tokens


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hold_seconds": -1}, "hold_seconds"),
        ({"verify": "perhaps"}, "verify"),
        ({"policy": "No Name"}, "$.policy"),
    ],
)
def test_a_configuration_that_cannot_work_is_named(
    smollm2: str, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    (tmp_path / "router.json").write_bytes(msgspec.json.encode({"model": smollm2, **settings}))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "diptych_router", "--config", tmp_path / "router.json"),
            *("--prefill", "a:1", "--decode", "b:1", "--port", str(free_port())),
        ],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr.decode()


async def test_a_policy_that_there_is_not_keeps_a_router_from_getting_ready_and_is_reported(
    smollm2: str, keys_dir: Path, engines: list[Core], tmp_path: Path, eventually: Any
) -> None:
    """Said on the command line, which wins over the file."""
    (keys_dir / "admin-token").write_text("sesame")
    config = RouterConfig(model=smollm2, served_name="smollm2", policy="round_robin")
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(config))
    port, admin_port = free_port(), free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "diptych_router", "--config", tmp_path / "router.json"),
            *("--port", str(port), "--admin-port", str(admin_port), "--keys", keys_dir),
            *("--prefill", engines[0].address, "--decode", engines[1].address),
            *("--policy", "fulest_first"),
        ]
    )
    words = "no policy fulest_first, only least_loaded, prefix_aware, round_robin"
    try:
        with httpx.Client(timeout=PATIENCE_S) as http:
            router = Router(
                process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", http
            )

            def report() -> RouterReport:
                answer = http.get(
                    f"{router.admin}/admin/state", headers={"authorization": "Bearer sesame"}
                )
                return msgspec.json.decode(answer.content, type=RouterReport)

            await eventually(lambda: router.health() is not None)
            await eventually(lambda: any(canary.ok for canary in report().canaries))
            assert not report().ready
            (refused,) = report().refused_settings
            assert refused.setting == "policy"
            assert words in refused.why
            health = router.health()
            assert health is not None
            assert health.status_code == 503
            answer = http.post(f"{router.url}/v1/completions", json={**QUESTION, "max_tokens": 2})
            assert answer.status_code == 503
            assert words in answer.text
    finally:
        process.kill()
        process.wait()


def chat(client: httpx.Client, key: str) -> int:
    """The status of a request with a key; there is no engine that could answer it."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "?"}], "n": 0}
    return client.post(
        "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    ).status_code


async def test_keys_and_certificate_are_followed_without_a_restart(
    smollm2: str, keys_dir: Path, tmp_path: Path, eventually: Any
) -> None:
    (keys_dir / "admin-token").write_text("sesame")
    keys, tls = tmp_path / "keys", tmp_path / "tls"
    keys.mkdir()
    (keys / "alice").write_text("old")
    shutil.copytree(CERTIFICATES / "first", tls)
    config = RouterConfig(model=smollm2, served_name="smollm2", hold_seconds=0)
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(config))
    port, admin_port = free_port(), free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "diptych_router", "--config", tmp_path / "router.json"),
            *("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1", "--port", str(port)),
            *("--api-keys", keys, "--tls", tls),
            *("--keys", keys_dir, "--admin-port", str(admin_port)),
        ]
    )

    def client(certificate: str) -> httpx.Client:
        trust = ssl.create_default_context(cafile=str(CERTIFICATES / certificate / "tls.crt"))
        return httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=PATIENCE_S)

    def reported() -> RouterReport:
        url = f"http://127.0.0.1:{admin_port}/admin/state"
        answer = httpx.get(url, headers={"authorization": "Bearer sesame"}, timeout=PATIENCE_S)
        return msgspec.json.decode(answer.content, type=RouterReport)

    def answers(certificate: str) -> bool:
        with contextlib.suppress(httpx.TransportError), client(certificate) as http:
            return http.get("/live").status_code == 200
        return False

    try:
        await eventually(lambda: answers("first"))
        with client("first") as http:
            assert [chat(http, key) for key in ("wrong", "old", "new")] == [401, 400, 401]
            (keys / "alice-2").write_text("new")
            await eventually(lambda: chat(http, "new") == 400)
            assert chat(http, "old") == 400, "both are good"
            (keys / "alice").unlink()
            await eventually(lambda: chat(http, "old") == 401)
            assert chat(http, "new") == 400
            shutil.copytree(CERTIFICATES / "second", tls, dirs_exist_ok=True)
            await eventually(lambda: answers("second"))
            assert not answers("first")
            assert chat(http, "new") == 400, "connections that are open stay"
            assert not reported().admits_nobody
            assert not reported().left_out_keys
            (keys / "alice-2").write_text("two words")
            await eventually(lambda: reported().admits_nobody)
            assert "'alice-2' is left out" in reported().left_out_keys[0]
            assert not reported().refused_certificate
            shutil.copy(CERTIFICATES / "first" / "tls.key", tls)
            await eventually(lambda: "mismatch" in reported().refused_certificate)
            assert answers("second")
            shutil.copy(CERTIFICATES / "second" / "tls.key", tls)
            await eventually(lambda: not reported().refused_certificate)
            assert not reported().expired_certificate
            shutil.copytree(CERTIFICATES / "expired", tls, dirs_exist_ok=True)
            await eventually(lambda: reported().expired_certificate.startswith("2020-02-01"))
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
