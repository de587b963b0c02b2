"""What speaks against hand-offs of a vLLM server."""

from __future__ import annotations

import pytest

from diptych_protocol import SchedulerStats
from diptych_router.engines.vllm.metrics import ServerFigures
from diptych_router.engines.vllm.suspicion import Suspicion


def late(number: int) -> ServerFigures:
    return ServerFigures(SchedulerStats(), 16, 64, number)


def test_late_reads_speak_against_a_server_when_their_number_rises() -> None:
    judge = Suspicion(30.0)
    assert judge.late_reads(late(7)) == "", "what was before is known"
    assert judge.late_reads(late(7)) == ""
    assert judge.late_reads(late(8))
    assert judge.late_reads(late(8)) == ""
    assert judge.late_reads(late(0)) == "", "it began anew"
    assert judge.late_reads(late(1))


@pytest.mark.parametrize(
    ("silent_s", "reads", "speaks"),
    [(1.0, True, False), (9.9, True, False), (10.1, True, True), (99.0, False, False)],
)
def test_a_server_that_stood_still_may_have_read_blocks_of_others(
    silent_s: float, reads: bool, speaks: bool
) -> None:
    assert bool(Suspicion(30.0).long_silence(silent_s, 0.0, reads=reads)) is speaks


@pytest.mark.parametrize(
    ("own_s", "told"), [(0.1, "for 14 s, and"), (12.0, "for 14 s (for 12 s of it, this router")]
)
def test_a_router_that_stood_still_itself_says_so(own_s: float, told: str) -> None:
    assert told in Suspicion(30.0).long_silence(14.0, own_s, reads=True)
