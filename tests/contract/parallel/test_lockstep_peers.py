"""Two LLMEngines in programs of their own that step together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waits import PATIENCE_S

from diptych_engine.serving.llm_engine import LLMEngine
from diptych_protocol import EngineConfig, InvalidRequestError, SamplingParams

IDLE_PROGRAM = """
import sys
from diptych_engine.serving.llm_engine import LLMEngine
from diptych_protocol import EngineConfig
engine = LLMEngine(EngineConfig(
    model="dummy://", num_blocks=64, num_threads=1, data_parallel_size=2, data_parallel_rank=1,
    data_parallel_lockstep=True, data_parallel_store=sys.argv[1],
))
steps = 0
while engine.has_unfinished_requests():
    assert engine.step() == []
    steps += 1
print("empty steps beside", steps)
"""


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
    command = [sys.executable, "-c", IDLE_PROGRAM, str(tmp_path / "ranks")]
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


def test_an_engine_in_lockstep_must_say_where_the_others_are() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        LLMEngine(config(""))
    assert refusal.value.param == "data_parallel_store"
