"""Traces: files of both formats, what they share at best, and those that are made."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.simulate.__main__ import main as simulate
from benchmarks.traces.formats import TraceError, read_trace, write_trace
from benchmarks.traces.generate import KINDS, generate
from benchmarks.traces.recorded import BLOCK_TOKENS, Trace, TraceRequest
from hypothesis import given, note, settings
from hypothesis import strategies as st

MOONCAKE = b"""\
{"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [7, 8, 10]}
{"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [7, 8], "model": {"a": 1}}

{"timestamp": 5999.5, "input_length": 12, "output_length": 3, "hash_ids": [11]}
"""
AZURE = b"""\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.0319600,3180,8\r
"""


def written(folder: Path, data: bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(data)
    return path


def test_a_trace_of_mooncake_is_read_in_the_order_of_arrivals(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, MOONCAKE)).requests == [
        TraceRequest(0.0, 1024, 1, (7, 8)),
        TraceRequest(3.0, 1100, 52, (7, 8, 10)),
        TraceRequest(5.9995, 12, 3, (11,)),
    ]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(AZURE, id="as published"),
        pytest.param(b"\xef\xbb\xbf" + AZURE.replace(b"\r", b""), id="with a byte order mark"),
        pytest.param(AZURE.replace(b"600,", b"600+00:00,"), id="with a time zone, as in 2024"),
        pytest.param(
            b"\n".join(b"x," + line for line in AZURE.splitlines()), id="with another column"
        ),
    ],
)
def test_a_trace_of_azure_is_read_from_its_first_arrival(tmp_path: Path, data: bytes) -> None:
    first, second = read_trace(written(tmp_path, data)).requests
    assert first == TraceRequest(0.0, 4808, 10)
    assert second.arrival == pytest.approx(0.052, abs=1e-6)
    assert (second.prompt, second.output, second.blocks) == (3180, 8, ())


LINE = b'{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'
ROW = b"2023-11-16 18:17:05,5,6"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (LINE.replace(b"600", b"0"), "line 2: input_length: Expected `int` >= 1"),
        (LINE.replace(b"600", b'"600"'), "line 2: input_length: Expected `int`, got `str`"),
        (LINE.replace(b"600", b"true"), "line 2: input_length: Expected `int`, got `bool`"),
        (LINE.replace(b"600", b"1" + b"0" * 30), "line 2: input_length: "),
        (LINE.replace(b"600", b"50"), "line 2: hash_ids: 2 blocks of 512 tokens are more than"),
        (LINE.replace(b"2]", b"null]"), r"line 2: hash_ids\[1\]: Expected `int`, got `null`"),
        (LINE.replace(b": 1,", b": 1e400,"), "line 2: timestamp: "),
        (LINE.replace(b": 1,", b": -1,"), "line 2: timestamp: "),
        (LINE.replace(b": 1,", b": NaN,"), "line 2: "),
        (LINE.replace(b'"output_length": 1, ', b""), "line 2: .*`output_length`"),
        (LINE.replace(b"600", b'600, "a": ' + b"[" * 100_000), "line 2: "),
        (LINE[:-1], "line 2: "),
        (b"[]", "line 2: "),
        (b'{"\xff": 1}', "line 2: "),
    ],
)
def test_a_line_that_is_no_request_says_its_number_and_field(
    tmp_path: Path, line: bytes, said: str
) -> None:
    with pytest.raises(TraceError, match=f"trace, {said}"):
        read_trace(written(tmp_path, LINE + b"\n" + line + b"\n" + LINE))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW.replace(b"5,6", b"five,6"), "line 4: ContextTokens: Expected `int`, got `str`"),
        (ROW.replace(b"5,6", b"0,6"), "line 4: ContextTokens: Expected `int` >= 1"),
        (ROW.replace(b",6", b""), "line 4: GeneratedTokens: Expected `int`, got `null`"),
        (ROW.replace(b"2023-11-16", b"today"), "line 4: TIMESTAMP: "),
        (b"1" * 200_000 + b",5,6", "line 4: field larger"),
    ],
)
def test_a_row_that_is_no_request_says_its_number_and_field(
    tmp_path: Path, row: bytes, said: str
) -> None:
    with pytest.raises(TraceError, match=f"trace, {said}"):
        read_trace(written(tmp_path, AZURE + row))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither a JSON object nor a table"),
        (b"TIMESTAMP,ContextTokens\n1,2\n", "neither a JSON object nor a table"),
        (AZURE.splitlines()[0], "at least one request"),
    ],
)
def test_a_file_without_requests_is_no_trace(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(written(tmp_path, data))


@given(st.binary(max_size=200), st.sampled_from([b"{", b"TIMESTAMP,ContextTokens,GeneratedTokens"]))
def test_whatever_a_file_has_in_it_nothing_but_its_error_is_raised(
    tmp_path: Path, data: bytes, begin: bytes
) -> None:
    try:
        read_trace(written(tmp_path, begin + data))
    except TraceError as exc:
        assert "line " in str(exc) or "at least one" in str(exc)  # noqa: PT017


blocks = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
shared = st.builds(
    lambda arrival, ids, last: TraceRequest(arrival, 8 * (len(ids) - 1) + last, 1, ids),
    st.integers(0, 50).map(float),
    blocks,
    st.integers(1, 8),
)


def words(trace: Trace, request: TraceRequest) -> list[tuple[int, int]]:
    """A prompt, token by token, as its blocks say."""
    said = [(block, at) for block in request.blocks for at in range(trace.block_tokens)]
    return said[: request.prompt]


def common(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> int:
    pairs = zip(one, two, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(st.lists(shared, min_size=1, max_size=12))
def test_the_ideal_hit_rate_is_of_the_longest_beginning_that_was_there_before(
    requests: list[TraceRequest],
) -> None:
    trace = Trace(Trace.of(requests).requests, block_tokens=8)
    prompts = [words(trace, request) for request in trace.requests]
    hits = sum(
        max((common(prompt, earlier) for earlier in prompts[:number]), default=0)
        for number, prompt in enumerate(prompts)
    )
    assert trace.ideal_hit_rate() == pytest.approx(hits / sum(map(len, prompts)))


def test_lengths_and_times_are_scaled_and_what_is_shared_stays_shared() -> None:
    trace = generate("agents", 50, 0.6, 2.0, seed=1)
    small = trace.scaled(32).faster(4)
    assert small.span_s == pytest.approx(trace.span_s / 4)
    assert small.requests_per_s == pytest.approx(trace.requests_per_s * 4)
    assert small.prompt_tokens == pytest.approx(trace.prompt_tokens / 16, rel=0.01)
    assert small.ideal_hit_rate() == pytest.approx(trace.ideal_hit_rate(), abs=0.01)
    assert [r.blocks for r in small.requests] == [r.blocks for r in trace.requests]
    assert [r.prompt for r in small.first(3).requests] == [
        max(1, round(r.prompt / 16)) for r in trace.requests[:3]
    ]


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.floats(0.05, 0.8), st.integers(300, 600), st.integers(0, 1 << 31))
def test_a_made_trace_has_the_hit_rate_that_was_asked_for(
    kind: str, hit_rate: float, count: int, seed: int
) -> None:
    trace = generate(kind, count, hit_rate, 3.4, seed)
    note(f"{kind}, seed {seed}: {trace.facts()}")
    assert len(trace.requests) == count
    assert trace.ideal_hit_rate() == pytest.approx(hit_rate, abs=0.03)
    for request in trace.requests:
        assert len(request.blocks) == -(-request.prompt // BLOCK_TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_says_everything_and_another_one_something_else(kind: str) -> None:
    assert generate(kind, 50, 0.5, 2.0, 1) == generate(kind, 50, 0.5, 2.0, 1)
    assert generate(kind, 50, 0.5, 2.0, 1) != generate(kind, 50, 0.5, 2.0, 2)


def test_a_turn_of_a_conversation_begins_with_the_one_before_it() -> None:
    trace = generate("conversations", 200, 0.6, 2.0, seed=1)
    begun = {request.blocks[0]: request for request in reversed(trace.requests)}
    later = [r for r in trace.requests if r is not begun[r.blocks[0]]]
    assert later
    for request in later:
        first = begun[request.blocks[0]]
        whole = first.prompt // BLOCK_TOKENS
        assert request.blocks[:whole] == first.blocks[:whole]
        assert request.prompt > first.prompt


def test_the_program_writes_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    ask = ["agents", "--hit-rate", "0.5", "--requests", "100", "--out", str(path)]
    program = [sys.executable, "-m", "benchmarks.traces"]
    made = subprocess.run([*program, "make", *ask], capture_output=True, text=True, check=True)
    shown = subprocess.run(
        [*program, "show", str(path)], capture_output=True, text=True, check=True
    )
    assert made.stdout == shown.stdout
    trace = read_trace(path)
    assert trace.facts() in shown.stdout
    write_trace(tmp_path / "again", trace)
    assert read_trace(tmp_path / "again") == trace


def test_the_simulator_replays_a_trace_and_says_what_it_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = generate("documents", 60, 0.6, 2.0, seed=2)
    write_trace(tmp_path / "trace", trace)
    command = ["run", "--trace", str(tmp_path / "trace"), "--speed", "1", "4", "--first", "50"]
    monkeypatch.setattr(sys, "argv", ["simulate", *command, "--json"])
    simulate()
    answer = json.loads(capsys.readouterr().out)
    assert answer["ideal_hit_rate"] == pytest.approx(trace.first(50).ideal_hit_rate(), abs=1e-3)
    slow, fast = answer["results"]
    assert [result["requests"] for result in (slow, fast)] == [50, 50]
    assert fast["load"] == pytest.approx(4 * slow["load"])
    for result in (slow, fast):
        assert 0 < result["hit_rate"] <= answer["ideal_hit_rate"]
        assert result["failed"] == 0
        assert {"ttft_ms", "itl_ms", "goodput_per_s", "attained"} <= result.keys()


def test_the_simulator_says_which_line_is_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, LINE + b"\n{}")
    monkeypatch.setattr(sys, "argv", ["simulate", "run", "--trace", str(path)])
    with pytest.raises(SystemExit, match="line 2"):
        simulate()
