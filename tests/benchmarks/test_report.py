"""Results as tables, files and plots."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import report
from benchmarks.aims import AIMS, Aim, table
from benchmarks.figures import Record
from benchmarks.peers.servers import LLAMA_CPP, VLLM
from benchmarks.scenario import Column, Options, Panel, Reporter, Scenario

OURS = [Record("128/1", "diptych", n, {"n": 1, "tps": 40 + n, "tpot_ms": 25}) for n in range(3)]
THEIRS = [Record("128/1", VLLM, n, {"n": 1, "tps": 10, "tpot_ms": 100}) for n in range(3)]


def nothing(options: Options, reporter: Reporter) -> list[Record]:
    return []


def scenario(**changes: object) -> Scenario:
    return Scenario(
        "online", "Online", "About it.",
        (Column("tps", "tokens/s"), Column("absent", "absent")), nothing,
        **{"versus": ("tps",), "panels": (Panel("A", "n", "tps", "128/"),), **changes},  # type: ignore[arg-type]
    )  # fmt: skip


def result(records: list[Record]) -> report.Result:
    return report.Result("online", "a machine", "python -m benchmarks", 0.5, 12.0, records, ["sic"])


def test_figures_are_medians_and_columns_without_any_are_left_out() -> None:
    assert report.figures_table(scenario(), [*OURS, *THEIRS]) == [
        "| case | system | tokens/s |",
        "|---|---|---:|",
        "| 128/1 | diptych | 41.0 (40.0-42.0) |",
        f"| 128/1 | {VLLM} | 10.0 |",
    ]


@pytest.mark.parametrize(
    ("first_is_baseline", "row"),
    [
        (False, f"| 128/1 | diptych / {VLLM} | 4.10 (4.00-4.20) |"),
        (True, f"| 128/1 | {VLLM} / diptych | 0.24 (0.24-0.25) |"),
    ],
)
def test_ratios_say_which_is_above_which(first_is_baseline: bool, row: str) -> None:
    made = scenario(first_is_baseline=first_is_baseline)
    assert report.ratios_table(made, [*OURS, *THEIRS])[2] == row


def test_one_system_alone_has_no_ratios() -> None:
    assert report.ratios_table(scenario(), OURS) == []


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = result([*OURS, *THEIRS])
    report.write(written, tmp_path)
    assert report.read(tmp_path, [scenario()]) == {"online": written}
    assert report.read(tmp_path / "empty", [scenario()]) == {}


def test_the_page_names_machine_command_and_notes() -> None:
    page = report.page({"online": result(OURS)}, [scenario()])
    for text in ("a machine", "`python -m benchmarks`", "- sic", "About it.", "(online.svg)"):
        assert text in page


def test_a_line_of_a_plot_is_sorted_medians() -> None:
    later = [Record("128/4", "diptych", 0, {"n": 4, "tps": 90})]
    other = [Record("512/1", "diptych", 0, {"n": 1, "tps": 7})]
    lines = report.lines_of(scenario().panels[0], [*later, *OURS, *other])
    assert lines == {"diptych": [(1, 41), (4, 90)]}


def test_every_aim_that_was_not_measured_says_so() -> None:
    rows = table({})[2:]
    assert len(rows) == len(AIMS)
    assert all("not measured" in row for row in rows)


@pytest.mark.parametrize(
    ("sign", "bound", "verdict"),
    [(">=", 4.0, "yes"), (">=", 4.2, "**no**"), ("<=", 4.2, "yes"), ("<=", 4.0, "**no**")],
)
def test_an_aim_is_met_or_not(sign: str, bound: float, verdict: str) -> None:
    aim = Aim("faster", sign, bound, "online", "128/1", "tps", other=VLLM)  # type: ignore[arg-type]
    reached = aim.reached([*OURS, *THEIRS])
    assert reached is not None
    assert reached.median == 4.1
    assert ("yes" if aim.met_by(reached.median) else "**no**") == verdict


def test_a_decode_rate_over_llama_cpp_is_its_time_over_ours() -> None:
    theirs = [Record("128/1", LLAMA_CPP, n, {"tpot_ms": 20}) for n in range(3)]
    row = next(row for row in table({"online": [*OURS, *theirs]}) if "llama.cpp" in row)
    assert row.endswith("| >= 0.8x | 0.80x | yes |")
