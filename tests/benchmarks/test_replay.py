"""Replays on real services: the tokens of a trace, and what is said of the answers.

tests/service/test_served.py replays one.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.__main__ import arguments
from benchmarks.__main__ import main as benchmarks
from benchmarks.load import WORD_IDS
from benchmarks.scenarios.replay import SCENARIO, trace_of
from benchmarks.traces.formats import write_trace
from benchmarks.traces.generate import generate
from benchmarks.traces.recorded import Trace, TraceRequest
from benchmarks.traces.replay import Failure, Outcome, Replay, figures, prompts

from diptych.bench.stream import Sample
from diptych_frontend.model_files.model_source import resolve_model

TRACE = Trace(
    [
        TraceRequest(0.0, 20, 3, (1, 2, 3)),
        TraceRequest(1.0, 24, 3, (1, 2, 4)),
        TraceRequest(2.0, 10, 3, (2,)),
        TraceRequest(4.0, 10, 3),
    ],
    block_tokens=8,
)


def test_a_block_is_the_same_tokens_wherever_its_id_occurs() -> None:
    first, second, third, last = prompts(TRACE, seed=1)
    assert [len(prompt) for prompt in (first, second, third, last)] == [20, 24, 10, 10]
    assert first[:16] == second[:16]
    assert first[16:] != second[16:20]
    assert third[:8] == first[8:16]
    assert third[8:] != first[16:18]
    assert last != third


def test_a_seed_says_everything_and_another_one_something_else() -> None:
    assert prompts(TRACE, 1) == prompts(TRACE, 1)
    for one, two in zip(prompts(TRACE, 1), prompts(TRACE, 2), strict=True):
        assert one[:8] != two[:8]


def test_prompts_share_as_much_as_the_trace_says() -> None:
    trace = generate("conversations", 60, 0.5, 2.0, seed=4).scaled(16)
    seen: list[list[int]] = []
    hits = 0
    for prompt in prompts(trace, 3):
        same = (
            next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
            for other in seen
        )
        hits += max((n if n is not None else len(prompt) for n in same), default=0)
        seen.append(prompt)
    assert hits / trace.prompt_tokens == pytest.approx(trace.ideal_hit_rate(), abs=1e-3)


def test_tokens_are_of_the_models_vocabulary(smollm2: str) -> None:
    assert max(WORD_IDS) < resolve_model(smollm2).config.vocab_size


GOOD = Sample(0.1, [0.01, 0.03], 3, 8)
SLOW_FIRST, SLOW_REST = replace(GOOD, ttft_s=0.5), replace(GOOD, gaps_s=[0.01, 0.2])


@pytest.mark.parametrize(
    ("outcomes", "attained", "failed"),
    [
        ([GOOD, GOOD, GOOD, GOOD], 1.0, 0),
        ([GOOD, SLOW_FIRST, SLOW_REST, GOOD], 0.5, 0),
        ([GOOD, Failure("503"), SLOW_REST, GOOD], 0.5, 1),
        ([Failure("503")] * 4, 0.0, 4),
    ],
)
def test_good_requests_keep_both_promises(
    outcomes: list[Outcome], attained: float, failed: int
) -> None:
    found = figures(TRACE, outcomes, ttft_ms=200, tpot_ms=50)
    assert (found["requests"], found["failed"], found["attained"]) == (4, failed, attained)
    assert found["goodput_per_s"] == pytest.approx(attained * 4 / TRACE.span_s)
    assert found["ideal_hit_rate"] == TRACE.ideal_hit_rate()


def test_percentiles_and_the_hit_rate_are_of_what_was_answered() -> None:
    found = figures(TRACE, [GOOD, SLOW_FIRST, Failure("503"), GOOD], ttft_ms=200, tpot_ms=50)
    assert found["hit_rate"] == pytest.approx(24 / 54)
    assert found["ttft_p50_ms"] == pytest.approx(100)
    assert found["ttft_p99_ms"] == pytest.approx(492)
    assert found["itl_p50_ms"] == pytest.approx(20)
    silent = [GOOD, GOOD, GOOD, replace(GOOD, cached_tokens=None)]
    assert "hit_rate" not in figures(TRACE, silent, 200, 50)
    assert "ttft_p50_ms" not in figures(TRACE, [Failure("503")] * 4, 200, 50)


def test_every_figure_of_a_replay_is_in_its_table() -> None:
    found = figures(TRACE, [GOOD] * 4, ttft_ms=200, tpot_ms=50)
    shown = {column.figure for column in SCENARIO.columns}
    assert shown <= found.keys()
    assert found.keys() - shown == {"requests", "itl_p90_ms"}


def test_a_trace_is_cut_and_scaled_before_it_is_replayed(tmp_path: Path) -> None:
    trace = generate("documents", 30, 0.6, 2.0, seed=1)
    write_trace(tmp_path / "trace", trace)
    sent = trace_of(Replay(trace=tmp_path / "trace", first=7, block_tokens=32))
    expected = trace.first(7).scaled(32).requests
    assert [(r.prompt, r.output, r.blocks) for r in sent.requests] == [
        (r.prompt, r.output, r.blocks) for r in expected
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--trace", "FILE"], "for the scenario replay alone"),
        (["online", "--trace", "FILE"], "for the scenario replay alone"),
        (["replay", "--trace", "FILE.missing"], "there is no file"),
        (["replay", "--trace", "FILE", "--first", "0"], "no whole number greater than 0"),
        (["replay", "--trace", "FILE", "--speed", "nan"], "no number greater than 0"),
    ],
)
def test_a_replay_that_makes_no_sense_is_refused(
    tmp_path: Path,
    typed: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace"
    path.touch()
    words = [word.replace("FILE", str(path)) for word in typed]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit) as end:
        arguments()
    assert end.value.code != 0
    assert said in capsys.readouterr().err


@pytest.fixture
def program() -> Iterator[Callable[[], None]]:
    """`python -m benchmarks`, which sees to signals and logs of its process."""
    before = signal.getsignal(signal.SIGTERM)
    yield benchmarks
    signal.signal(signal.SIGTERM, before)
    logging.disable(logging.NOTSET)


def test_a_trace_that_cannot_be_read_starts_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], None]
) -> None:
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    path = tmp_path / "trace"
    path.write_text(line + line.replace("5", '"5"'))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "replay", "--trace", str(path)])
    with pytest.raises(SystemExit, match="line 2: input_length: Expected `int`, got `str`"):
        program()
