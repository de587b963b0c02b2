"""What `diptych bench` asks, and what it makes of the answers."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path

import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diptych.bench.figures import Goal, Sent, rates, summary
from diptych.bench.stream import Sample
from diptych.bench.view import histogram, shown, sparkline
from diptych.bench.workload import Lengths, arrivals, made_up, of_file
from diptych.errors import BadInputError

QUICK = Sample(0.1, [0.01, 0.03], 3, cached_tokens=5, prompt_tokens=10)
SLOW = Sample(0.4, [0.1, 0.1], 3, cached_tokens=0, prompt_tokens=10)
RUN = [Sent(0.0, QUICK), Sent(0.5, SLOW), Sent(1.0, "HTTP 503: full"), Sent(1.0, "HTTP 503: full")]


def test_a_run_is_summed_up_in_milliseconds_and_per_second() -> None:
    found = summary(RUN, 2.0, Goal(ttft_ms=200, inter_token_ms=50), cut_off=1)
    assert (found.requests, found.failed, found.cut_off) == (4, 2, 1)
    assert found.reasons == {"HTTP 503: full": 2}
    assert (found.requests_per_s, found.prompt_tokens_per_s) == (1.0, 10.0)
    assert (found.output_tokens_per_s, found.cached_share) == (3.0, 0.25)
    assert (found.good, found.goodput_per_s) == (0.25, 0.5)
    assert found.ttft_ms is not None
    assert found.inter_token_ms is not None
    assert found.e2e_ms is not None
    assert found.ttft_ms.p50 == pytest.approx(250)
    assert found.ttft_ms.max == 400
    assert found.inter_token_ms.mean == pytest.approx(60)
    assert found.e2e_ms.max == pytest.approx(600)


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        (Goal(), 2),
        (Goal(ttft_ms=400), 2),
        (Goal(ttft_ms=399), 1),
        (Goal(inter_token_ms=20), 1),
        (Goal(inter_token_ms=19), 0),
        (Goal(ttft_ms=100, inter_token_ms=100), 1),
    ],
)
def test_an_answer_is_good_if_it_keeps_all_of_the_goal(goal: Goal, good: int) -> None:
    assert summary(RUN, 1.0, goal).goodput_per_s == good


def test_what_a_server_does_not_say_is_unknown_and_not_zero() -> None:
    silent = Sample(0.1, [0.1], 2)
    found = summary([Sent(0.0, silent), Sent(0.0, QUICK)], 1.0, Goal())
    assert (found.prompt_tokens_per_s, found.cached_share) == (None, None)
    assert found.tokens_counted
    nothing = summary([], 1.0, Goal())
    assert (nothing.ttft_ms, nothing.good, nothing.requests_per_s) == (None, None, 0)


def test_rates_are_of_the_moments_at_which_tokens_came() -> None:
    # 0.1 s, 0.11 s, 0.14 s; and from 0.5 s on: 0.9 s, 1.0 s, 1.1 s
    assert rates(RUN, 2.0, buckets=4) == [6.0, 2.0, 4.0, 0.0]
    assert sum(rates(RUN, 1.0)) == pytest.approx(6 * 60)  # the last part has what came later


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200))
def test_bars_count_every_value(values: list[float]) -> None:
    text = printed(histogram("times", values))
    assert sum(int(line.split()[-1]) for line in text.splitlines()[1:]) == len(values)


def test_a_line_of_letters_is_as_high_as_its_values() -> None:
    assert sparkline([0, 1, 8]) == " ▁█"
    assert sparkline([0, 0]) == "  "


def test_people_see_times_totals_goodput_and_why_requests_failed() -> None:
    goal = Goal(ttft_ms=200, inter_token_ms=50)
    text = printed(shown(summary(RUN, 2.0, goal), RUN, goal))
    assert "time to first token   250.0  250.0  370.0  397.0  400.0" in text
    assert "4 in 2.0 s, 2 failed" in text
    assert "0.50/s, 25%: first token in 200 ms, others 50 ms each" in text
    assert "2 x HTTP 503: full" in text
    assert "prompt tokens cached  25%" in text
    assert printed(shown(summary([], 1.0, goal), [], goal))


def printed(picture: object) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


@pytest.mark.parametrize(
    ("text", "least", "most"), [("7", 7, 7), ("64:128", 64, 128), (" 5:5 ", 5, 5)]
)
def test_lengths_are_a_number_or_a_range(text: str, least: int, most: int) -> None:
    assert Lengths.parse(text) == Lengths(least, most)


@each("text", ["", "0", "-1", "5:4", "1:2:3", "many", "1.5", "9999999", "٣"])
def test_anything_else_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number of tokens nor a range"):
        Lengths.parse(text)


def test_one_seed_is_one_workload() -> None:
    def texts(seed: int, shared: int = 0) -> list[str]:
        some = islice(made_up(Lengths(8, 16), Lengths(1, 9), shared, seed), 5)
        return [request.messages[0]["content"] for request in some]

    assert texts(1) == texts(1)
    assert not set(texts(1)) & set(texts(2))
    assert all(8 <= len(text.split()) <= 16 for text in texts(3))
    assert len({tuple(text.split()[:6]) for text in texts(4, shared=6)}) == 1
    assert len(set(texts(4, shared=6))) == 5


def test_arrivals_are_at_random_with_the_rate_asked_for() -> None:
    times = list(islice(arrivals(10.0, seed=1), 5001))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.05)
    assert list(islice(arrivals(None, 1), 3)) == [0.0] * 3


def test_a_file_of_requests_is_read_in_an_order_that_the_seed_decides(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    said = [{"role": "user", "content": "b"}]
    lines = [{"prompt": "a"}, {"messages": said, "max_tokens": 3}, {"prompt": "c"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = of_file(path, Lengths(7, 7), 0)
    by_text = {request.messages[0]["content"]: request.max_tokens for request in found}
    assert by_text == {"a": 7, "b": 3, "c": 7}
    assert of_file(path, Lengths(7, 7), 0) == found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        ('{"prompt": 3}', "line 2: "),
        ("{}", "line 2: give either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "line 2: give either prompt or messages"),
        ('{"prompt": "a", "max_tokens": -1}', "line 2: max_tokens must be 1 to"),
        ('{"prompt": "a", "top_p": 1}', "line 2: .*top_p"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(BadInputError, match=said):
        of_file(path, Lengths(1, 1), 0)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BadInputError, match="has no requests"):
        of_file(tmp_path / "empty", Lengths(1, 1), 0)
