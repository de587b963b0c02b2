"""What programs for vLLM give besides: it works, is ignored with a line, or is refused by name."""

from __future__ import annotations

import argparse
import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cases import each
from model_kit.families import SIZES

from diptych_engine import LLM, LLMEngine
from diptych_frontend.core_client.engine_args import OF_THE_MODEL
from diptych_frontend.core_client.foreign_options import foreign_fields, warn_of_environment
from diptych_frontend.v0.params import params_of_today
from diptych_protocol import DiptychError, EngineCoreRequest, UnsupportedFeatureError

as_vllm: Any = import_module("diptych_engine.as_vllm")
ARGUMENTS = foreign_fields(as_vllm.EngineArgs)
PARAMS = foreign_fields(as_vllm.SamplingParams)
OTHER = "something else"


@pytest.mark.parametrize("name", [*ARGUMENTS, *OF_THE_MODEL])
def test_an_argument_is_refused_by_its_name_with_the_reason_or_logged(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = as_vllm.EngineArgs("dummy://", **{name: OTHER})
    if name in ARGUMENTS and ARGUMENTS[name].ignored:
        args.create_engine_config()
        assert f"{name}='{OTHER}' changes nothing: {ARGUMENTS[name].why}" in caplog.text
        return
    with pytest.raises(UnsupportedFeatureError, match=f"{name}='{OTHER}' is not supported: "):
        args.create_engine_config()


def test_values_that_ask_for_what_is_done_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name, mark in ARGUMENTS.items():
        for value in (None, *mark.same):
            as_vllm.EngineArgs("dummy://", **{name: value}).create_engine_config()
    as_vllm.EngineArgs("dummy://", tokenizer="dummy://").create_engine_config()
    assert "changes nothing" not in caplog.text


def test_a_whole_model_refuses_them_too() -> None:
    with pytest.raises(UnsupportedFeatureError, match="quantization='bitsandbytes'"):
        LLM("dummy://", quantization="bitsandbytes")


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors"])
def test_a_quantization_is_compared_with_the_files(method: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    config = {"fmt": "e4m3", "bits": 4, "config_groups": {}, "quant_method": method}
    raw = SIZES | {"quantization_config": config, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    as_vllm.EngineArgs(str(tmp_path), quantization=method).create_engine_config()
    for other in {"fp8", "gptq_marlin", "gguf"} - {method, f"{method}_marlin"}:
        said = f"quantization='{other}' is not supported: the files of .* are {method}"
        with pytest.raises(UnsupportedFeatureError, match=said):
            as_vllm.EngineArgs(str(tmp_path), quantization=other).create_engine_config()


def test_a_gguf_file_and_floats_have_a_name_too(smollm2: str) -> None:
    as_vllm.EngineArgs(smollm2, quantization="gguf").create_engine_config()
    with pytest.raises(UnsupportedFeatureError, match=r"'awq' .* the files of .* are gguf"):
        as_vllm.EngineArgs(smollm2, quantization="awq").create_engine_config()
    with pytest.raises(UnsupportedFeatureError, match=r"'fp8' .* are not quantised"):
        as_vllm.EngineArgs("dummy://", quantization="fp8").create_engine_config()


def test_a_command_line_has_them() -> None:
    parser = as_vllm.EngineArgs.add_cli_args(argparse.ArgumentParser())
    given = ["--model", "dummy://", "--enforce-eager", "--load-format", "auto", "--swap-space", "4"]
    args = as_vllm.EngineArgs.from_cli_args(parser.parse_args(given))
    assert (args.enforce_eager, args.load_format, args.swap_space) == (True, "auto", 4)
    assert args.create_engine_config().model == "dummy://"


@each("name", PARAMS)
def test_a_sampling_parameter_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{name}='{OTHER}' is not supported: "):
        as_vllm.SamplingParams(**{name: OTHER})
    for value in PARAMS[name].same:
        params = as_vllm.SamplingParams(**{name: value})
        assert params == as_vllm.SamplingParams(), "it does not travel"
        assert params_of_today(params).n == 1


def test_variables_that_nobody_reads_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "1")
    warn_of_environment.cache_clear()
    for _ in range(2):
        as_vllm.EngineArgs("dummy://").create_engine_config()
    assert [r.getMessage() for r in caplog.records] == [
        "not read: VLLM_USE_V1; variables here begin with DIPTYCH_"
    ]


def test_groups_of_a_configuration_have_its_settings() -> None:
    config = as_vllm.EngineArgs("dummy://", max_model_len=64, max_loras=2).create_engine_config()
    assert config.model_config.max_model_len == 64
    assert config.cache_config.block_size == config.block_size
    assert config.lora_config.max_loras == 2


def test_errors_are_also_what_the_documents_raise() -> None:
    with pytest.raises(AssertionError) as asserted:
        _ = EngineCoreRequest("r", [1], None, None, None, None, 0.0, None, None, None).params
    assert isinstance(asserted.value, DiptychError)
    args = as_vllm.EngineArgs("dummy://", num_blocks=64, disable_log_stats=True)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)
    with pytest.raises(AssertionError, match="keeps no statistics"):
        engine.get_metrics()
    assert not hasattr(engine, "model_executor")
    engine.shutdown()
