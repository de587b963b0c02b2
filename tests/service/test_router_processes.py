"""A router of two processes that share a port, as a cluster sees it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from engine_kit.core import EXACT
from free_ports import free_port
from service_kit import cores, engine_config, router_command
from waits import PATIENCE_S, Deadline, wait_until

from diptych_protocol import RouterConfig
from diptych_protocol.admin import Explanation, RequestList, RouterReport
from diptych_router.record.records import MOST_REQUESTS

CONNECTIONS = 32
"""Dealt out at random: that one of two processes gets none of them has a chance of 2 in 2 ** 32."""
TOKENS = 60
QUESTION = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@dataclass
class Router:
    parent: psutil.Popen
    url: str
    admin: str

    def listeners(self) -> dict[int, psutil.Process]:
        """The processes that take connections at the port, by their ids."""
        port = int(self.url.rpartition(":")[2])
        found = {}
        for child in self.parent.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in child.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        found[child.pid] = child
        return found

    def metric(self, name: str, labels: str = "") -> float:
        """The sum of its samples that have these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        lines = re.findall(rf"^diptych:{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in lines if labels in found)

    def state(self) -> RouterReport:
        answer = httpx.get(
            f"{self.admin}/admin/state", headers={"authorization": "Bearer sesame"},
            timeout=PATIENCE_S,
        )  # fmt: skip
        return msgspec.json.decode(answer.content, type=RouterReport)


@pytest.fixture(scope="module")
def addresses(smollm2: str, keys_dir: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a prefill and a decode engine, so slow that a stream lasts."""
    names = "prefill-0", "decode-0"
    configs = [engine_config(name, smollm2, weight_packing=EXACT) for name in names]
    with cores(keys_dir, *configs) as (prefill, decode):
        yield prefill.address, decode.address


@pytest.fixture
def router(
    smollm2: str, keys_dir: Path, tmp_path: Path, addresses: tuple[str, str]
) -> Iterator[Router]:
    """Both of its processes take connections, and have found the engines."""
    (keys_dir / "admin-token").write_text("sesame")
    config = RouterConfig(
        model=smollm2, served_name="smollm2", processes=2, drain_seconds=PATIENCE_S, ui=True
    )
    port, admin = free_port(), free_port()
    arguments = (
        *("--port", port, "--admin-port", admin, "--keys", keys_dir),
        *("--prefill", addresses[0], "--decode", addresses[1]),
    )
    parent = psutil.Popen(router_command(tmp_path, config, *arguments))
    router = Router(parent, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}")
    everybody: list[psutil.Process] = [parent]
    try:
        wait_until(lambda: len(router.listeners()) == 2, "two processes listen")
        everybody += parent.children()
        wait_until(
            lambda: [e.usable for e in router.state().engines] == [True, True],
            "both processes use both engines",
        )
        yield router
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            everybody += parent.children()
        for process in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        parent.wait(PATIENCE_S)


def complete(router: Router, tokens: int = 2) -> int:
    body = {**QUESTION, "max_tokens": tokens}
    return httpx.post(f"{router.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code


async def test_both_processes_get_connections_and_their_counts_add_up(router: Router) -> None:
    port = int(router.url.rpartition(":")[2])
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            client = httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S)
            await stack.enter_async_context(client)
            assert (await client.get("/live")).status_code == 200
        for process in router.listeners().values():
            established = [
                connection
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
            ]
            assert 0 < len(established) < CONNECTIONS
    # Whichever process is asked; one may tell for a second what it told before.
    wait_until(lambda: router.metric("http_requests_total", 'route="/live"') == CONNECTIONS)
    assert router.metric("engine_steps_total") > 0

    state = router.state()
    assert (state.ready, state.open_requests) == (True, 0)
    assert [engine.engine_id for engine in state.engines] == ["prefill-0", "decode-0"]
    assert [canary.ok for canary in state.canaries] == [True]


def test_the_page_of_any_process_shows_the_whole_router(router: Router) -> None:
    names = []
    for _ in range(CONNECTIONS):
        answer = httpx.post(
            f"{router.url}/v1/completions", json={**QUESTION, "max_tokens": 1}, timeout=PATIENCE_S
        )
        names.append(answer.headers["x-request-id"])
    for name in names:
        asked = httpx.get(f"{router.url}/ui/api/answers/{name}", timeout=PATIENCE_S)
        (known,) = asked.json()["requests"]
        assert known["request_id"] == name
    body = {**QUESTION, "max_tokens": 10 * TOKENS, "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS // 2):
            client = stack.enter_context(httpx.Client(base_url=router.url, timeout=PATIENCE_S))
            stack.enter_context(client.stream("POST", "/v1/completions", json=body))
        engines, most = watched(router, lambda open_requests: open_requests == CONNECTIONS // 2)
        assert engines == {"prefill-0": "ok", "decode-0": "ok"}
        assert most == CONNECTIONS // 2


def watched(router: Router, enough: Callable[[int], bool]) -> tuple[dict[str, str], int]:
    """The states of all engines, and the open requests, as soon as there are enough of them."""
    engines: dict[str, str] = {}
    deadline = Deadline("a page is told of all open requests")
    with httpx.stream("GET", f"{router.url}/ui/api/events", timeout=PATIENCE_S) as events:
        for line in events.iter_lines():
            deadline.check()
            if not line.startswith("data: "):
                continue
            news = msgspec.json.decode(line.removeprefix("data: "))
            engines |= {engine["name"]: engine["state"] for engine in news["engines"]}
            if enough(news["open_requests"]):
                return engines, int(news["open_requests"])
    raise AssertionError("the stream ended")


def test_a_request_is_explained_whichever_process_served_it(router: Router) -> None:
    def ask(path: str) -> httpx.Response:
        token = {"authorization": "Bearer sesame"}
        return httpx.get(f"{router.admin}{path}", headers=token, timeout=PATIENCE_S)

    names = [f"request-{number}" for number in range(CONNECTIONS)]
    for name in names:  # a connection each
        answer = httpx.post(
            f"{router.url}/v1/completions", json={**QUESTION, "max_tokens": 2},
            headers={"x-request-id": name}, timeout=PATIENCE_S,
        )  # fmt: skip
        assert answer.status_code == 200
    listed = msgspec.json.decode(ask("/admin/requests?limit=30").content, type=RequestList)
    assert [line.request_id for line in listed.requests] == names[:1:-1]
    assert (listed.num_remembered, listed.most_remembered) == (CONNECTIONS, 2 * MOST_REQUESTS)
    for name in names:
        known = msgspec.json.decode(ask(f"/admin/requests/{name}/why").content, type=Explanation)
        (attempt,) = known.requests[0].attempts
        assert (attempt.prefill, attempt.decode) == ("prefill-0", "decode-0")
    assert ask("/admin/requests/stranger/why").status_code == 404
    wait_until(
        lambda: router.metric("first_token_real_over_predicted_count") == CONNECTIONS,
        "the processes' histograms add up",
    )


def test_a_process_that_is_killed_is_started_again_while_the_other_answers(
    router: Router,
) -> None:
    assert [complete(router) for _ in range(4)] == [200] * 4
    wait_until(lambda: router.metric("generation_tokens_total") == 8)
    before = router.listeners()
    pid, killed = next(iter(before.items()))
    killed.kill()
    wait_until(lambda: not killed.is_running())
    [left] = router.listeners()
    assert left != pid
    assert [complete(router) for _ in range(4)] == [200] * 4, "the port answers"
    wait_until(lambda: len(router.listeners()) == 2, "it is started again")
    assert pid not in router.listeners()
    assert router.metric("router_process_restarts_total") == 1
    assert [complete(router) for _ in range(4)] == [200] * 4
    wait_until(lambda: router.metric("generation_tokens_total") == 24, "no count is lost")


async def test_all_processes_finish_their_streams_when_the_router_is_told_to_end(
    router: Router,
) -> None:
    children = router.parent.children()
    async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S) as client:
        begun: list[asyncio.Event] = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(read_stream(client, event)) for event in begun]
        for event in begun:
            await asyncio.wait_for(event.wait(), PATIENCE_S)
        router.parent.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*streams) == [TOKENS] * 4
    assert await asyncio.to_thread(router.parent.wait, PATIENCE_S) == 0
    assert not any(child.is_running() for child in children)


async def read_stream(client: httpx.AsyncClient, begun: asyncio.Event) -> int:
    """How many tokens came before the stream's proper end."""
    tokens, ended = 0, False
    options = {"include_usage": True}
    body = {**QUESTION, "max_tokens": TOKENS, "stream": True, "stream_options": options}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            begun.set()
            ended = ended or line == "data: [DONE]"
            if line.startswith("data: {"):
                usage = msgspec.json.decode(line.removeprefix("data: ")).get("usage") or {}
                tokens = usage.get("completion_tokens", tokens)
    assert ended
    return tokens


def test_no_process_outlives_the_one_that_started_it(router: Router) -> None:
    children = router.parent.children()
    router.parent.kill()
    gone, alive = psutil.wait_procs(children, PATIENCE_S)
    assert (len(gone), alive) == (2, [])


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"processes": 65}, 2, "processes"),
        ({"model": "/nowhere/at/all"}, 2, "/nowhere/at/all"),
        (
            {"runtime": "vllm", "connector": "none"},
            2,
            "leave it out and name all engines in --decode",
        ),
    ],
)
def test_a_start_that_cannot_work_ends_with_its_reason(
    smollm2: str, tmp_path: Path, settings: dict[str, Any], code: int, words: str
) -> None:
    config = RouterConfig(**{"model": smollm2, "processes": 2, **settings})
    engines = "--prefill", "a:1", "--decode", "b:1"
    ended = subprocess.run(
        router_command(tmp_path, config, *engines, "--port", free_port()),
        capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (ended.returncode, words in ended.stderr.decode()) == (code, True)


def test_a_port_that_others_have_is_not_shared_with_them(smollm2: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        ended = subprocess.run(
            router_command(
                tmp_path, RouterConfig(model=smollm2, processes=2),
                "--prefill", "a:1", "--decode", "b:1", "--port", port,
            ),
            capture_output=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr.decode()
