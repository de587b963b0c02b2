"""The load client: its prompts, and how it reads answers."""

from __future__ import annotations

import pytest
from benchmarks.load import Load, prompts, summary

from diptych.bench.stream import Sample


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    load = Load(4, 128, requests=8)
    assert prompts(load, 1) == prompts(load, 1)
    assert [len(prompt) for prompt in prompts(load, 1)] == [128] * 8
    assert not {tuple(p) for p in prompts(load, 1)} & {tuple(p) for p in prompts(load, 2)}


def test_shared_prompts_differ_only_at_their_ends() -> None:
    made = prompts(Load(4, 64, shared_tokens=48), 3)
    assert len(made) == 4
    assert len({tuple(prompt[:48]) for prompt in made}) == 1
    assert len({tuple(prompt[48:]) for prompt in made}) == 4


def test_the_summary_is_in_milliseconds_and_tokens_a_second() -> None:
    samples = [Sample(0.1, [0.01, 0.03], 3), Sample(0.3, [0.02, 0.02], 3)]
    figures = summary(Load(2, 16, 3), samples, wall_s=0.5)
    assert figures["ttft_ms"] == pytest.approx(200)
    assert figures["tpot_ms"] == pytest.approx(20)
    assert figures["itl_p99_ms"] == pytest.approx(29.7)
    assert figures["tokens_per_s"] == pytest.approx(12)
