"""The load client: its prompts, and how it reads answers."""

from __future__ import annotations

import itertools
import json

import pytest
from benchmarks.load import Load, Sample, prompts, read_stream, summary
from hypothesis import given
from hypothesis import strategies as st


def events(tokens: int) -> list[bytes]:
    """As a server sends them: one for each token, the usage, the end."""
    said = [{"choices": [{"text": "a"}]} for _ in range(tokens)]
    last = {"choices": [], "usage": {"completion_tokens": tokens}}
    return [*(b"data: %s\n\n" % json.dumps(e).encode() for e in [*said, last]), b"data: [DONE]\n\n"]


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


def test_times_are_those_of_the_pieces_that_end_an_event() -> None:
    pieces = zip((1.0, 1.5, 2.5, 2.6, 2.7), events(3), strict=True)
    sample = read_stream(list(pieces), 3)
    assert sample == Sample(1.0, [0.5, 1.0], 3)
    assert sample.tpot_s == 0.75


@given(st.lists(st.integers(1, 300), max_size=8))
def test_it_does_not_matter_where_a_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(events(4))
    edges = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})
    pieces = [(float(a), stream[a:b]) for a, b in itertools.pairwise(edges)]
    sample = read_stream(pieces, 4)
    assert sample.output_tokens == 4
    assert len(sample.gaps_s) == 3


@pytest.mark.parametrize(
    "pieces", [events(2), events(3)[:-2], []], ids=["too few", "cut off", "nothing"]
)
def test_an_answer_that_is_not_whole_is_an_error(pieces: list[bytes]) -> None:
    with pytest.raises(RuntimeError, match="instead of 3"):
        read_stream([(0.0, piece) for piece in pieces], 3)


def test_the_summary_is_in_milliseconds_and_tokens_a_second() -> None:
    samples = [Sample(0.1, [0.01, 0.03], 3), Sample(0.3, [0.02, 0.02], 3)]
    figures = summary(Load(2, 16, 3), samples, wall_s=0.5)
    assert figures["ttft_ms"] == pytest.approx(200)
    assert figures["tpot_ms"] == pytest.approx(20)
    assert figures["itl_p99_ms"] == pytest.approx(29.7)
    assert figures["tokens_per_s"] == pytest.approx(12)
