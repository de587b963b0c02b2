"""The second document: `vllm.v1.engine`, the messages between a front-end and a core."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cases import each

import diptych_protocol

messages: Any = import_module("diptych_engine.as_vllm.v1.engine")
REQUIRED = msgspec.NODEFAULT
MODULES = (
    "async_llm", "coordinator", "core", "core_client", "detokenizer", "exceptions",
    "input_processor", "llm_engine", "logprobs", "output_processor", "parallel_sampling", "utils",
)  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "EngineCoreOutput": {
        "request_id": REQUIRED,
        "new_token_ids": REQUIRED,
        "new_logprobs": None,
        "new_prompt_logprobs_tensors": None,
        "pooling_output": None,
        "finish_reason": None,
        "stop_reason": None,
        "kv_transfer_params": None,
        "trace_headers": None,
        "num_cached_tokens": 0,
        "routed_experts": None,
        "num_nans_in_logits": 0,
    },
    "EngineCoreOutputs": {
        "engine_index": 0,
        "outputs": [],
        "scheduler_stats": None,
        "timestamp": 0.0,
        "utility_output": None,
        "finished_requests": None,
        "journey_events": None,
        "wave_complete": None,
        "start_wave": None,
    },
    "EngineCoreRequest": {
        "request_id": REQUIRED,
        "prompt_token_ids": REQUIRED,
        "mm_features": REQUIRED,
        "sampling_params": REQUIRED,
        "pooling_params": REQUIRED,
        "eos_token_id": REQUIRED,
        "arrival_time": REQUIRED,
        "lora_request": REQUIRED,
        "cache_salt": REQUIRED,
        "data_parallel_rank": REQUIRED,
        "prompt_embeds": None,
        "client_index": 0,
        "current_wave": 0,
        "priority": 0,
        "trace_headers": None,
        "external_req_id": None,
    },
    "UtilityOutput": {"call_id": REQUIRED, "failure_message": None, "result": None},
    "ReconfigureDistributedRequest": {
        "new_data_parallel_size": REQUIRED,
        "new_data_parallel_rank": REQUIRED,
        "new_data_parallel_rank_local": REQUIRED,
        "new_data_parallel_master_ip": REQUIRED,
        "new_data_parallel_master_port": REQUIRED,
    },
}
"""Struct -> its fields in order, with their defaults. Ours may have more, after these."""
TYPES: dict[str, dict[str, str]] = {
    "EngineCoreOutput": {
        "request_id": "str",
        "new_token_ids": "list[int]",
        "new_logprobs": "LogprobsLists | None",
        "new_prompt_logprobs_tensors": "LogprobsTensors | None",
        "pooling_output": "torch.Tensor | None",
        "finish_reason": "FinishReason | None",
        "stop_reason": "int | str | None",
        "kv_transfer_params": "dict[str, Any] | None",
        "trace_headers": "Mapping[str, str] | None",
        "num_cached_tokens": "int",
        "routed_experts": "np.ndarray | None",
        "num_nans_in_logits": "int",
    },
    "EngineCoreOutputs": {
        "engine_index": "int",
        "outputs": "list[EngineCoreOutput]",
        "scheduler_stats": "SchedulerStats | None",
        "timestamp": "float",
        "utility_output": "UtilityOutput | None",
        "finished_requests": "set[str] | None",
        "journey_events": "list[RequestJourneyEvent] | None",
        "wave_complete": "int | None",
        "start_wave": "int | None",
    },
    "EngineCoreRequest": {
        "request_id": "str",
        "prompt_token_ids": "list[int] | None",
        "mm_features": "list[MultiModalFeatureSpec] | None",
        "sampling_params": "SamplingParams | None",
        "pooling_params": "PoolingParams | None",
        "eos_token_id": "int | None",
        "arrival_time": "float",
        "lora_request": "LoRARequest | None",
        "cache_salt": "str | None",
        "data_parallel_rank": "int | None",
        "prompt_embeds": "torch.Tensor | None",
        "client_index": "int",
        "current_wave": "int",
        "priority": "int",
        "trace_headers": "Mapping[str, str] | None",
        "external_req_id": "str | None",
    },
    "UtilityOutput": {
        "call_id": "int",
        "failure_message": "str | None",
        "result": "UtilityResult | None",
    },
    "ReconfigureDistributedRequest": {
        "new_data_parallel_size": "int",
        "new_data_parallel_rank": "int",
        "new_data_parallel_rank_local": "int",
        "new_data_parallel_master_ip": "str",
        "new_data_parallel_master_port": "int",
    },
}
"""Struct -> the types of its fields. What the document has as an array of torch or of NumPy is an
`Array` on our wire: decision 0051."""
ON_OUR_WIRE = {
    "torch": SimpleNamespace(Tensor=diptych_protocol.Array),
    "np": SimpleNamespace(ndarray=diptych_protocol.Array),
    "Any": Any,
    "Mapping": Mapping,
}
OPTIONS = {
    "EngineCoreOutput": {"array_like": True, "omit_defaults": True, "gc": False},
    "EngineCoreOutputs": {"array_like": True, "omit_defaults": True, "gc": False},
    "EngineCoreRequest": {"array_like": True, "omit_defaults": True, "gc": False},
    "UtilityOutput": {"array_like": True, "omit_defaults": False, "gc": False},
    "ReconfigureDistributedRequest": {"array_like": False, "omit_defaults": False},
}
ENUMERATIONS: dict[str, dict[str, Any]] = {
    "EngineCoreRequestType": {
        "ADD": b"\x00",
        "ABORT": b"\x01",
        "START_DP_WAVE": b"\x02",
        "UTILITY": b"\x03",
        "EXECUTOR_FAILED": b"\x04",
    },
    "FinishReason": {"STOP": 0, "LENGTH": 1, "ABORT": 2, "ERROR": 3},
    "ReconfigureRankType": {"KEEP_CURRENT_RANK": -1, "SHUTDOWN_CURRENT_RANK": -2},
}
"""Each has these members, and no others."""


@each("name", MODULES)
def test_a_module_of_the_document_is_there_with_some_name(name: str) -> None:
    module = import_module(f"diptych_engine.as_vllm.v1.engine.{name}")
    assert module.__all__
    for member in module.__all__:
        assert getattr(module, member)


def test_what_no_module_has_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Unknown'"):
        exec("from diptych_engine.as_vllm.v1.engine import Unknown")
    with pytest.raises(ModuleNotFoundError):
        import_module("diptych_engine.as_vllm.v1.unknown")


@pytest.mark.parametrize("name", FIELDS)
def test_a_struct_begins_with_the_documents_fields(name: str) -> None:
    ours = msgspec.structs.fields(getattr(messages, name))
    theirs = FIELDS[name]
    assert [field.name for field in ours][: len(theirs)] == list(theirs)
    for field, default in zip(ours, theirs.values(), strict=False):
        made = field.default_factory
        assert (field.default if made is msgspec.NODEFAULT else made()) == default, field.name
    assert all(not field.required for field in ours[len(theirs) :])


@pytest.mark.parametrize("name", TYPES)
def test_the_fields_of_a_struct_have_the_documents_types(name: str) -> None:
    assert TYPES[name].keys() == FIELDS[name].keys()
    ours = {field.name: field.type for field in msgspec.structs.fields(getattr(messages, name))}
    names = {**vars(diptych_protocol), **ON_OUR_WIRE}
    theirs = {field: eval(text, dict(names)) for field, text in TYPES[name].items()}
    assert {field: ours[field] for field in theirs} == theirs


@pytest.mark.parametrize("name", OPTIONS)
def test_a_struct_is_written_as_the_document_says(name: str) -> None:
    config = getattr(messages, name).__struct_config__
    assert {option: getattr(config, option) for option in OPTIONS[name]} == OPTIONS[name]


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_an_enumeration_has_the_documents_members(name: str) -> None:
    assert {member.name: member.value for member in getattr(messages, name)} == ENUMERATIONS[name]


def test_a_finish_reason_prints_as_its_string() -> None:
    assert messages.FINISH_REASON_STRINGS == ("stop", "length", "abort", "error")
    assert tuple(map(str, messages.FinishReason)) == messages.FINISH_REASON_STRINGS


def test_an_output_is_finished_when_it_has_a_reason() -> None:
    output = messages.EngineCoreOutput("r", [])
    assert not output.finished
    output.finish_reason = messages.FinishReason.STOP
    assert output.finished


def test_outputs_are_stamped_unless_they_have_a_time() -> None:
    before = time.monotonic()
    assert before <= messages.EngineCoreOutputs().timestamp <= time.monotonic()
    assert messages.EngineCoreOutputs(timestamp=7.0).timestamp == 7.0


@pytest.mark.parametrize("kind", ["sampling_params", "pooling_params"])
def test_the_parameters_of_a_request_are_those_that_it_has(kind: str) -> None:
    values: dict[str, Any] = dict.fromkeys(FIELDS["EngineCoreRequest"])
    params = object()
    request = messages.EngineCoreRequest(**{**values, kind: params})
    assert request.params is params


def test_a_request_without_parameters_says_so() -> None:
    values: dict[str, Any] = dict.fromkeys(FIELDS["EngineCoreRequest"])
    with pytest.raises(ValueError, match="neither sampling nor pooling"):
        _ = messages.EngineCoreRequest(**values).params
