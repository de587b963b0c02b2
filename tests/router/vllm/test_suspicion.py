"""What speaks against hand-offs of a vLLM server."""

from __future__ import annotations

import pytest

from diptych_protocol import SchedulerStats
from diptych_router.vllm.metrics import ServerFigures
from diptych_router.vllm.suspicion import Suspicion


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
    assert bool(Suspicion(30.0).long_silence(silent_s, reads=reads)) is speaks
