"""Batches through router processes and real engines, with the official client: also when routers
are killed, and when several share a directory."""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from engine_kit.executor import PACED
from free_ports import free_port
from service_kit import LIGHT, cores, engine_config, router_command
from waits import PATIENCE_S, wait_until

from diptych_protocol import RouterConfig
from diptych_protocol.config import Batches

ENDED = {"failed", "completed", "expired", "cancelled"}
LINES = 8
PROMPT = "The lighthouse keeper climbed the stairs and counted: "


@dataclass
class Router:
    """A router's program."""

    process: psutil.Popen
    url: str
    told_to_end: bool = False

    def client(self, name: str = "ann") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=f"key-of-{name}", max_retries=0, timeout=PATIENCE_S
        )

    def everybody(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return [self.process]

    def kill(self) -> None:
        """As the system does when memory runs out."""
        self.told_to_end = True
        for process in self.everybody():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        self.told_to_end = True
        self.process.send_signal(number)

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        return False


@pytest.fixture(scope="module")
def addresses(keys_dir: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a prefill and a decode engine, so slow that a batch lasts."""
    names = "prefill-0", "decode-0"
    own = {"scheduling_policy": "priority", "executor_class": PACED}
    configs = [engine_config(name, LIGHT, **own) for name in names]
    with cores(keys_dir, *configs) as (prefill, decode):
        yield prefill.address, decode.address


@pytest.fixture
def routers(
    smollm2: str, keys_dir: Path, tmp_path: Path, addresses: tuple[str, str]
) -> Iterator[Any]:
    """`routers(**settings)` starts a router; all have one batch directory."""
    api_keys = tmp_path / "api-keys"
    api_keys.mkdir()
    for name in ("ann", "bob"):
        (api_keys / name).write_text(f"key-of-{name}")
    started: list[Router] = []

    def start(**settings: Any) -> Router:
        port = free_port()
        config = RouterConfig(
            model=smollm2, served_name="smollm2", batches=Batches(concurrency=2), **settings
        )
        folder = tmp_path / f"router-{len(started)}"
        folder.mkdir()
        arguments = (
            *("--port", port, "--keys", keys_dir, "--api-keys", api_keys),
            *("--prefill", addresses[0], "--decode", addresses[1]),
            *("--batch-directory", tmp_path / "batches"),
        )
        process = psutil.Popen(router_command(folder, config, *arguments))
        started.append(Router(process, f"http://127.0.0.1:{port}"))
        return started[-1]

    try:
        yield start
    finally:
        codes = [router.process.poll() for router in started if not router.told_to_end]
        for router in started:
            router.kill()
        assert not any(code is not None for code in codes), f"routers ended by themselves: {codes}"


def content(tokens: int = 60) -> bytes:
    """A batch whose lines differ."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "smollm2",
                "prompt": f"{PROMPT}{number}",
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(LINES)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def begun(client: openai.OpenAI, content: bytes) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def completed(client: openai.OpenAI, batch: openai.types.Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def whole(client: openai.OpenAI, batch: openai.types.Batch) -> list[dict[str, Any]]:
    """The answers of a batch that is to succeed, each once."""
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.error_file_id is None
    assert batch.output_file_id is not None
    text = client.files.content(batch.output_file_id).text
    found = [json.loads(line) for line in text.splitlines()]
    assert Counter(line["custom_id"] for line in found) == {
        f"line-{number}": 1 for number in range(LINES)
    }
    return found


def journal_of(tmp_path: Path, batch: openai.types.Batch) -> list[dict[str, Any]]:
    """The answers that are on the disk, those that are whole."""
    [path] = (tmp_path / "batches").rglob(f"{batch.id}.results")
    lines = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line[1:]) for line in lines if line.endswith(b"\n")]


def test_a_batch_has_the_models_answers_and_they_are_its_clients(routers: Any) -> None:
    router = routers()
    wait_until(router.is_ready, "the router has found the engines")
    with router.client() as ann, router.client("bob") as bob:
        batch = begun(ann, content(8))
        found = whole(ann, batch)
        for line in found[:2]:
            number = line["custom_id"].removeprefix("line-")
            direct = ann.completions.create(
                model="smollm2", prompt=f"{PROMPT}{number}", max_tokens=8, temperature=0
            )
            assert line["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
        file_id = client_file(ann, batch)
        for steal in (
            lambda: bob.files.content(file_id),
            lambda: bob.files.content(batch.input_file_id),
            lambda: bob.files.delete(file_id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                steal()
        assert not bob.files.list().data
        assert not bob.batches.list().data


def client_file(client: openai.OpenAI, batch: openai.types.Batch) -> str:
    file_id = client.batches.retrieve(batch.id).output_file_id
    assert file_id is not None
    return file_id


def test_a_router_that_is_killed_goes_on_where_it_was(routers: Any, tmp_path: Path) -> None:
    first = routers()
    wait_until(first.is_ready, "the router has found the engines")
    with first.client() as ann:
        batch = begun(ann, content())
        wait_until(lambda: completed(ann, batch) > 0, "a request is done")
    first.kill()
    before = journal_of(tmp_path, batch)
    assert 0 < len(before) < LINES
    second = routers()
    wait_until(second.is_ready, "the router is there again")
    with second.client() as ann:
        found = {line["custom_id"]: line["id"] for line in whole(ann, batch)}
    for line in before:  # by the id that an answer gets when it is computed
        assert found[line["custom_id"]] == line["id"]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_another_router_goes_on_with_the_batch_of_one_that_ends(
    routers: Any, tmp_path: Path, number: signal.Signals
) -> None:
    """Both share the directory, and one of them works on the batch."""
    first, second = routers(drain_seconds=5.0), routers()
    wait_until(first.is_ready, "the first router has found the engines")
    with first.client() as ann:
        batch = begun(ann, content())
        wait_until(lambda: completed(ann, batch) > 0, "a request is done")
    before = {line["custom_id"]: line["id"] for line in journal_of(tmp_path, batch)}
    first.signal(number)
    wait_until(second.is_ready, "the second router has found the engines")
    with second.client() as ann:
        found = {line["custom_id"]: line["id"] for line in whole(ann, batch)}
    assert before.items() <= found.items()
    first.process.wait(PATIENCE_S)


def test_a_batch_is_cancelled_at_another_router_than_the_one_that_works(
    routers: Any, tmp_path: Path
) -> None:
    first, second = routers(), routers()
    wait_until(first.is_ready, "the first router has found the engines")
    wait_until(second.is_ready, "the second router has found the engines")
    with first.client() as ann, second.client() as same:
        batch = begun(ann, content(200))
        wait_until(lambda: same.batches.retrieve(batch.id).status == "in_progress")
        assert same.batches.cancel(batch.id).status == "cancelling"
        assert ann.batches.retrieve(batch.id).status in ("cancelling", "cancelled")
        wait_until(lambda: ann.batches.retrieve(batch.id).status == "cancelled")
        answer = ann.completions.create(model="smollm2", prompt="1, 2, 3,", max_tokens=2)
        assert answer.choices[0].text
    assert not list((tmp_path / "batches").rglob("*.results"))


def test_two_routers_grant_a_keys_tokens_to_the_token_also_when_one_is_killed(
    routers: Any, tmp_path: Path
) -> None:
    """Usage is in the same directory as batches."""
    budget, longest = 150, 8
    (tmp_path / "api-keys" / "ann").write_text(f"key-of-ann\ntokenBudget: {budget}\n")
    first, second = routers(), routers()

    def ask(router: Router) -> int:
        """The tokens that it took; 0: the key has too few left."""
        with router.client() as ann, contextlib.suppress(openai.RateLimitError):
            answer = ann.completions.create(
                model="smollm2", prompt=PROMPT, max_tokens=longest, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            return answer.usage.total_tokens
        return 0

    for router in (first, second):
        wait_until(router.is_ready, "the router has found the engines")
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(ask, [first, second] * 8))
    assert 0 < max(taken) > budget - sum(taken) >= 0
    assert taken.count(0) == 16 - budget // max(taken)
    ledger = tmp_path / "batches" / "usage" / "ledger.json"
    wait_until(
        lambda: json.loads(ledger.read_bytes())["counts"]["ann"].get("ever") == sum(taken),
        "all that was used is recorded",
    )
    first.kill()
    with second.client() as ann, pytest.raises(openai.RateLimitError) as refused:
        ann.completions.create(model="smollm2", prompt=PROMPT, max_tokens=longest)
    assert refused.value.code == "insufficient_quota"
    left = refused.value.response.headers["x-ratelimit-remaining-tokens"]
    assert int(left) == budget - sum(taken)
