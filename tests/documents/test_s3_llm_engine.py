"""The fourth document: `vllm.v1.engine.llm_engine`, with its source."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import each
from documents_kit.signatures import differences, written
from engine_kit.llm_engine import CONFIG, params, run

from diptych_frontend.text import input_processor
from diptych_protocol import InvalidRequestError

LLMEngine: Any = import_module("diptych_engine.as_vllm.v1.engine.llm_engine").LLMEngine
Executor: Any = import_module("diptych_engine.as_vllm.v1.executor").Executor
UsageContext: Any = import_module("diptych_engine.as_vllm.usage.usage_lib").UsageContext
NAMES = {"UsageContext": UsageContext}
# fmt: off
METHODS = {
    "get_num_unfinished_requests": "(self)",
    "has_unfinished_requests": "(self)",
    "has_unfinished_requests_dp": "(self, has_unfinished)",
    "get_supported_tasks": "(self)",
    "abort_request": "(self, request_ids, internal=False)",
    "add_request": "(self, request_id, prompt, params, arrival_time=None, lora_request=None, "
        "tokenization_kwargs=None, trace_headers=None, priority=0, prompt_text=None)",
    "step": "(self)",
    "start_profile": "(self, profile_prefix=None)",
    "stop_profile": "(self)",
    "reset_mm_cache": "(self)",
    "reset_prefix_cache": "(self, reset_running_requests=False, reset_connector=False)",
    "reset_encoder_cache": "(self)",
    "sleep": "(self, level=1, mode='abort')",
    "wake_up": "(self, tags=None)",
    "is_sleeping": "(self)",
    "get_metrics": "(self)",
    "get_tokenizer": "(self)",
    "do_log_stats": "(self)",
    "do_log_stats_with_interval": "(self)",
    "add_lora": "(self, lora_request)",
    "remove_lora": "(self, lora_id)",
    "list_loras": "(self)",
    "pin_lora": "(self, lora_id)",
    "collective_rpc": "(self, method, timeout=None, args=(), kwargs=None)",
    "apply_model": "(self, func)",
}
CLASS_METHODS = {
    "from_vllm_config": "(vllm_config, usage_context=UsageContext.ENGINE_CONTEXT, "
        "stat_loggers=None, disable_log_stats=False)",
    "from_engine_args": "(engine_args, usage_context=UsageContext.ENGINE_CONTEXT, "
        "stat_loggers=None, enable_multiprocessing=False)",
}
CONSTRUCTOR = (
    "(vllm_config, executor_class, log_stats, aggregate_engine_logging=False, "
    "usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=None, *, multiprocess_mode=False)"
)
"""But for `mm_registry`, which stands before the last: it is in the next table."""
# fmt: on
POSITIONS = (
    "vllm_config",
    "executor_class",
    "log_stats",
    "aggregate_engine_logging",
    "usage_context",
    "stat_loggers",
    "mm_registry",
    "multiprocess_mode",
)  # fmt: skip
ATTRIBUTES: dict[str, Any] = {
    "vllm_config": CONFIG,
    "observability_config": CONFIG,
    "log_stats": True,
    "external_launcher_dp": False,
    "dp_group": None,
    "should_execute_dummy_batch": False,
}
PARTS = (
    "model_config", "renderer", "input_processor", "output_processor", "engine_core",
    "logger_manager", "model_executor", "_finalizer",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Made as the document makes it."""
    engine = LLMEngine(CONFIG, Executor.get_class(CONFIG), True)
    yield engine
    engine.shutdown()


@each(("name", "text"), METHODS.items(), ids=METHODS)
def test_a_method_takes_the_calls_of_the_document(name: str, text: str) -> None:
    assert differences(written(text), getattr(LLMEngine, name)) == []


@pytest.mark.parametrize(("name", "text"), CLASS_METHODS.items(), ids=CLASS_METHODS)
def test_a_class_method_takes_the_calls_of_the_document(name: str, text: str) -> None:
    assert differences(written(text, NAMES), getattr(LLMEngine, name)) == []
    assert isinstance(inspect.getattr_static(LLMEngine, name), classmethod)


def test_the_constructor_takes_the_documents_arguments() -> None:
    assert differences(written(CONSTRUCTOR, NAMES), LLMEngine) == []
    assert tuple(inspect.signature(LLMEngine).parameters)[: len(POSITIONS)] == POSITIONS


@pytest.mark.parametrize(("name", "value"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_an_engine_of_its_own_has_this_attribute(engine: Any, name: str, value: Any) -> None:
    assert getattr(engine, name) == value


@pytest.mark.parametrize("name", PARTS)
def test_an_engine_has_this_part(engine: Any, name: str) -> None:
    assert getattr(engine, name) is not None


def test_the_settings_are_where_the_documents_source_reads_them(engine: Any) -> None:
    assert engine.observability_config.otlp_traces_endpoint is None
    assert engine.vllm_config.parallel_config.data_parallel_size == 1
    assert engine.vllm_config.scheduler_config.stream_interval == 1
    assert engine.tokenizer is engine.renderer.tokenizer


def test_an_id_that_is_no_string_is_a_type_error(engine: Any) -> None:
    with pytest.raises(TypeError, match=r"^request_id must be a string, got <class 'int'>$"):
        engine.add_request(7, [1], params())


def test_a_request_goes_through_the_documents_two_steps(engine: Any) -> None:
    request = engine.input_processor.process_inputs(
        "mine", [1, 2, 3], params(max_tokens=2), supported_tasks=engine.get_supported_tasks()
    )
    assert (request.request_id, request.external_req_id) == ("mine", None)
    engine.input_processor.assign_request_id(request)
    assert request.request_id.startswith("mine-")
    assert request.external_req_id == "mine"


def test_a_request_made_by_the_caller_works_with_a_warning_and_keeps_its_id(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    input_processor._warn_once.cache_clear()
    made = engine.input_processor.process_inputs("own", [1, 2, 3], params(max_tokens=2))
    with caplog.at_level(logging.WARNING):
        for request in (copy(made), made):
            engine.add_request("other", request, params())
            assert list(run(engine)) == ["own"]
    deprecated, ignored = [record.getMessage() for record in caplog.records]
    assert deprecated.startswith(
        "Passing EngineCoreRequest to LLMEngine.generate() and .add_requests() is deprecated"
    )
    assert ignored == (
        "LLMEngine.add_request() was passed a request_id parameter that does not match the "
        "EngineCoreRequest.request_id attribute. The latter will be used, and the former will be "
        "ignored."
    )


def test_a_function_gets_the_model_as_a_torch_module(engine: Any) -> None:
    import torch

    [found] = engine.apply_model(
        lambda model: (isinstance(model, torch.nn.Module), len(list(model.parameters())))
    )
    assert found[0]
    assert found[1] > 0


def test_the_documents_call_of_a_worker_is_apply_model(engine: Any) -> None:
    def kind(model: object) -> str:
        return type(model).__name__

    assert engine.collective_rpc("apply_model", args=(kind,)) == engine.apply_model(kind)


def test_an_executor_runs_the_model_that_it_was_chosen_for(engine: Any) -> None:
    assert type(engine.model_executor) is Executor.get_class(CONFIG)
    ranks = msgspec.structs.replace(CONFIG, tensor_parallel_size=2)
    assert Executor.get_class(ranks).__name__ == "LeadRunner"
    with pytest.raises(InvalidRequestError, match="ModelRunner"):
        Executor.get_class(msgspec.structs.replace(CONFIG, executor_class="pathlib:Path"))


def test_a_step_may_be_one_for_nobody(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("waits", [1, 2], params(max_tokens=1))
    ran = []
    methods = engine.model_executor.worker_methods
    dummy_batch = methods["execute_dummy_batch"]

    def counted() -> None:
        ran.append("dummy")
        dummy_batch()

    monkeypatch.setitem(methods, "execute_dummy_batch", counted)
    engine.should_execute_dummy_batch = True
    assert engine.step() == []
    assert (ran, engine.should_execute_dummy_batch) == (["dummy"], False)
    assert list(run(engine)) == ["waits"]
    assert ran == ["dummy"]


def test_a_profile_names_the_parts_of_a_step(tmp_path: Path) -> None:
    engine = LLMEngine(msgspec.structs.replace(CONFIG, profile_dir=str(tmp_path)), None, True)
    engine.start_profile()
    engine.add_request("r", [1], params(max_tokens=1))
    run(engine)
    engine.stop_profile()
    engine.shutdown()
    [trace] = tmp_path.iterdir()
    named = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    parts = ("get_output", "process_outputs", "abort_requests", "record_stats")
    assert {f"llm_engine step: {part}" for part in parts} <= named
