"""The first document: `vllm.engine.protocol`, the abstract client of an engine."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import Any, get_args

import pytest
from cases import each
from documents_kit.signatures import differences, written

protocol: Any = import_module("diptych_engine.as_vllm.engine.protocol")
EngineClient: Any = protocol.EngineClient
ATTRIBUTES = ("vllm_config", "model_config", "renderer", "input_processor")
PROPERTIES = ("is_running", "is_stopped", "errored", "dead_error")
# fmt: off
GENERATORS = {
    "generate": "(self, prompt, sampling_params, request_id, *, prompt_text=None, "
        "lora_request=None, tokenization_kwargs=None, trace_headers=None, priority=0, "
        "data_parallel_rank=None, reasoning_ended=None, reasoning_parser_kwargs=None)",
    "encode": "(self, prompt, pooling_params, request_id, lora_request=None, trace_headers=None, "
        "priority=0, tokenization_kwargs=None, reasoning_ended=None)",
}
COROUTINES = {
    "abort": "(self, request_id)",
    "notify_kv_transfer_request_rejected":
        "(self, request_id, kv_transfer_params, *, data_parallel_rank=None)",
    "is_tracing_enabled": "(self)",
    "do_log_stats": "(self)",
    "check_health": "(self)",
    "start_profile": "(self)",
    "stop_profile": "(self)",
    "reset_mm_cache": "(self)",
    "reset_encoder_cache": "(self)",
    "reset_prefix_cache": "(self, reset_running_requests=False, reset_connector=False)",
    "sleep": "(self, level=1, mode='abort')",
    "wake_up": "(self, tags=None)",
    "is_sleeping": "(self)",
    "add_lora": "(self, lora_request)",
    "pause_generation":
        "(self, *, mode='abort', wait_for_inflight_requests=False, clear_cache=True)",
    "resume_generation": "(self)",
    "is_paused": "(self)",
}
FUNCTIONS = {"shutdown": "(self, timeout=None)"}
OPTIONAL = {
    "scale_elastic_ep": "(self, new_data_parallel_size, drain_timeout=300)",
    "collective_rpc": "(self, method, timeout=None, args=(), kwargs=None)",
    "get_supported_tasks": "(self)",
    "init_weight_transfer_engine": "(self, init_request)",
    "start_weight_update": "(self, is_checkpoint_format=True)",
    "update_weights": "(self, request)",
    "finish_weight_update": "(self)",
}
"""Coroutines that a client need not have."""
# fmt: on
ABSTRACT = {*PROPERTIES, *GENERATORS, *COROUTINES, *FUNCTIONS}
METHODS = {**GENERATORS, **COROUTINES, **FUNCTIONS, **OPTIONAL}


def test_the_module_has_the_documents_classes() -> None:
    assert inspect.isclass(EngineClient)
    assert dataclasses.is_dataclass(protocol.StreamingInput)
    assert protocol.EngineInput
    assert get_args(protocol.PauseMode) == ("abort", "wait", "keep")


def test_the_requests_that_callers_construct_can_be_imported() -> None:
    assert protocol.WeightTransferInitRequest(init_info={"a": 1}).init_info == {"a": 1}
    assert protocol.WeightTransferUpdateRequest(update_info={"a": 1}).update_info == {"a": 1}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_declared(name: str) -> None:
    assert name in inspect.get_annotations(EngineClient)


def test_what_is_abstract_is_what_the_document_says() -> None:
    assert EngineClient.__abstractmethods__ == ABSTRACT


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_is_one(name: str) -> None:
    assert isinstance(inspect.getattr_static(EngineClient, name), property)


@each(("name", "text"), METHODS.items(), ids=METHODS)
def test_a_method_takes_the_calls_of_the_document(name: str, text: str) -> None:
    ours = getattr(EngineClient, name)
    assert differences(written(text), ours) == []
    assert inspect.iscoroutinefunction(ours) is (name in {**COROUTINES, **OPTIONAL})


def plain_client(without: str = "") -> type[Any]:
    """A client with the abstract members of the document, but for one, and nothing else."""
    members: dict[str, Any] = dict.fromkeys(PROPERTIES, property(lambda _self: False))
    for name, text in METHODS.items():
        if name not in OPTIONAL:
            scope: dict[str, Any] = {}
            exec(f"async def {name}{text}: ...", scope)
            members[name] = scope[name]
    members.pop(without, None)
    return type("PlainClient", (EngineClient,), members)


def test_a_client_with_exactly_the_abstract_members_can_be_made() -> None:
    client = plain_client()()
    assert not client.is_running


@each("name", sorted(ABSTRACT))
def test_a_client_that_lacks_a_member_cannot_be_made(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        plain_client(without=name)()


@pytest.mark.parametrize("name", OPTIONAL)
async def test_what_a_client_need_not_have_is_not_implemented(name: str) -> None:
    given = [None] * (len(written(OPTIONAL[name]).parameters) - 1)
    with pytest.raises(NotImplementedError):
        await getattr(plain_client()(), name)(*given)


def test_a_piece_of_a_prompt_has_the_documents_fields() -> None:
    prompt, params = dataclasses.fields(protocol.StreamingInput)
    assert (prompt.name, prompt.default) == ("prompt", dataclasses.MISSING)
    assert (params.name, params.default) == ("sampling_params", None)
