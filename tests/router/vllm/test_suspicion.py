"""What speaks against hand-offs of a vLLM server."""

from __future__ import annotations

from typing import Any

import pytest

from diptych_protocol import RouterConfig, SchedulerStats
from diptych_protocol.config import Connector
from diptych_router.vllm.metrics import ServerFigures
from diptych_router.vllm.service import VllmService
from diptych_router.vllm.suspicion import Suspicion


def suspicion(connector: Connector = "nixl") -> Suspicion:
    config = RouterConfig(model="m", runtime="vllm", connector=connector, lease_seconds=30.0)
    return Suspicion(VllmService.of(config, 64))


def figures(**numbers: Any) -> ServerFigures:
    return ServerFigures(SchedulerStats(), 16, 64, **numbers)


@pytest.mark.parametrize(("counter", "look"), [
    ("num_late", Suspicion.of_reads_from_it), ("num_failed", Suspicion.of_its_reads),
])  # fmt: skip
def test_a_counter_that_rises_speaks_against_a_server_and_one_that_stands_does_not(
    counter: str, look: Any
) -> None:
    judge = suspicion()
    assert look(judge, figures(**{counter: 7})) == "", "what was before it is known"
    assert look(judge, figures(**{counter: 7})) == ""
    assert look(judge, figures(**{counter: 8}))
    assert look(judge, figures(**{counter: 8})) == ""
    assert look(judge, figures(**{counter: 0})) == "", "it began anew"
    assert look(judge, figures(**{counter: 1}))


@pytest.mark.parametrize(
    ("connector", "silent_s", "speaks"),
    [("nixl", 1.0, False), ("nixl", 9.9, False), ("nixl", 10.1, True), ("diptych", 99.0, False)],
)
def test_a_server_that_stood_still_may_have_read_blocks_of_others(
    connector: Connector, silent_s: float, speaks: bool
) -> None:
    assert bool(suspicion(connector).of_what_it_read(silent_s)) is speaks
