"""The live table as text: what it says of pods, at the widths of terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from diptych.board.figures import EngineFigures, Figures, Pace, pace, read_figures
from diptych.board.picture import Picture, PodRow, drawn
from diptych.laptop.lifecycle import Phase

PODS = [
    PodRow("smollm2-135m-router-0", "router", Phase.READY, 0),
    PodRow("smollm2-135m-prefill-0", "prefill", Phase.READY, 0),
    PodRow("smollm2-135m-decode-0", "decode", Phase.BACKING_OFF, 2, waited_s=3),
    PodRow("smollm2-135m-decode-1", "decode", Phase.STARTING, 0, waited_s=12),
    PodRow("vllm-decode-0", "decode", Phase.NOT_READY, 1, "127.0.0.1:8000", 0),
]
FIGURES = Figures(
    engines={
        "smollm2-135m-prefill-0": EngineFigures(4, 1, 120, 2912, 67),
        "127.0.0.1:8000": EngineFigures(0, 16, 1900, 2000, 5000),
    },
    answered=12,
    hand_offs=13,
    moved_bytes=14_400_000,
    first_tokens=9,
    first_token_s=1.5,
)
PACE = Pace({"smollm2-135m-prefill-0": 210.5, "127.0.0.1:8000": 45.25}, 0.0984)


def text(picture: Picture, columns: int) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    with console.capture() as capture:
        console.print(drawn(picture, columns))
    return [line.rstrip() for line in capture.get().splitlines()]


EIGHTY = """\
POD                ROLE    STATE         RESTARTS QUEUE ROWS    BLOCKS TOKENS/S
…lm2-135m-router-0 router  ready                0     -    -         -        -
…m2-135m-prefill-0 prefill ready                0     4    1  120/2912    210.5
…lm2-135m-decode-0 decode  restarting 3s        2     -    -         -        -
…lm2-135m-decode-1 decode  starting 12s         0     -    -         -        -
vllm-decode-0      decode  not ready 0s         1     0   16 1900/2000     45.2
requests 12, hand-offs 13, moved 14.4 MB, first token 98 ms, 255.8 tokens/s
""".splitlines()
WIDE = """\
POD                     ROLE     STATE          RESTARTS  QUEUE  ROWS     BLOCKS  TOKENS/S
smollm2-135m-router-0   router   ready                 0      -     -          -         -
smollm2-135m-prefill-0  prefill  ready                 0      4     1   120/2912     210.5
smollm2-135m-decode-0   decode   restarting 3s         2      -     -          -         -
smollm2-135m-decode-1   decode   starting 12s          0      -     -          -         -
vllm-decode-0           decode   not ready 0s          1      0    16  1900/2000      45.2
requests 12, hand-offs 13, moved 14.4 MB, first token 98 ms, 255.8 tokens/s
""".splitlines()


@pytest.mark.parametrize(("columns", "lines"), [(80, EIGHTY), (120, WIDE)])
def test_the_table_fits_the_terminal(columns: int, lines: list[str]) -> None:
    assert text(Picture(PODS, FIGURES, PACE), columns) == lines


def test_the_last_table_says_that_the_service_has_ended() -> None:
    crashed = PodRow("small-prefill-0", "prefill", Phase.CRASHED, 2)
    lines = text(Picture([*PODS[:2], crashed], FIGURES, PACE, ended=True), 120)
    assert [line.split()[2] for line in lines[1:4]] == ["ended", "ended", "crashed"]


METRICS = """\
# TYPE diptych:num_requests_running gauge
diptych:num_requests_running{engine="decode/d-0"} 3
# TYPE diptych:kv_cache_blocks gauge
diptych:kv_cache_blocks{engine="decode/d-0"} 100
# TYPE diptych:kv_cache_blocks_free gauge
diptych:kv_cache_blocks_free{engine="decode/d-0"} 60
# TYPE diptych:engine_tokens_generated_total counter
diptych:engine_tokens_generated_total{engine="decode/d-0"} 70
# TYPE diptych:kv_transfer_bytes_received_total counter
diptych:kv_transfer_bytes_received_total{engine="decode/d-0"} 2048
# TYPE diptych:kv_transfer_loads_total counter
diptych:kv_transfer_loads_total{engine="decode/d-0",outcome="completed"} 2
diptych:kv_transfer_loads_total{engine="decode/d-0",outcome="failed"} 1
# TYPE diptych:request_success_total counter
diptych:request_success_total{finished_reason="stop"} 4
diptych:request_success_total{finished_reason="length"} 1
"""


def test_the_figures_are_read_off_the_metrics_of_a_router() -> None:
    found = read_figures(METRICS)
    assert found.engines == {"d-0": EngineFigures(0, 3, 40, 100, 70)}
    assert (found.answered, found.hand_offs, found.moved_bytes) == (5, 2, 2048)


def test_a_pace_is_what_went_on_between_two_looks() -> None:
    before = Figures({"a": EngineFigures(tokens=10)}, first_tokens=1, first_token_s=1.0)
    again = EngineFigures(tokens=6)  # started anew: its totals begin at zero
    both = {"a": again, "new": EngineFigures(tokens=9)}
    now = Figures(both, first_tokens=3, first_token_s=1.5)
    found = pace(before, now, 2.0, Pace())
    assert found == Pace({"a": 3.0}, 0.25)
    assert pace(now, now, 1.0, found) == Pace({"a": 0.0, "new": 0.0}, 0.25)
