"""Two LLMEngines in programs of their own that step together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from waits import PATIENCE_S

from diptych_engine.serving.llm_engine import LLMEngine
from diptych_protocol import EngineConfig, EngineDeadError, InvalidRequestError, SamplingParams

IDLE = Path(__file__).with_name("idle_rank.py")


def config(store: str) -> EngineConfig:
    return EngineConfig(
        model="dummy://",
        num_blocks=64,
        num_threads=1,
        data_parallel_size=2,
        data_parallel_lockstep=True,
        data_parallel_store=store,
    )


def test_contract_L05_an_idle_engine_runs_empty_steps_beside_a_busy_one(tmp_path: Path) -> None:
    command = [sys.executable, str(IDLE), str(tmp_path / "ranks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as idle:
        engine = LLMEngine(config(str(tmp_path / "ranks")))
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        engine.add_request("busy", [1, 2, 3], params)
        steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
        told, _ = idle.communicate(timeout=PATIENCE_S)
    assert idle.returncode == 0
    assert told == f"empty steps beside {steps}\n"
    assert engine.get_num_unfinished_requests() == 0
    engine.shutdown()


@pytest.mark.parametrize(
    ("store", "elsewhere", "param"),
    [("", False, "data_parallel_store"), ("/ranks", True, "multiprocess_mode")],
)
def test_an_engine_that_cannot_step_with_others_is_refused_before_its_model_is_looked_for(
    store: str, elsewhere: bool, param: str
) -> None:
    nowhere = msgspec.structs.replace(config(store), model="/no/such/model.gguf")
    with pytest.raises(InvalidRequestError) as refusal:
        LLMEngine(nowhere, multiprocess_mode=elsewhere)
    assert refusal.value.param == param


def test_contract_L05_an_engine_that_is_shut_down_leaves_the_others(tmp_path: Path) -> None:
    command = [sys.executable, str(IDLE), str(tmp_path / "ranks")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as left:
        engine = LLMEngine(config(str(tmp_path / "ranks")))
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="not joined"):
            engine.has_unfinished_requests()
        _, told = left.communicate(timeout=PATIENCE_S)
    assert "the group in lock-step broke" in told
