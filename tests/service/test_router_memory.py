"""A whole router, with the processes that work for it, stays small under many large images."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from free_ports import free_port
from model_kit.pictures import image_part
from model_kit.seeing import Published
from PIL import Image
from processes import running
from service_kit import cores, engine_config, router_command
from waits import PATIENCE_S, wait_until

from diptych_protocol import RouterConfig

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
IMAGES = 31
SIZE = (2530, 1265)
"""So many images of this size have the pixels that a prompt may bring."""
ROUTER_MIB, DECODER_MIB = 128, 192
"""What the router may need on top of what it has when it is idle: bodies and tiles; and what a
process may that decodes such an image, all in all: some copies of 10 to 13 MB."""


@dataclass(frozen=True)
class Router:
    process: psutil.Process
    url: str

    def client(self, name: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer key-of-{name}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def decoders(self) -> list[psutil.Process]:
        return running(self.process.children(), "confined_decoding")


def peak_mib(process: psutil.Process) -> float:
    """The most memory that a process has had so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1024


@pytest.fixture
def router(tmp_path: Path, keys_dir: Path) -> Iterator[Router]:
    model = Published(tmp_path / "model").uri
    keys = tmp_path / "api-keys"
    keys.mkdir()
    for name in ("ann", "bob", "eve"):
        (keys / name).write_text(f"key-of-{name}")
    exact: dict[str, Any] = {"weight_packing": "none", "block_size": 4}
    configs = [engine_config(name, model, **exact) for name in ("seeing-p", "seeing-d")]
    port = free_port()
    with cores(keys_dir, *configs) as (prefill, decode):
        arguments = (
            *("--port", port, "--keys", keys_dir, "--api-keys", keys),
            *("--prefill", prefill.address, "--decode", decode.address),
        )
        config = RouterConfig(model=model, served_name="seeing")
        started = psutil.Popen(router_command(tmp_path, config, *arguments))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_ready(url), "the router is ready")
            yield Router(started, url)
        finally:
            started.kill()
            started.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


def ask(*content: dict[str, object]) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
    return {"model": "seeing", "max_tokens": 1, "messages": messages}


def many(first: int) -> dict[str, Any]:
    """A request of large images, none of which is like another."""
    images = [Image.new("RGB", SIZE, (first, number, 0)) for number in range(IMAGES)]
    return ask(*map(image_part, images))


async def test_a_router_stays_small_under_many_large_images_of_two_clients(router: Router) -> None:
    async with (
        router.client("ann") as ann,
        router.client("bob") as bob,
        router.client("eve") as eve,
    ):
        first = await eve.post(CHAT, json=ask(image_part(Image.new("RGB", (40, 20)))))
        assert first.status_code == 200, first.text  # what is loaded with the first image is there
        before = peak_mib(router.process)
        asking = [
            asyncio.create_task(client.post(CHAT, json=many(number)))
            for number, client in enumerate((ann, ann, bob, bob))
        ]
        texts, decoders = 0, 0
        while not all(task.done() for task in asking):
            answer = await eve.post(CHAT, json=ask())
            assert answer.status_code == 200, answer.text
            texts += 1
            decoders = max(decoders, len(router.decoders()))
        answers = [task.result() for task in asking]
    assert {answer.status_code for answer in answers} == {200}, [each.text for each in answers]
    peaks = [peak_mib(process) for process in router.decoders()]
    grown = peak_mib(router.process) - before
    print(f"grown by {grown:.0f} MiB; decoders {peaks} MiB; {texts} texts meanwhile")
    assert texts > 1
    assert decoders == 2
    assert grown < ROUTER_MIB
    assert max(peaks) < DECODER_MIB
