"""What a model's chat template takes costs nobody but those who chat with that model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from waits import FOR_EVER_S, PATIENCE_S, wait_until

from diptych_frontend.app import build_app
from diptych_frontend.confined.processes import ConfinedWork
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.text.templates import confined_templates
from diptych_frontend.text.templates.confined_templates import BOUNDS, ConfinedTemplate

MODULE = confined_templates.__name__
CHAT = "/v1/chat/completions"
HOSTILE = """{% for message in messages %}
    {%- if message.content == "loop" %}
        {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
    {%- elif message.content == "huge" %}{% set text = "x" * (1000000000 * loop.index) %}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}"""


def ask(content: str) -> dict[str, Any]:
    return {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


@pytest.fixture
def hostile(engine: Any) -> Any:
    """An engine whose model came with such a template."""
    template = ConfinedTemplate(HOSTILE, "", "")
    of_bytes = engine.renderer.render_prompt
    engine.renderer.chat_template = HOSTILE
    engine.renderer.render_chat = lambda messages, **how: of_bytes(template.render(messages, **how))
    return engine


def work_within(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = dataclasses.replace(BOUNDS, seconds=seconds)
    monkeypatch.setattr(confined_templates, "_work", ConfinedWork(MODULE, bounds))


def at_work() -> list[int]:
    """The processes that this test has started: those of tests before it have other bounds."""
    bounds = confined_templates._work._bounds.as_argument()
    found = []
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            # Others' processes have names of any bytes.
            parent = pid.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            command = pid.joinpath("cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if int(parent) == os.getpid() and MODULE in command and bounds in command:
            found.append(int(pid.name))
    return found


def all_loop() -> bool:
    return bool(at_work()) and not confined_templates._work.pids()


@pytest.mark.parametrize(
    ("content", "why"),
    [("loop", "it takes more than 1 seconds"), ("huge", "it takes more than 512 MiB of memory")],
)
async def test_a_template_ends_with_its_bounds_and_the_server_goes_on(
    hostile: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, content: str, why: str
) -> None:
    work_within(1, monkeypatch)
    async with (
        serve(build_app(hostile)) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        answer = await client.post(CHAT, json=ask(content))
        assert answer.status_code == 400, answer.text
        assert why in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "messages"
        answer = await client.post(CHAT, json=ask("hello"))
        assert answer.status_code == 200, answer.text


async def test_nobody_waits_for_the_templates_of_others(
    hostile: Any, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client has three chats that never end: two processes at most have them, that of its
    thread and one that was asked in haste, if the machine was not too busy for haste."""
    work_within(int(FOR_EVER_S), monkeypatch)
    for name in ("alice", "bob"):
        (tmp_path / name).write_text(f"key-of-{name}")
    async with serve(build_app(hostile, api_keys=ApiKeys(tmp_path))) as url:
        alice, bob = (
            httpx.AsyncClient(
                base_url=url,
                timeout=PATIENCE_S,
                headers={"authorization": f"Bearer key-of-{name}"},
            )
            for name in ("alice", "bob")
        )
        async with alice, bob:
            await bob.post(CHAT, json=ask("hello"))  # a process waits for work
            looping = [asyncio.create_task(alice.post(CHAT, json=ask("loop"))) for _ in range(3)]
            await asyncio.to_thread(wait_until, all_loop, "all processes loop")
            for _ in range(5):
                text = {"model": "echo", "max_tokens": 1, "prompt": "hello"}
                for path, body in (("/v1/completions", text), (CHAT, ask("hello"))):
                    answer = await bob.post(path, json=body)
                    assert answer.status_code == 200, answer.text
            assert not any(task.done() for task in looping)
            assert 2 <= len(at_work()) <= 3  # one of them is bob's
            while not all(task.done() for task in looping):
                for pid in at_work():
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.05)
    assert {task.result().status_code for task in looping} == {503}
