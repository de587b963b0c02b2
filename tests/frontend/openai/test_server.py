"""The server's own life: addresses, readiness, draining, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest
from served import serve_http
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.openai.server import Site, listen, serve_sites

BODY = {"model": "echo", "prompt": "abc", "max_tokens": 10**9}


async def start(app: Any, **options: Any) -> tuple[asyncio.Task[None], str]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve_http(
            app,
            "127.0.0.1",
            0,
            on_ready=lambda host, port: ready.set_result(f"http://{host}:{port}"),
            **options,
        )
    )
    return serving, await asyncio.wait_for(ready, PATIENCE_S)


def test_a_taken_port_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = f"from diptych_frontend.openai.server import listen; listen('127.0.0.1', {port})"
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}: Address already in use; choose another port" in ended.stderr


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_impossible_host_is_refused_in_words(host: str) -> None:
    with pytest.raises(SystemExit, match=f"cannot listen on {host}:0: .*check the host"):
        listen(host, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_finish_and_accepts_no_more(
    engine: Any, number: signal.Signals
) -> None:
    serving, url = await start(build_app(engine), drain_timeout_s=PATIENCE_S)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = BODY | {"max_tokens": 6, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            engine.gate.clear()
            os.kill(os.getpid(), number)
            await asyncio.wait_for(closed(url), PATIENCE_S)
            assert not serving.done()
            engine.gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await asyncio.wait_for(serving, PATIENCE_S)


async def closed(url: str) -> None:
    """Wait until connections are refused."""
    address = httpx.URL(url)
    while True:
        try:
            _, writer = await asyncio.open_connection(address.host, address.port)
        except ConnectionError:
            return
        writer.close()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["drain timeout", "second signal", "cancelled"])
async def test_what_outlasts_the_drain_is_told_so(engine: Any, how: str) -> None:
    before = asyncio.all_tasks()
    patience = 60 if how == "second signal" else 0.2
    serving, url = await start(build_app(engine), drain_timeout_s=patience)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        request = http.build_request("POST", "/v1/completions", json=BODY | {"stream": True})
        answer = await http.send(request, stream=True)
        lines = answer.aiter_lines()
        await anext(lines)
        engine.gate.clear()
        waiting = asyncio.create_task(http.post("/v1/completions", json=BODY))
        while len(engine.running) < 2:
            await asyncio.sleep(0.005)
        if how == "cancelled":
            serving.cancel()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "second signal":
            await closed(url)
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait((serving,), timeout=PATIENCE_S)
        assert serving.done()
        assert serving.cancelled() == (how == "cancelled")
        assert "shutting_down" in [line async for line in lines if line][-1]
        refused = await waiting
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
    assert len(engine.left_early) == 2
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


@pytest.mark.parametrize("how", ["drained", "drain timeout", "second signal", "failed"])
async def test_everything_is_served_until_the_server_is_drained(engine: Any, how: str) -> None:
    begun, drained = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        begun.set()
        await drained.wait()
        if how == "failed":
            raise RuntimeError("cannot drain")

    listeners = [listen("127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    sites = [Site(build_app(engine), listener) for listener in listeners]
    patience = 0.3 if how == "drain timeout" else 60
    serving = asyncio.create_task(serve_sites(*sites, drain=drain, drain_timeout_s=patience))
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        assert (await http.get(f"{urls[0]}/health")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        for url in urls if how != "drain timeout" else []:
            assert (await http.get(f"{url}/health")).status_code == 200
    if how == "second signal":
        os.kill(os.getpid(), signal.SIGINT)
    elif how != "drain timeout":
        drained.set()
    await asyncio.wait((serving,), timeout=PATIENCE_S)
    assert serving.done()
    assert str(serving.exception()) == ("cannot drain" if how == "failed" else "None")
    for url in urls:
        await asyncio.wait_for(closed(url), PATIENCE_S)


async def test_without_sites_the_first_signal_drains_and_ends() -> None:
    drained = asyncio.Event()

    async def drain() -> None:
        drained.set()

    serving = asyncio.create_task(serve_sites(drain=drain, drain_timeout_s=PATIENCE_S))
    await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, PATIENCE_S)
    assert drained.is_set()


async def test_the_same_port_serves_again_at_once(engine: Any) -> None:
    serving, url = await start(build_app(engine))
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        assert (await http.get(f"{url}/health")).status_code == 200
        serving.cancel()
        await asyncio.wait((serving,))
    listen("127.0.0.1", httpx.URL(url).port or 0).close()
