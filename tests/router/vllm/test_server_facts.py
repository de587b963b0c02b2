"""What a router learns from the pages of a vLLM server."""

from __future__ import annotations

import msgspec
import pytest
from vllm_kit.fake_server import METRICS

from diptych_protocol import SchedulerStats
from diptych_router.engines.vllm.busy_time import BusyTime
from diptych_router.engines.vllm.description import (
    ServedModel,
    UnfitServerError,
    check_generate,
    description_of,
)
from diptych_router.engines.vllm.metrics import NoMetricsError, read_metrics

SERVED = ServedModel("tiny", 64)


def test_metrics_become_statistics() -> None:
    figures = read_metrics(METRICS)
    assert (figures.block_size, figures.num_blocks) == (128, 64)
    assert figures.stats == SchedulerStats(
        num_running=2,
        num_waiting=1,
        blocks_total=64,
        blocks_free=48,
        prompt_tokens_computed=172,
        tokens_generated=40,
        prefix_cache_queries=300,
        prefix_cache_hits=128,
        num_preemptions=3,
        steps=17,
    )


def test_the_cores_of_a_server_add_up() -> None:
    figures = read_metrics(METRICS + METRICS.replace('engine="0"', 'engine="1"'))
    assert figures.num_blocks == 128
    assert figures.stats.num_running == 4
    assert figures.stats.blocks_free == 96


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "is it vLLM?"),
        ("# HELP python_info x\npython_info 1.0\n", "is it vLLM?"),
        (METRICS.replace("num_gpu_blocks", "blocks"), "num_gpu_blocks"),
        (METRICS.replace('num_gpu_blocks="64"', 'num_gpu_blocks="None"'), "None"),
        (METRICS.replace('num_gpu_blocks="64"', 'num_gpu_blocks="0"'), "no blocks"),
        (METRICS.replace("} 2.0", "} many"), "many"),
        (METRICS.replace("} 2.0", "} NaN"), "cannot be read"),
        (METRICS.replace("} 0.25", "} NaN"), "no number"),
        (METRICS.replace("} 2.0", "} +Inf"), "cannot be read"),
    ],
)
def test_a_page_that_is_not_vllms_says_why(page: str, said: str) -> None:
    with pytest.raises(NoMetricsError, match=r"metrics|blocks|usage") as refused:
        read_metrics(page)
    assert said in str(refused.value)


def models(*names: str, length: int | None = 512) -> bytes:
    return msgspec.json.encode(
        {"data": [{"id": name, "root": "/m", "max_model_len": length} for name in names]}
    )


VERSION = msgspec.json.encode({"version": "0.32.0"})


def test_a_server_is_described_with_the_revision_among_its_names() -> None:
    figures = read_metrics(METRICS)
    about = description_of(models("tiny", "revision/r7"), VERSION, figures, SERVED, "h:1")
    assert (about.engine_id, about.max_model_len, about.revision) == ("h:1", 512, "r7")
    assert (about.block_size, about.num_blocks, about.vocab_size) == (128, 64, 64)
    assert about.compat["version"] == "0.32.0"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (models("other"), "--served-model-name"),
        (models(), "serves no model"),
        (models("tiny", length=None), "max_model_len"),
        (models("tiny", length=1 << 30), "max_model_len"),
        (b"<html>", "does not speak"),
    ],
)
def test_a_server_that_cannot_serve_is_told_what_to_change(page: bytes, said: str) -> None:
    with pytest.raises(UnfitServerError, match=said):
        description_of(page, VERSION, read_metrics(METRICS), SERVED, "h:1")


@pytest.mark.parametrize("status", [200, 403, 404])
def test_a_server_without_the_endpoint_is_told_its_option(status: int) -> None:
    with pytest.raises(UnfitServerError, match="--enable-scale-out"):
        check_generate(status)
    check_generate(405)


def test_time_counts_while_requests_are_open_or_reports_say_that_some_run() -> None:
    busy = BusyTime()
    assert busy.reported(10.0, runs=False) == 0
    busy.opened(20.0)
    busy.opened(21.0)
    busy.ended(22.0)
    assert busy.reported(23.0, runs=True) == 3
    busy.ended(24.0)
    assert busy.reported(25.0, runs=True) == 5, "somebody else's run on"
    assert busy.reported(30.0, runs=False) == 5
