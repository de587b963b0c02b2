"""Targets become addresses."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from waits import PATIENCE_S

from diptych_protocol import InvalidRequestError
from diptych_router.engines import discovery
from diptych_router.engines.discovery import parse_targets, resolve


def test_a_list_of_targets_is_parsed() -> None:
    assert parse_targets("a.svc:5557, 127.0.0.1:80,[::1]:9") == [
        ("a.svc", 5557), ("127.0.0.1", 80), ("::1", 9),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:x", "host:70000", "host:0"])
def test_a_malformed_target_is_named(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_targets(text)
    assert caught.value.param == "targets"


async def test_every_address_of_every_target_counts() -> None:
    endpoints = await resolve([("127.0.0.1", 5), ("127.0.0.2", 6), ("127.0.0.2", 6)])
    assert endpoints == {"tcp://127.0.0.1:5", "tcp://127.0.0.2:6"}


async def test_a_resolver_that_is_silent_keeps_no_thread_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    asked = threading.Event()

    def silent(*_: object, **__: object) -> list[object]:
        asked.set()
        answers.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    monkeypatch.setattr(discovery, "RESOLVE_TIMEOUT_S", PATIENCE_S)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    resolving = asyncio.create_task(resolve([("engines.example", 5)]))
    try:
        while not asked.is_set():
            await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(lambda: "done") == "done"
    finally:
        answers.set()
    assert await resolving == set()
