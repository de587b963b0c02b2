"""A router is killed in the middle of its streams, and their clients get the rest from another one.

Real routers, real engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import pytest_asyncio
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, Pages, chromium
from engine_kit.core import BATCHED
from engine_kit.executor import PACED
from forwarder import forwarder
from free_ports import free_port
from page_scenes import Scene
from playwright.sync_api import Request, expect
from service_kit import (
    LIGHT,
    Core,
    all_usable,
    cores,
    engine_config,
    link_of,
    router_command,
    routing,
)
from streams_read import READ
from waits import PATIENCE_S, wait_until

from diptych.bench.stream import Sample, stream
from diptych_engine.control.kept_answers import KEEP_S
from diptych_protocol import RouterConfig
from diptych_router.requests.pool_client import PoolClient

LENGTH = 250
LONGER = 400
"""Tokens of answers that last for seconds."""
TOLD = 5
"""Events that each client has, at least, when the router dies."""
HEADERS = {"x-diptych-resumable": "1", "authorization": "Bearer key-of-ann"}


PATHS = [*READ]
"""Those of the APIs that stream."""
STREAMS = len(PATHS)
DIFFERENT = "created|created_at|cached_tokens|cache_read_input_tokens|input_tokens"
ENDS = re.compile(r'data: (\[DONE\]|{"type":"(response\.(completed|incomplete)|message_stop)")')


@dataclass
class Answer:
    """What a client has of a stream."""

    events: list[str] = field(default_factory=list)

    @property
    def last_id(self) -> str:
        """That of the last event."""
        first = self.events[-1].partition("\n")[0] if self.events else ""
        return first.removeprefix("id: ") if first.startswith("id: ") else ""

    def read_as(self, path: str) -> Any:
        """What it comes to, without what differs from one answer to the next: ids, times, how much
        of the prompt was in a cache, and how many tokens were there when a message began."""
        seen: dict[str, str] = {}

        def number(found: re.Match[str]) -> str:
            return seen.setdefault(found[0], f"{found[1]}{len(seen)}")

        text = "\n\n".join(self.events)
        text = re.sub(r"(\w+?)[_-][0-9a-f]{24,}\b", number, text)
        text = re.sub(rf'("(?:{DIFFERENT})"):\d+', r"\1:0", text)
        text = re.sub(r'("message_start".*?"output_tokens"):\d+', r"\1:0", text)
        return READ[path](text.split("\n\n"))


def question(number: int, path: str = "/v1/completions", length: int = LENGTH) -> dict[str, Any]:
    asked = f"Chapter {number}. The lighthouse keeper climbed the stairs, and "
    body: dict[str, Any] = {"model": "smollm2", "temperature": 0, "stream": True}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body[limit] = length
    if path == "/v1/responses":
        body["input"] = asked
    elif path == "/v1/completions":
        body["prompt"] = asked
    else:
        body["messages"] = [{"role": "user", "content": asked}]
    if path != "/v1/messages":  # it has no such fields
        body |= {"temperature": 0.8, "seed": number, "ignore_eos": True}
    if path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    return body


async def read(
    router: Router,
    body: dict[str, Any],
    answer: Answer,
    path: str = "/v1/completions",
    headers: dict[str, str] = HEADERS,
    most: int = 1 << 20,
) -> bool:
    """Read on, from the last event that came, until there are as many as at most; whether the
    stream came to its proper end."""
    last = {"last-event-id": answer.last_id} if answer.last_id else {}
    rest = ""
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream("POST", f"{router.url}{path}", json=body, headers=headers | last) as got,
    ):
        got.raise_for_status()
        async for piece in got.aiter_text():
            *events, rest = (rest + piece).split("\n\n")
            answer.events += events
            if len(answer.events) >= most:
                del answer.events[most:]
                return False
    return ENDS.search(answer.events[-1]) is not None


@pytest.fixture(scope="module")
def engines(keys_dir: Path) -> Iterator[list[Core]]:
    names = "prefill-0", "decode-0"
    own: dict[str, Any] = {"weight_packing": BATCHED, "executor_class": PACED, "num_blocks": 512}
    configs = [engine_config(x, LIGHT, **own) for x in names]
    with cores(keys_dir, *configs) as started:
        yield started


@dataclass
class Router:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        return False

    def lose(self) -> None:
        self.process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def routers(
    smollm2: str, keys_dir: Path, engines: list[Core], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Router]]:
    """Four routers of the same engines; a test that kills one takes it out of the list."""
    folder = tmp_path_factory.mktemp("routers")
    (folder / "api-keys").mkdir()
    for name in ("ann", "bob"):
        (folder / "api-keys" / name).write_text(f"key-of-{name}")
    config = RouterConfig(model=smollm2, served_name="smollm2", ui=True)
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(4):
            port, own = free_port(), tmp_path_factory.mktemp("router")  # for its configuration
            command = router_command(
                *(own, config, "--port", port, "--keys", keys_dir),
                *("--api-keys", folder / "api-keys"),
                *("--prefill", engines[0].address, "--decode", engines[1].address),
            )
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(Router(process, port))
        for router in started:
            wait_until(router.is_ready, "a router that is ready")
        yield started


@pytest_asyncio.fixture
async def watcher(smollm2: str, keys_dir: Path, engines: list[Core]) -> AsyncIterator[PoolClient]:
    """Knows what the engines have done."""
    async with routing(
        smollm2, keys_dir, [engines[0].address], [engines[1].address], verify="Off"
    ) as client:
        await all_usable(client, 2)
        yield client


async def tokens_sampled(watcher: PoolClient, engines: list[Core]) -> int:
    stats = [await link_of(watcher, core).refresh_stats() for core in engines]
    return sum(each.tokens_generated for each in stats)


async def test_clients_of_a_killed_router_get_the_rest_from_another(
    routers: list[Router], engines: list[Core], watcher: PoolClient, eventually: Any
) -> None:
    lost, other = routers.pop(0), routers[-1]
    bodies = [question(number, path) for number, path in enumerate(PATHS)]
    wanted = [Answer() for _ in range(STREAMS)]

    def reading(router: Router, number: int, answers: list[Answer]) -> Coroutine[Any, Any, bool]:
        return read(router, bodies[number], answers[number], PATHS[number])

    assert all(await asyncio.gather(*(reading(lost, at, wanted) for at in range(STREAMS))))
    before = await tokens_sampled(watcher, engines)

    answers = [Answer() for _ in range(STREAMS)]
    streams = [asyncio.create_task(reading(lost, at, answers)) for at in range(STREAMS)]
    await eventually(lambda: all(len(answer.events) >= TOLD for answer in answers))
    lost.lose()
    ends = await asyncio.gather(*streams, return_exceptions=True)
    broken = [number for number, end in enumerate(ends) if isinstance(end, httpx.TransportError)]
    assert broken, ends
    assert all(await asyncio.gather(*(reading(other, at, answers) for at in broken)))

    for path, answer, whole in zip(PATHS, answers, wanted, strict=True):
        assert answer.read_as(path) == whole.read_as(path)
    sampled = await tokens_sampled(watcher, engines) - before
    assert sampled == STREAMS * LENGTH, "each token is computed once"


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_breaks_off_anywhere_gets_the_rest_from_another_router(
    routers: list[Router], path: str
) -> None:
    first, other = routers[-2:]
    body = question(1, path, length=24)
    whole = Answer()
    assert await read(first, body, whole, path)

    async def broken_off(after: int) -> Answer:
        answer = Answer()
        has_ended = await read(first, body, answer, path, most=after)
        assert has_ended or await read(other, body, answer, path)
        return answer

    places = range(1, len(whole.events), 3)
    for answer in await asyncio.gather(*map(broken_off, places)):
        assert answer.read_as(path) == whole.read_as(path)


async def test_nobody_else_gets_the_rest_and_nobody_gets_it_too_late(
    routers: list[Router], watcher: PoolClient, engines: list[Core], eventually: Any
) -> None:
    lost, other = routers.pop(0), routers[-1]
    answer = Answer()
    stream = asyncio.create_task(read(lost, question(1, length=LONGER), answer))
    await eventually(lambda: len(answer.events) >= TOLD)
    lost.lose()
    await asyncio.wait((stream,))

    async def refusal(
        number: int, last_id: str, key: str = "ann", **fields: int
    ) -> tuple[int, str | None]:
        headers = {**HEADERS, "authorization": f"Bearer key-of-{key}", "last-event-id": last_id}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            url = f"{other.url}/v1/completions"
            body = question(number, length=LONGER) | fields
            got = await client.post(url, json=body, headers=headers)
        return got.status_code, got.json()["error"]["code"]

    name, told, digest, *rest = answer.last_id.split(".")
    guessed = ".".join(("0" * 32, told, digest, *rest))
    assert await refusal(1, guessed) == (404, "answer_not_kept")
    assert await refusal(1, answer.last_id, "bob") == (404, "answer_not_kept")
    assert await refusal(2, answer.last_id) == (409, "another_answer")
    elsewhere = ".".join((name, str(int(told) - 1), digest, *rest))
    assert await refusal(1, elsewhere) == (409, "another_answer")
    assert (await refusal(1, "42"))[0] == 400
    assert await refusal(1, answer.last_id, n=2) == (404, "answer_not_kept")

    await asyncio.sleep(KEEP_S)
    assert await refusal(1, answer.last_id) == (404, "answer_not_kept")
    links = [link_of(watcher, core) for core in engines]
    assert [await link.client.call("take_kept", name, "ann") for link in links] == [None, None]
    for link in links:
        stats = await link.refresh_stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)
def test_the_page_and_bench_get_the_rest_from_another_router(routers: list[Router]) -> None:
    lost, other = routers.pop(0), routers[-1]
    key = HEADERS["authorization"].removeprefix("Bearer ")
    body = question(1, length=LONGER)
    begun = Event()

    async def note(_: httpx.Response) -> None:
        begun.set()

    async def bench(url: str) -> Sample:
        authorized = {"authorization": HEADERS["authorization"]}
        async with httpx.AsyncClient(
            base_url=url, headers=authorized, timeout=PATIENCE_S, event_hooks={"response": [note]}
        ) as client:
            return await stream(client, "/v1/completions", body, PATIENCE_S)

    with (
        forwarder([lost.port, other.port]) as url,
        chromium() as browser,
        ThreadPoolExecutor(1) as thread,
        Pages(browser, url, "Failed to load resource").watched() as open_page,
    ):
        scene = Scene(open_page())
        asked: list[Request] = []
        scene.page.on("request", lambda x: asked.append(x) if x.method == "POST" else None)
        scene.page.fill("#key", key)
        scene.page.click("#door button")
        expect(scene.page.locator("#door")).to_be_hidden()
        scene.set_numbers(temperature=0, max_tokens=LONGER)
        scene.ask("Tell me of the sea.")
        wait_until(lambda: len(scene.answer.inner_text()) > 60)
        benched = thread.submit(asyncio.run, bench(url))
        assert begun.wait(PATIENCE_S)  # both are in the middle of their answers
        lost.lose()
        scene.wait_for_end()
        written = scene.written
        assert benched.result().output_tokens == LONGER

    again = [request for request in asked if "last-event-id" in request.headers]
    assert again
    sent: Any = again[0].post_data_json
    whole = sent | {"stream": False, "stream_options": None}
    answer = httpx.post(
        f"{other.url}/v1/chat/completions", json=whole, headers=HEADERS, timeout=PATIENCE_S
    ).json()
    assert answer["usage"]["completion_tokens"] == LONGER
    assert written == answer["choices"][0]["message"]["content"]


async def test_a_client_that_does_not_ask_gets_no_ids_and_nothing_of_it_is_kept(
    routers: list[Router], watcher: PoolClient, eventually: Any
) -> None:
    answer = Answer()
    key = {"authorization": HEADERS["authorization"], "last-event-id": "any"}
    assert await read(routers[-1], question(1), answer, headers=key)
    assert answer.last_id == ""
    assert await watcher.find_kept("", "ann") == []
