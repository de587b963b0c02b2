"""The live table as text: what it says of pods, at the widths of terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from diptych.board.figures import Figures, Pace
from diptych.board.picture import Picture, PodRow, drawn
from diptych.engine_load import Sample
from diptych.laptop.lifecycle import Phase

PODS = [
    PodRow("smollm2-135m-router-0", "router", Phase.READY, 0),
    PodRow("smollm2-135m-prefill-0", "prefill", Phase.READY, 0),
    PodRow("smollm2-135m-decode-0", "decode", Phase.BACKING_OFF, 2, waited_s=3),
    PodRow("smollm2-135m-decode-1", "decode", Phase.STARTING, 0, waited_s=12, doing="compiling"),
    PodRow("vllm-decode-0", "decode", Phase.NOT_READY, 1, 0),
]
FIGURES = Figures(
    engines={
        "smollm2-135m-prefill-0": Sample(
            "prefill", "smollm2-135m-prefill-0", 1, 4, blocks=2912, blocks_free=2792
        ),
        "vllm-decode-0": Sample("decode", "vllm-decode-0", 16, blocks=2000, blocks_free=100),
    },
    answered=12,
    hand_offs=13,
    moved_bytes=14_400_000,
    first_tokens=9,
    first_token_s=1.5,
)
PACE = Pace({"smollm2-135m-prefill-0": 210.5, "vllm-decode-0": 45.25}, 0.0984)


def text(picture: Picture, columns: int, rows: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    with console.capture() as capture:
        console.print(drawn(picture, columns, rows))
    return [line.rstrip() for line in capture.get().splitlines()]


EIGHTY = """\
POD                    STATE         RESTARTS QUEUE ROWS    BLOCKS TOKENS/S
smollm2-135m-router-0  ready                0     -    -         -        -
smollm2-135m-prefill-0 ready                0     4    1  120/2912    210.5
smollm2-135m-decode-0  restarting 3s        2     -    -         -        -
smollm2-135m-decode-1  starting 12s         0     -    -         -        -
vllm-decode-0          not ready 0s         1     0   16 1900/2000     45.2
smollm2-135m-decode-1: compiling
requests 12, hand-offs 13, moved 14.4 MB, first token 98 ms, 255.8 tokens/s
""".splitlines()
FORTY = """\
POD                    STATE
smollm2-135m-router-0  ready
smollm2-135m-prefill-0 ready
smollm2-135m-decode-0  restarting 3s
smollm2-135m-decode-1  starting 12s
vllm-decode-0          not ready 0s
smollm2-135m-decode-1: compiling
requests 12, hand-offs 13, moved 14.4
MB, first token 98 ms, 255.8 tokens/s
""".splitlines()
SIXTY = """\
POD                    STATE            BLOCKS TOKENS/S
smollm2-135m-router-0  ready                 -        -
smollm2-135m-prefill-0 ready          120/2912    210.5
smollm2-135m-decode-0  restarting 3s         -        -
smollm2-135m-decode-1  starting 12s          -        -
vllm-decode-0          not ready 0s  1900/2000     45.2
smollm2-135m-decode-1: compiling
requests 12, hand-offs 13, moved 14.4 MB, first token 98 ms,
255.8 tokens/s
""".splitlines()
WIDE = """\
POD                     ROLE     STATE          RESTARTS  QUEUE  ROWS     BLOCKS  TOKENS/S
smollm2-135m-router-0   router   ready                 0      -     -          -         -
smollm2-135m-prefill-0  prefill  ready                 0      4     1   120/2912     210.5
smollm2-135m-decode-0   decode   restarting 3s         2      -     -          -         -
smollm2-135m-decode-1   decode   starting 12s          0      -     -          -         -
vllm-decode-0           decode   not ready 0s          1      0    16  1900/2000      45.2
smollm2-135m-decode-1: compiling
requests 12, hand-offs 13, moved 14.4 MB, first token 98 ms, 255.8 tokens/s
""".splitlines()


@pytest.mark.parametrize(
    ("columns", "lines"), [(40, FORTY), (60, SIXTY), (80, EIGHTY), (120, WIDE)]
)
def test_the_table_fits_the_terminal(columns: int, lines: list[str]) -> None:
    assert text(Picture(PODS, FIGURES, PACE), columns) == lines
    assert max(map(len, lines)) <= columns


FEW_LINES = """\
POD                   STATE
smollm2-135m-decode-0 restarting 3s
smollm2-135m-decode-1 starting 12s
… and 3 more
requests 12, hand-offs 13, moved 14.4
MB, first token 98 ms, 255.8 tokens/s
""".splitlines()


@pytest.mark.parametrize(
    ("rows", "lines"),
    [(6, FEW_LINES), (8, [*FORTY[:6], *FORTY[7:]]), (9, FORTY), (10, FORTY)],
)
def test_a_low_terminal_has_no_room_for_what_pods_do_and_then_for_some_that_are_ready(
    rows: int, lines: list[str]
) -> None:
    assert text(Picture(PODS, FIGURES, PACE), 40, rows) == lines


@pytest.mark.parametrize("columns", [80, 120])
def test_a_long_name_is_cut_before_a_figure_is(columns: int) -> None:
    pod = PodRow("a-very-long-name-" * 7 + "9", "decode", Phase.BACKING_OFF, 99, waited_s=30)
    head, row, *_ = text(Picture([pod]), columns)
    assert head.endswith("TOKENS/S")
    assert "restarting 30s" in row
    assert row.startswith("…")
    assert row.split()[0].endswith("long-name-9"), "the end tells pods apart"


def test_a_service_that_has_ended_keeps_its_last_figures() -> None:
    lines = text(Picture(PODS, FIGURES, PACE, ended=True), 120)
    assert [line.split()[2] for line in lines[1:6]] == ["ended"] * 5
    assert "requests 12" in lines[-1]


def test_a_pod_that_a_router_gave_the_other_role_shows_what_it_does() -> None:
    turned = Sample("prefill", "vllm-decode-0")
    pods = [PodRow("vllm-decode-0", "decode", Phase.READY, 0)]
    line = text(Picture(pods, Figures(engines={"vllm-decode-0": turned})), 120)[1]
    assert line.split()[:2] == ["vllm-decode-0", "prefill"]
