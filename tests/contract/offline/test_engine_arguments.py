"""Arguments of LLMEngine and AsyncLLM, and of their calls, that change what happens: L1, L9, A2."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from engine_kit.async_llm import final
from engine_kit.llm_engine import ARGS, CONFIG, params, run, stats

from diptych_engine import AsyncLLM, LLMEngine
from diptych_protocol import (
    InvalidRequestError,
    KVTransferConfig,
    RequestOutputKind,
    UtilityError,
)

NAME = CONFIG.name
CUMULATIVE = RequestOutputKind.CUMULATIVE


@pytest.fixture(scope="module", params=[False, True], ids=["in_process", "in_child"])
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(ARGS, enable_multiprocessing=request.param)
    yield engine
    engine.shutdown()


def lines(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    told = [record.getMessage() for record in caplog.records]
    return [text for text in told if text.startswith(beginning)]


@pytest.mark.parametrize("together", [False, True])
def test_contract_L01_statistics_are_logged_for_each_core_or_for_all(
    caplog: pytest.LogCaptureFixture, together: bool
) -> None:
    engine = LLMEngine(CONFIG, aggregate_engine_logging=together)
    with caplog.at_level(logging.INFO):
        engine.do_log_stats()
    engine.shutdown()
    assert len(lines(caplog, f"{NAME}: 0 running" if together else f"{NAME}/0: 0 running")) == 1


def test_contract_L01_a_new_engine_keeps_nothing_of_its_warm_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        LLMEngine(CONFIG).shutdown()
    assert len(lines(caplog, "reset_mm_cache")) == 1


def test_contract_L01_outputs_come_at_the_interval_of_the_configuration() -> None:
    engine = LLMEngine(msgspec.structs.replace(CONFIG, stream_interval=4))
    engine.add_request("r", [1, 2], params(max_tokens=10, output_kind=CUMULATIVE))
    [outputs] = run(engine).values()
    engine.shutdown()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9, 10]


@contextmanager
def ended(engine: AsyncLLM) -> Iterator[AsyncLLM]:
    try:
        yield engine
    finally:
        engine.shutdown()


async def lengths(engine: AsyncLLM) -> set[int]:
    wanted = params(max_tokens=10, output_kind=CUMULATIVE)
    return {len(o.outputs[0].token_ids) async for o in engine.generate([1, 2], wanted, "r")}


@pytest.mark.asyncio
async def test_contract_A02_arguments_of_the_front_end_reach_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = msgspec.structs.replace(ARGS, enable_log_requests=True, stream_interval=4)
    with ended(AsyncLLM.from_engine_args(args)) as engine, caplog.at_level(logging.INFO):
        assert await lengths(engine) <= {1, 5, 9, 10}
        await engine.do_log_stats()
    assert len(lines(caplog, "request r-")) == 1
    assert len(lines(caplog, f"{NAME}/0: ")) == 1


@pytest.mark.asyncio
async def test_contract_A02_requests_need_not_be_logged_nor_cores_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = AsyncLLM.from_vllm_config(CONFIG, aggregate_engine_logging=True)
    with ended(made) as engine, caplog.at_level(logging.INFO):
        await final(engine)
        await engine.do_log_stats()
    assert lines(caplog, "request r-") == []
    assert len(lines(caplog, f"{NAME}: 0 running")) == 1


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("keep", "length")])
def test_contract_L09_sleep_treats_what_runs_as_it_is_told(
    engine: LLMEngine, mode: Any, reason: str
) -> None:
    engine.add_request("runs", [1, 2], params(max_tokens=100))
    engine.step()
    engine.sleep(0, mode=mode)
    engine.wake_up()
    assert run(engine)["runs"][-1].outputs[0].finish_reason == reason


def test_contract_L09_sleep_knows_its_modes(engine: LLMEngine) -> None:
    try:
        with pytest.raises((InvalidRequestError, UtilityError), match="mode must be"):
            engine.sleep(0, mode="nap")  # type: ignore[arg-type]
        assert not engine.is_sleeping()
    finally:
        engine.wake_up()


def test_contract_L09_a_reset_may_include_what_runs(engine: LLMEngine) -> None:
    wanted = params(max_tokens=200)
    engine.add_request("alone", [1, 2, 3], wanted)
    [alone] = run(engine)["alone"][-1].outputs
    engine.add_request("runs", [1, 2, 3], wanted)
    engine.step()
    assert engine.reset_prefix_cache(False) is False
    assert engine.reset_prefix_cache(True) is True
    assert run(engine)["runs"][-1].outputs[0].token_ids == alone.token_ids


def test_contract_L09_a_reset_may_call_back_what_was_lent() -> None:
    engine = LLMEngine(msgspec.structs.replace(CONFIG, kv_transfer=KVTransferConfig()))
    lends = params(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    engine.add_request("lent", list(range(1, 40)), lends)
    run(engine)
    assert engine.reset_prefix_cache() is False, "lent blocks are in use"
    assert engine.reset_prefix_cache(False, True) is True
    of_hinge = stats(engine).kv_transfer
    assert of_hinge is not None
    assert of_hinge.leases_revoked == 1
    engine.shutdown()
