"""What users of vLLM look for is where they look, and costs no more than it must."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from cases import each

import diptych_engine
import diptych_protocol
from diptych_engine import EngineArgs
from diptych_frontend.core_client.engine_args import OUR_NAMES
from diptych_protocol import EngineConfig, InvalidRequestError, KVTransferConfig
from diptych_protocol.field_ranges import descriptions

PROTOCOL_NAMES = [
    "EngineClient", "StreamingInput", "SamplingParams", "PoolingParams", "LoRARequest",
    "EngineCoreRequest", "EngineCoreOutput", "EngineCoreOutputs", "UtilityOutput",
    "EngineCoreRequestType", "FinishReason", "FINISH_REASON_STRINGS",
    "ReconfigureDistributedRequest", "ReconfigureRankType", "RequestOutput", "CompletionOutput",
    "PoolingRequestOutput", "PoolingOutput", "RequestJourneyEvent", "EngineConfig",
    "WeightTransferInitRequest", "WeightTransferUpdateRequest", "StructuredOutputsParams",
    "RequestOutputKind", "DiptychError", "InvalidRequestError", "EngineGenerateError",
    "EngineOverloadedError", "EngineDeadError", "ClientClosedError", "UtilityError",
    "UnsupportedFeatureError",
]  # fmt: skip
ENGINE_NAMES = ["LLM", "AsyncLLM", "EngineArgs", "LLMEngine", "MQLLMEngineClient"]


@each("name", PROTOCOL_NAMES)
def test_the_protocol_has_the_name(name: str) -> None:
    assert name in diptych_protocol.__all__
    assert getattr(diptych_protocol, name) is not None


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_the_engine_has_the_name(name: str) -> None:
    assert name in diptych_engine.__all__
    assert getattr(diptych_engine, name).__name__ == name


def test_the_engine_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = diptych_engine.NoSuchThing


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import diptych_protocol", {"torch", "zmq", "numpy"}),
        ("import diptych_engine", {"torch", "zmq", "numpy"}),
        ("from diptych_engine import AsyncLLM, EngineArgs, MQLLMEngineClient", {"torch"}),
        ("from diptych_engine import LLM, LLMEngine", {"torch"}),
    ],
)
def test_an_import_brings_no_more_than_it_needs(statement: str, unwanted: set[str]) -> None:
    script = f"import sys; {statement}; print(*sorted({unwanted!r} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert output.split() == []


# --- EngineArgs -------------------------------------------------------------------------------


def test_every_field_of_a_configuration_is_an_argument() -> None:
    assert set(EngineConfig.__struct_fields__) <= set(EngineArgs.__struct_fields__)
    assert set(OUR_NAMES.values()) <= set(EngineConfig.__struct_fields__)


def test_vllms_names_count() -> None:
    args = EngineArgs(
        "dummy://", served_model_name="mine", num_gpu_blocks_override=7,
        kv_cache_memory_bytes=1 << 21, kv_transfer_config=KVTransferConfig(), max_num_seqs=3,
    )  # fmt: skip
    assert args.create_engine_config() == EngineConfig(
        "dummy://", served_name="mine", num_blocks=7, kv_cache_bytes=1 << 21,
        kv_transfer=KVTransferConfig(), max_num_seqs=3,
    )  # fmt: skip


def test_arguments_are_checked() -> None:
    with pytest.raises(InvalidRequestError, match="block_size"):
        EngineArgs("dummy://", block_size=3).create_engine_config()  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        EngineArgs("dummy://", no_such_field=1)  # type: ignore[call-arg]


@each(
    ("line", "expected"),
    [
        ("", EngineArgs("m")),
        ("--max-num-seqs 3 --num-gpu-blocks-override 9",
         EngineArgs("m", max_num_seqs=3, num_blocks=9)),
        ("--num-blocks 9 --served-model-name x", EngineArgs("m", num_blocks=9, served_name="x")),
        ("--no-enable-prefix-caching", EngineArgs("m", enable_prefix_caching=False)),
        ("--scheduling-policy priority", EngineArgs("m", scheduling_policy="priority")),
        ("--drain-seconds 2.5 --disable-log-stats",
         EngineArgs("m", drain_seconds=2.5, disable_log_stats=True)),
        ('--kv-transfer-config {"lease_seconds":3}',
         EngineArgs("m", kv_transfer=KVTransferConfig(lease_seconds=3.0))),
        ('--lora-modules {"a":"/b"}', EngineArgs("m", lora_modules={"a": "/b"})),
    ],
)  # fmt: skip
def test_a_command_line_says_the_same(line: str, expected: EngineArgs) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--unrelated", default=1)
    assert EngineArgs.from_cli_args(parser.parse_args(["--model", "m", *line.split()])) == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--model m --max-num-seqs three",
        "--model m --kv-transfer-config {",
        "--model m --scheduling-policy lifo",
    ],
)
def test_a_bad_command_line_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(line.split())
    assert "error:" in capsys.readouterr().err


def test_the_help_says_what_the_fields_say() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(prog="x"))
    words = " ".join(parser.format_help().split())
    docs = descriptions(EngineConfig)
    assert docs["block_size"] in words
    assert set(docs) == set(EngineConfig.__struct_fields__)
