"""The third document: `AsyncLLM`, as its Elixir binding lists its functions.

It gives names, order and defaults of parameters; `keyword-only` where it says so.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
from cases import each
from documents_kit.signatures import differences, written

AsyncLLM: Any = import_module("diptych_engine.as_vllm.v1.engine.async_llm").AsyncLLM
UsageContext: Any = import_module("diptych_engine.as_vllm.usage.usage_lib").UsageContext
NAMES = {"UsageContext": UsageContext}
PROPERTIES = ("dead_error", "errored", "is_running", "is_stopped", "tokenizer")
# fmt: off
FUNCTIONS = {
    "_add_request": "(self, request, prompt, parent_req, index, queue)",
    "_run_output_handler": "(self)",
    "abort": "(self, request_id, internal=False)",
    "add_lora": "(self, lora_request)",
    "add_request": "(self, request_id, prompt, params, arrival_time=None, lora_request=None, "
        "tokenization_kwargs=None, trace_headers=None, priority=0, data_parallel_rank=None, "
        "prompt_text=None)",
    "check_health": "(self)",
    "collective_rpc": "(self, method, timeout=None, args=(), kwargs=None)",
    "do_log_stats": "(self)",
    "encode": "(self, prompt, pooling_params, request_id, lora_request=None, trace_headers=None, "
        "priority=0, *, truncate_prompt_tokens=None, tokenization_kwargs=None)",
    "generate": "(self, prompt, sampling_params, request_id, *, prompt_text=None, "
        "lora_request=None, tokenization_kwargs=None, trace_headers=None, priority=0, "
        "data_parallel_rank=None)",
    "get_supported_tasks": "(self)",
    "get_tokenizer": "(self)",
    "is_paused": "(self)",
    "is_sleeping": "(self)",
    "is_tracing_enabled": "(self)",
    "list_loras": "(self)",
    "pause_generation": "(self, *, wait_for_inflight_requests=False, clear_cache=True)",
    "pin_lora": "(self, lora_id)",
    "remove_lora": "(self, lora_id)",
    "reset_mm_cache": "(self)",
    "reset_prefix_cache": "(self, reset_running_requests=False, reset_connector=False)",
    "resume_generation": "(self)",
    "scale_elastic_ep": "(self, new_data_parallel_size, drain_timeout=300)",
    "shutdown": "(self)",
    "sleep": "(self, level=1)",
    "start_profile": "(self)",
    "stop_profile": "(self)",
    "wait_for_requests_to_drain": "(self, drain_timeout=300)",
    "wake_up": "(self, tags=None)",
}
"""`encode`: where the two documents that have it differ in the order, these are keywords."""
SYNCHRONOUS = ("_add_request", "_run_output_handler", "generate", "encode", "shutdown")
"""They are not awaited. In the document `_add_request` is; here it has nothing to wait for."""
CLASS_METHODS = {
    "from_engine_args": "(engine_args, start_engine_loop=True, "
        "usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=None)",
    "from_vllm_config": "(vllm_config, start_engine_loop=True, "
        "usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=None, enable_log_requests=False, "
        "aggregate_engine_logging=False, disable_log_stats=False, client_addresses=None, "
        "client_count=1, client_index=0)",
}
# fmt: on
CONSTRUCTOR = (
    "vllm_config",
    "executor_class",
    "log_stats",
    "usage_context",
    "mm_registry",
    "use_cached_outputs",
    "log_requests",
    "start_engine_loop",
    "stat_loggers",
)  # fmt: skip
"""The document says these names in this order, and of the first three that they are given."""


@each(("name", "text"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_a_function_takes_the_calls_of_the_document(name: str, text: str) -> None:
    ours = getattr(AsyncLLM, name)
    assert differences(written(text), ours) == []
    assert inspect.iscoroutinefunction(ours) is (name not in SYNCHRONOUS)


@pytest.mark.parametrize(("name", "text"), CLASS_METHODS.items(), ids=CLASS_METHODS)
def test_a_class_method_takes_the_calls_of_the_document(name: str, text: str) -> None:
    assert differences(written(text, NAMES), getattr(AsyncLLM, name)) == []
    assert isinstance(inspect.getattr_static(AsyncLLM, name), classmethod)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_is_one(name: str) -> None:
    assert isinstance(inspect.getattr_static(AsyncLLM, name), property)


def test_the_constructor_takes_the_documents_arguments_in_their_order() -> None:
    parameters = list(inspect.signature(AsyncLLM).parameters)
    assert tuple(parameters[: len(CONSTRUCTOR)]) == CONSTRUCTOR
