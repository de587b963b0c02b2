"""What an LLMEngine tells of itself and of refused requests, and what it leaves behind: rows L4,
L7, L8 and L13."""

from __future__ import annotations

import gc
import weakref

import psutil
import pytest
from engine_kit.core import DUMMY
from engine_kit.llm_engine import CONFIG, params, run
from engine_kit.stat_logger import RecordingLogger

from diptych_engine import LLMEngine
from diptych_engine.serving.engine_reports import LOG_INTERVAL
from diptych_protocol import (
    EngineConfig,
    InvalidRequestError,
    PoolingParams,
    RequestOutput,
    UnsupportedFeatureError,
)

NARROW = EngineConfig(DUMMY, num_blocks=64, num_threads=1, max_num_seqs=1, max_num_waiting=2)


def test_contract_L08_an_interval_that_is_no_number_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LOG_INTERVAL, "often")
    with pytest.raises(InvalidRequestError, match=f"{LOG_INTERVAL} is a number of seconds"):
        LLMEngine(CONFIG)


def test_contract_L08_statistics_are_logged_when_the_interval_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LOG_INTERVAL, "999")
    now = [100.0]
    engine = LLMEngine(CONFIG, stat_loggers=[RecordingLogger], clock=lambda: now[0])
    logger = RecordingLogger.made[-1]
    monkeypatch.setenv(LOG_INTERVAL, "5")  # is read with each call
    for seconds, expected in ((3.0, 0), (7.9, 0), (8.0, 1), (12.0, 1), (13.1, 2)):
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


def test_contract_L04_each_step_is_recorded_with_its_tokens() -> None:
    engine = LLMEngine(CONFIG, stat_loggers=[RecordingLogger])
    logger = RecordingLogger.made[-1]
    assert logger.initialized == 1
    engine.add_request("r", [1, 2, 3], params(max_tokens=4))
    engine.add_request("left", [1, 2], params(max_tokens=400))
    while len(logger.iterations) < 2:
        engine.step()
    engine.abort_request(["left"])
    run(engine)
    [ended] = [each for made in logger.iterations for each in made.finished_requests]
    assert (ended.num_prompt_tokens, ended.num_generation_tokens) == (3, 4)
    assert str(ended.finish_reason) == "length"
    assert sum(made.num_prompt_tokens for made in logger.iterations) == 5
    firsts = [each for made in logger.iterations for each in made.time_to_first_tokens_iter]
    gaps = [each for made in logger.iterations for each in made.inter_token_latencies_iter]
    assert len(firsts) == 2
    assert len(gaps) == sum(made.num_generation_tokens for made in logger.iterations) - 2
    assert all(seconds > 0 for seconds in (*firsts, *gaps, ended.e2e_latency))
    assert len(logger.recorded) == len(logger.iterations), "a step's statistics come with it"
    engine.shutdown()


@pytest.mark.parametrize("apart", [False, True], ids=["in_process", "in_child"])
def test_contract_L04_a_refused_request_ends_with_its_reason_and_others_go_on(apart: bool) -> None:
    """The core takes as many as wait and run; `run` needs every other request to have its answer
    and the engine to be done."""
    engine = LLMEngine(NARROW, multiprocess_mode=apart)
    for number in range(20):
        engine.add_request(f"r{number}", [1, 2 + number], params(max_tokens=4))
    engine.add_request("several", [1, 2], params(n=3))
    engine.add_request("vector", [5, 6], PoolingParams(task="embed"))
    outputs = run(engine)
    assert len(outputs) == 22
    ends = {name: told[-1] for name, told in outputs.items()}
    refused = {n for n, end in ends.items() if end.outputs[0].finish_reason == "error"}
    assert {"r19", "several", "vector"} <= refused
    for name, end in ends.items():
        for answer in end.outputs:
            if name in refused:
                assert "wait" in str(answer.stop_reason)
            else:
                assert len(answer.token_ids) == 4
    assert len(ends["several"].outputs) == 3
    assert isinstance(ends["vector"], RequestOutput), "a vector has no place for an error"
    assert ends["vector"].prompt_token_ids == [5, 6]
    engine.add_request("after", [1], params())
    assert len(run(engine)["after"][-1].outputs[0].token_ids) == 8
    engine.shutdown()


def test_contract_L09_receivers_of_statistics_learn_of_sleep() -> None:
    engine = LLMEngine(CONFIG, stat_loggers=[RecordingLogger])
    engine.sleep(1)
    engine.wake_up()
    assert RecordingLogger.made[-1].sleeps == [(1, 1), (0, 0)]
    engine.shutdown()


def test_contract_L07_without_statistics_there_are_no_metrics() -> None:
    engine = LLMEngine(CONFIG, log_stats=False, stat_loggers=[RecordingLogger])
    with pytest.raises(UnsupportedFeatureError, match="log_stats"):
        engine.get_metrics()
    logged = [logger.logged for logger in RecordingLogger.made]
    engine.do_log_stats()
    assert [logger.logged for logger in RecordingLogger.made] == logged
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
