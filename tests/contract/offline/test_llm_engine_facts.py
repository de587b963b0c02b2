"""What an LLMEngine tells of itself, and what it leaves behind: rows L7, L8 and L13."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import psutil
import pytest
from engine_kit.core import DUMMY
from engine_kit.llm_engine import CONFIG, params, run

from diptych_engine import LLMEngine
from diptych_engine.serving.llm_engine import LOG_INTERVAL
from diptych_protocol import (
    EngineConfig,
    SchedulerStats,
    UnsupportedFeatureError,
)


class CountingLogger:
    made: ClassVar[list[CountingLogger]] = []

    def __init__(self, config: EngineConfig, index: int) -> None:
        self.recorded: list[SchedulerStats] = []
        self.logged = 0
        self.made.append(self)

    def record(self, stats: SchedulerStats, engine_index: int = 0) -> None:
        self.recorded.append(stats)

    def log(self) -> None:
        self.logged += 1


def test_contract_L08_statistics_are_logged_when_the_interval_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LOG_INTERVAL, "5")
    now = [100.0]
    engine = LLMEngine(CONFIG, stat_loggers=[CountingLogger], clock=lambda: now[0])
    logger = CountingLogger.made[-1]
    for seconds, expected in ((4.9, 0), (5.0, 1), (9.0, 1), (10.1, 2)):
        now[0] = 100.0 + seconds
        engine.do_log_stats_with_interval()
        assert logger.logged == expected
    now[0] = 120.0
    engine.add_request("r", [1], params(max_tokens=1))
    run(engine)
    assert logger.logged == 3, "a step looks at the clock"
    assert logger.recorded[-1].steps >= 1
    engine.do_log_stats()
    assert logger.logged == 4
    engine.shutdown()


def test_contract_L07_without_statistics_there_are_no_metrics() -> None:
    engine = LLMEngine(CONFIG, log_stats=False, stat_loggers=[CountingLogger])
    with pytest.raises(UnsupportedFeatureError, match="log_stats"):
        engine.get_metrics()
    logged = [logger.logged for logger in CountingLogger.made]
    engine.do_log_stats()
    assert [logger.logged for logger in CountingLogger.made] == logged
    engine.shutdown()


def test_contract_L13_a_dropped_engine_takes_its_model_with_it() -> None:
    engine = LLMEngine(CONFIG)
    engine.add_request("r", [1], params())
    engine.step()
    model = weakref.ref(engine.model_executor.model)
    client = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert client() is None
        assert model() is None
    finally:
        gc.enable()


def test_contract_L13_engine_after_engine_needs_no_more_memory() -> None:
    config = EngineConfig(f"{DUMMY}&intermediate_size=20000", num_blocks=64, num_threads=1)

    def one() -> int:
        engine = LLMEngine(config)
        engine.add_request("r", [1, 2], params())
        run(engine)
        del engine
        return int(psutil.Process().memory_info().rss)

    for _ in range(2):
        settled = one()
    for _ in range(4):
        after = one()
    weights = 2 * 3 * 32 * 20000 * 4
    assert after - settled < weights, "less than the weights of one of four engines"
