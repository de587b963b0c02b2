"""Requests that would be late, as clients of a router process see them."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from free_ports import free_port
from service_kit import Core, cores, engine_config, router_command
from waits import PATIENCE_S, Deadline, wait_until

from diptych_protocol import RouterConfig, Slo
from diptych_protocol.admin import RECENT_S, PromiseCount, RouterReport

PROMISED_MS = 1
"""No engine computes a prompt in a millisecond. So whoever has to wait for another is late, and
whoever has not is served without the promise."""
LONG = "A lighthouse keeper writes a letter about the storms of May. " * 15
BURST = 6


class Router:
    """A router process in front of two engines, with the API key `alice` or without keys."""

    def __init__(
        self, folder: Path, config: RouterConfig, keys_dir: Path, engines: list[Core], key: str
    ) -> None:
        port, admin_port = free_port(), free_port()
        arguments: list[object] = ["--port", port, "--admin-port", admin_port, "--keys", keys_dir]
        for role, core in zip(("prefill", "decode"), engines, strict=True):
            arguments += [f"--{role}", core.address]
        if key:
            clients = folder / "clients"
            clients.mkdir()
            (clients / "alice").write_text(key)
            arguments += ["--api-keys", clients]
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url, self.admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
        self.process = subprocess.Popen(router_command(folder, config, *arguments))

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    def state(self) -> RouterReport:
        token = {"authorization": "Bearer sesame"}
        answer = httpx.get(f"{self.admin}/admin/state", headers=token, timeout=PATIENCE_S)
        return msgspec.json.decode(answer.content, type=RouterReport)

    async def ask(self, *prompts: str) -> list[httpx.Response]:
        """The answers to so many requests at once."""
        async with httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=PATIENCE_S
        ) as client:
            bodies = [{"model": "smollm2", "prompt": text, "max_tokens": 2} for text in prompts]
            posts = (client.post("/v1/completions", json=body) for body in bodies)
            return await asyncio.gather(*posts)


@pytest.fixture(scope="module")
def engines(smollm2: str, keys_dir: Path) -> Iterator[list[Core]]:
    configs = [engine_config(name, smollm2) for name in ("prefill-0", "decode-0")]
    with cores(keys_dir, *configs) as started:
        yield started


@pytest.fixture
def router(
    smollm2: str, keys_dir: Path, tmp_path: Path, engines: list[Core], key: str
) -> Iterator[Router]:
    (keys_dir / "admin-token").write_text("sesame")
    config = RouterConfig(model=smollm2, served_name="smollm2", slo=Slo(ttft_ms=PROMISED_MS))
    started = Router(tmp_path, config, keys_dir, engines, key)
    try:
        wait_until(started.is_ready, "the router is ready")
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def of_outcome(counts: list[PromiseCount]) -> Counter[str]:
    found = Counter[str]()
    for count in counts:
        assert count.promise == "first_token"
        found[count.outcome] += count.requests
    return found


@pytest.mark.parametrize(
    ("key", "status", "code", "blamed"),
    [
        ("", 503, "overloaded", ""),
        ("key-of-alice", 429, "rate_limit_exceeded", "other requests of this API key"),
    ],
)
async def test_who_would_be_late_is_told_which_promise_and_when_to_come_back(
    router: Router, key: str, status: int, code: str, blamed: str
) -> None:
    answers: list[httpx.Response] = []
    refused: list[httpx.Response] = []
    deadline = Deadline("the engines have told how fast they are, and a request is refused")
    while not refused:
        deadline.check()
        burst = await router.ask(*(f"{len(answers) + number} {LONG}" for number in range(BURST)))
        answers += burst
        refused = [answer for answer in burst if answer.status_code != 200]
    assert len(refused) < BURST, "the first of them has nobody to wait for"
    for answer in refused:
        assert answer.status_code == status
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        error = answer.json()["error"]
        assert error["code"] == code
        assert "promised within 0.001 s (slo.ttftMs)" in error["message"]
        assert f"retry in {answer.headers['retry-after']} s" in error["message"]
        assert blamed in error["message"]
        assert answer.headers["x-request-id"]

    # It is counted, for scrapers and for the operator.
    text = httpx.get(f"{router.url}/metrics", headers=router.headers, timeout=PATIENCE_S).text
    [line] = [x for x in text.splitlines() if "promises_total" in x and 'outcome="refused"' in x]
    assert float(line.rpartition(" ")[2]) == len(refused)
    state = router.state()
    served = len(answers) - len(refused)
    assert of_outcome(state.promises) == {"refused": len(refused), "missed": served}
    recent = of_outcome(state.recent_promises)
    assert recent["refused"] == len(refused), f"within the last {RECENT_S} s"

    # Alone it is in nobody's way.
    [alone] = await router.ask("After that there is room.")
    assert alone.status_code == 200
    assert of_outcome(router.state().promises)["refused"] == len(refused)
