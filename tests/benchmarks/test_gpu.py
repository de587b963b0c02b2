"""`make gpu` makes good use of a GPU that is lent for minutes: here it is rehearsed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import wheels
from benchmarks.gpu.__main__ import environment_of_stages, failure_of
from benchmarks.gpu.stages import STAGES, TOTAL_S, chosen
from benchmarks.gpu.table import table

ROOT = Path(__file__).parents[2]
REHEARSAL_S = 1500
"""Triton's interpreter takes its time."""


def test_all_stages_fit_into_the_time_of_a_run() -> None:
    assert sum(stage.seconds for stage in STAGES.values()) <= TOTAL_S


def test_stages_are_chosen_by_number() -> None:
    assert chosen("") == list(STAGES)
    assert chosen("6, 3") == [6, 3]
    with pytest.raises(SystemExit, match="no stage 99, x"):
        chosen("3,99,x")


def test_what_a_gpu_machine_lacks_is_what_the_project_pins() -> None:
    pins = wheels.pinned((ROOT / "pyproject.toml").read_text(), [*wheels.LACKING, wheels.UCX])
    assert all("==" in pin for pin in pins)
    assert len(pins) == len(wheels.LACKING) + 1


SHOW_IMPORTS = """
import importlib, json, re, sys
from importlib.metadata import packages_distributions
from benchmarks.gpu.first import MODULES
for name in MODULES:
    importlib.import_module(name)
owners = packages_distributions()
tops = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([re.sub("[-_.]+", "-", owners[top][0]).lower() for top in tops if top in owners]))
"""


def test_what_stages_import_is_there_or_travels(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SHOW_IMPORTS],
        cwd=ROOT, env=environment_of_stages(tmp_path, dry=True), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    known = {*wheels.LACKING, *wheels.THERE, wheels.UCX, "diptych"}
    known |= {"sentencepiece"}  # gguf imports it only where it is there
    assert not set(json.loads(run.stdout)) - known


def test_a_stage_that_takes_too_long_costs_only_itself(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    environment = environment_of_stages(tmp_path, dry=True)
    with (tmp_path / "log").open("wb") as log:
        error = failure_of(6, lines, environment, 1.0, log, dry=True)
    assert error == "killed after 1 s"


LINES: list[dict[str, Any]] = [
    {"stage": 2, "what": "a launch", "host_us": 3.14159},
    {"stage": 2, "what": "end", "seconds": 4.0},
    {"stage": 3, "what": "rope", "rows": 33, "error": "wrong"},
    {"stage": 3, "what": "end", "seconds": 1.5, "error": "exit status 1"},
]
AGAIN = [{"stage": 3, "what": "rope", "rows": 33}, {"stage": 3, "what": "end", "seconds": 2.5}]


def test_the_table_begins_with_what_failed() -> None:
    page = table("\n".join(map(json.dumps, LINES)))
    failed, _, rest = page.partition("## 2. ceilings, 4.0 s")
    assert "- 3: **rope** rows 33; error wrong" in failed
    assert "- 3: **end** seconds 1.5; error exit status 1" in failed
    assert "- 2: **a launch** host_us 3.142" in rest
    assert "## 3. kernels beside float64, 1.5 s" in rest


def test_the_table_has_the_latest_run_of_each_stage() -> None:
    page = table("\n".join([*map(json.dumps, LINES), '{"stage": 3, "wh', *map(json.dumps, AGAIN)]))
    assert "Failed" not in page
    assert "## 3. kernels beside float64, 2.5 s" in page
    assert "## 2. ceilings, 4.0 s" in page


@pytest.mark.slow
@pytest.mark.timeout(REHEARSAL_S)
def test_every_stage_ends_well_on_a_simulated_device(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = (tmp_path / "stages.log").read_text()
    assert run.returncode == 0, run.stdout + run.stderr + log
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines if line["what"] == "end"] == list(STAGES)
    assert not [line for line in lines if "error" in line]
    for number in STAGES:
        assert [line for line in lines if line["stage"] == number and line["what"] != "end"]
    assert (tmp_path / "table.md").read_text().count("\n## ") == len(STAGES)


@pytest.mark.slow
def test_without_a_gpu_a_stage_says_so(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", tmp_path, "--stage", "2"],
        cwd=ROOT, env=environment_of_stages(tmp_path, dry=True), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "DRY=1 rehearses" in run.stderr
