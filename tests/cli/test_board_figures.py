"""The figures of the live table: read off metrics, and what went on between two looks."""

from __future__ import annotations

from diptych.board.figures import Figures, Pace, pace, read_figures
from diptych.engine_load import Sample

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
    assert found.engines == {
        "d-0": Sample(
            "decode", "d-0", 3, blocks=100, blocks_free=60, generated_tokens=70, received_bytes=2048
        )
    }
    assert (found.answered, found.hand_offs, found.moved_bytes) == (5, 2, 2048)


def test_an_engine_without_a_name_is_found_by_host_and_port() -> None:
    metrics = 'diptych:num_requests_running{engine="decode/tcp://10.0.0.1:7000"} 1\n'
    assert [*read_figures(metrics).engines] == ["10.0.0.1:7000"]


def test_a_pace_is_what_went_on_between_two_looks() -> None:
    engine = Sample("decode", "a", generated_tokens=10)
    before = Figures({"a": engine}, first_tokens=1, first_token_s=1.0)
    again = Sample("decode", "a", generated_tokens=6)  # started anew: its totals begin at zero
    both = {"a": again, "new": Sample("decode", "a", generated_tokens=9)}
    now = Figures(both, first_tokens=3, first_token_s=1.5)
    found = pace(before, now, 2.0, Pace())
    assert found == Pace({"a": 3.0}, 0.25)
    assert pace(now, now, 1.0, found) == Pace({"a": 0.0, "new": 0.0}, 0.25)
