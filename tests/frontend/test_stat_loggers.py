"""Statistics reach their receivers message by message."""

from __future__ import annotations

import logging

import pytest
from engine_kit.stat_logger import RecordingLogger
from engine_kit.wire import request

from diptych_frontend.observability.stat_loggers import IterationWatch, StatLoggerManager
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
)

CONFIG = EngineConfig("dummy://", engine_id="engine")


def message(*outputs: EngineCoreOutput) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs))


def test_times_are_those_between_messages() -> None:
    now = [10.0]
    watch = IterationWatch(lambda: now[0])
    watch.begin(request("r", [1, 2, 3]))
    now[0] = 12.0
    first = watch.take(message(EngineCoreOutput("r", [7])))
    now[0] = 12.5
    second = watch.take(message(EngineCoreOutput("r", [8, 9])))
    now[0] = 13.0
    last = EngineCoreOutput("r", [], finish_reason=FinishReason.ABORT)
    third = watch.take(message(last))
    assert (first.num_prompt_tokens, first.time_to_first_tokens_iter) == (3, [2.0])
    assert (second.num_generation_tokens, second.inter_token_latencies_iter) == (2, [0.5])
    assert (third.num_generation_tokens, third.inter_token_latencies_iter) == (0, [])
    [ended] = third.finished_requests
    assert (ended.e2e_latency, ended.num_generation_tokens) == (3.0, 3)
    assert ended.finish_reason is FinishReason.ABORT


def test_a_stop_string_ends_a_request_as_a_stop() -> None:
    manager = StatLoggerManager(CONFIG, [RecordingLogger])
    logger = RecordingLogger.made[-1]
    manager.begin(request("r"))
    manager.take(message(EngineCoreOutput("r", [7])), ["r"])
    manager.take(message(EngineCoreOutput("r", [8])), [])
    first, late = logger.iterations
    assert [end.finish_reason for end in first.finished_requests] == [FinishReason.STOP]
    assert late.num_generation_tokens == 0, "what the core still sends is nobody's"


def test_what_nobody_waits_for_is_forgotten() -> None:
    manager = StatLoggerManager(CONFIG, [RecordingLogger])
    manager.begin(request("r"))
    manager.ended(["r", "unknown"])
    manager.take(message(EngineCoreOutput("r", [7])), [])
    [iteration] = RecordingLogger.made[-1].iterations
    assert (iteration.num_generation_tokens, iteration.finished_requests) == (0, [])


def test_without_users_receivers_only_the_cores_statistics_are_kept() -> None:
    manager = StatLoggerManager(CONFIG, [])
    assert not manager.wants_iterations
    manager.begin(request("r"))
    manager.take(message(EngineCoreOutput("r", [7])), [])


@pytest.mark.parametrize(
    ("aggregate", "lines"),
    [
        (False, ["engine/0: 1 running", "engine/1: 2 running"]),
        (True, ["engine: 3 running"]),
    ],
)
def test_cores_are_logged_one_by_one_or_together(
    aggregate: bool, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    manager = StatLoggerManager(CONFIG, [], aggregate=aggregate)
    for rank in range(2):
        stats = SchedulerStats(num_running=rank + 1)
        manager.take(EngineCoreOutputs(rank, scheduler_stats=stats), [])
    with caplog.at_level(logging.INFO):
        manager.log()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == lines
