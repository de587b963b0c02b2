"""Targets become addresses."""

from __future__ import annotations

import pytest

from diptych_protocol import InvalidRequestError
from diptych_router.discovery import parse_targets, resolve


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
