"""The command `diptych bench` against servers that answer, refuse, break off and never end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from cases import each
from click.testing import CliRunner
from waits import PATIENCE_S

from diptych.api_service import find_service
from diptych.bench.command import until_stopped
from diptych.bench.run import Plan, Run
from diptych.bench.stream import Sample
from diptych.bench.workload import Request
from diptych.main import main


@pytest.fixture(autouse=True)
def no_service_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", *arguments])


def dataset(folder: Path, *prompts: str) -> str:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return str(path)


def test_people_get_a_table_and_pictures(small_server: str) -> None:
    result = run(small_server, "-n", "6", "--ttft-ms", "60000")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("MILLISECONDS")
    assert "6 in " in result.stdout
    assert "0 failed" in result.stdout
    assert "100%: first token in 60000 ms" in result.stdout
    assert "█" in result.stdout


def test_programs_get_figures_and_every_request(small_server: str, tmp_path: Path) -> None:
    svg, saved = tmp_path / "run.svg", tmp_path / "run.jsonl"
    files = ("--svg", str(svg), "--save", str(saved))
    result = run(f"{small_server}/v1", "-n", "5", "--rate", "100", "--json", *files)
    assert result.exit_code == 0, result.output
    found = msgspec.json.decode(result.stdout)
    assert (found["requests"], found["failed"], found["tokens_counted"]) == (5, 0, False)
    assert found["output_tokens_per_s"] == pytest.approx(5 * 7 / found["seconds"])
    assert found["ttft_ms"]["p50"] <= found["e2e_ms"]["max"]
    lines = [msgspec.json.decode(line) for line in saved.read_bytes().splitlines()]
    assert [line["outcome"]["output_tokens"] for line in lines] == [7] * 5
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "prefers-color-scheme: dark" in svg.read_text()


@pytest.mark.parametrize(
    ("prompts", "options", "failed", "said"),
    [
        (["a", "refuse"], ["-n", "4"], 2, "2 x HTTP 400: too long"),
        (["break"], ["-n", "3"], 3, "3 x the stream broke off before its end"),
        (["endless"], ["-n", "2", "--timeout", "1"], 2, "2 x no end within 1 s"),
        (["refuse"], ["-n", "1000", "-c", "1"], 50, "50 x HTTP 400"),
    ],
)
def test_failures_are_counted_with_their_reasons(
    small_server: str,
    tmp_path: Path,
    prompts: list[str],
    options: list[str],
    failed: int,
    said: str,
) -> None:
    own = ("--warm-up", "0", "--dataset", dataset(tmp_path, *prompts))
    result = run(small_server, *own, *options)
    assert result.exit_code == 1
    assert f"{failed} failed" in result.stdout
    assert said in result.stdout


def test_after_its_seconds_no_further_request_is_sent(small_server: str) -> None:
    result = run(small_server, "--seconds", "0.5", "--rate", "20", "--json")
    found = msgspec.json.decode(result.stdout)
    assert 1 <= found["requests"] < 20
    assert found["cut_off"] == 0


def test_an_interrupt_ends_the_run_and_leaves_what_there_is(small_server: str) -> None:
    service = find_service(small_server, "small")
    requests = [Request([{"role": "user", "content": text}], 7) for text in ("endless", "a", "b")]
    run = Run(service, Plan(2, PATIENCE_S), lambda _: os.kill(os.getpid(), signal.SIGINT))
    outcome = asyncio.run(until_stopped(run, iter([(0.0, request) for request in requests])))
    assert run.is_stopped
    assert outcome.cut_off >= 1
    assert all(isinstance(sent.outcome, Sample) for sent in outcome.sent)
    assert len(outcome.sent) >= 1


@each(
    ("arguments", "code", "said"),
    [
        (["http://127.0.0.1:1"], 1, "is out of reach"),
        (["not a url"], 2, "is no address of an API"),
        (["http://[::1", "--model", "m"], 2, "is no address of an API"),
        ([], 1, "no service runs here"),
        (["http://127.0.0.1:1", "--prompt-tokens", "0"], 2, "neither a number of tokens"),
        (["http://127.0.0.1:1", "--rate", "0"], 2, "rate"),
        (["http://127.0.0.1:1", "--rate", "nan"], 2, "rate"),
        (["http://127.0.0.1:1", "--seconds", "inf"], 2, "seconds"),
        (["http://127.0.0.1:1", "-c", "0"], 2, "concurrency"),
        (["http://127.0.0.1:1", "--dataset", "/nowhere"], 2, "nowhere"),
        (["http://127.0.0.1:1", "--save", "/nowhere/a"], 2, "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    arguments: list[str], code: int, said: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert said in result.output
