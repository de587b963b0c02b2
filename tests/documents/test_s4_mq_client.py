"""The fifth document: `vllm.engine.multiprocessing.client`, with its source.

What its names do against an engine is in tests/contract/mq_client/.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from cases import each
from documents_kit.signatures import differences, written
from engine_kit.mq import CONFIG

client_module: Any = import_module("diptych_engine.as_vllm.engine.multiprocessing.client")
multiprocessing: Any = import_module("diptych_engine.as_vllm.engine.multiprocessing")
sampling_params: Any = import_module("diptych_engine.as_vllm.sampling_params")
config_module: Any = import_module("diptych_engine.as_vllm.config")
EngineClient: Any = import_module("diptych_engine.as_vllm.engine.protocol").EngineClient
Client: Any = client_module.MQLLMEngineClient
# fmt: off
GENERATORS = {
    "generate": "(self, prompt, sampling_params, request_id, lora_request=None, "
        "trace_headers=None, prompt_adapter_request=None, priority=0)",
    "encode": "(self, prompt, pooling_params, request_id, lora_request=None, trace_headers=None, "
        "priority=0)",
}
COROUTINES = {
    "abort": "(self, request_id)",
    "add_lora": "(self, lora_request)",
    "check_health": "(self)",
    "do_log_stats": "(self, scheduler_outputs=None, model_output=None)",
    "get_decoding_config": "(self)",
    "get_input_preprocessor": "(self)",
    "get_model_config": "(self)",
    "get_tokenizer": "(self, lora_request=None)",
    "get_vllm_config": "(self)",
    "is_sleeping": "(self)",
    "is_tracing_enabled": "(self)",
    "reset_mm_cache": "(self)",
    "reset_prefix_cache": "(self, device=None)",
    "run_heartbeat_loop": "(self, timeout)",
    "run_output_handler_loop": "(self)",
    "setup": "(self)",
    "sleep": "(self, level=1)",
    "start_profile": "(self)",
    "stop_profile": "(self)",
    "wake_up": "(self, tags=None)",
}
FUNCTIONS = {
    "close": "(self)",
    "get_data_socket": "(self)",
}
STATIC = {"is_unsupported_config": "(vllm_config)"}
# fmt: on
METHODS = {**GENERATORS, **COROUTINES, **FUNCTIONS}
PROPERTIES = ("dead_error", "errored", "is_running", "is_stopped")
ATTRIBUTES: dict[str, Any] = {
    "data_ipc_path": lambda c: c.data_ipc_path == PATH,
    "health_loop": None,
    "output_loop": None,
    "vllm_config": CONFIG,
    "model_config": lambda c: c.model_config.vocab_size == 64,
    "decoding_config": lambda c: isinstance(c.decoding_config, config_module.DecodingConfig),
    "output_queues": lambda c: dict(c.output_queues) == {},
    "context": lambda c: isinstance(c.context, zmq.asyncio.Context),
    "heartbeat_socket": lambda c: isinstance(c.heartbeat_socket, zmq.asyncio.Socket),
    "input_socket": lambda c: c.input_socket.closed is False,
    "output_socket": lambda c: c.output_socket.closed is False,
    "tokenizer": lambda c: inspect.iscoroutinefunction(c.tokenizer.get_lora_tokenizer_async),
    "input_preprocessor": lambda c: c.input_preprocessor.renderer is c.renderer,
}
PATH = "ipc:///tmp/nobody-listens-here"


@contextlib.contextmanager
def made() -> Iterator[Any]:
    """A client without an engine: the constructor connects, and waits for nobody."""
    client = Client(PATH, CONFIG, os.getpid())
    yield client
    client.close()


def test_the_module_has_the_documents_names() -> None:
    assert isinstance(client_module.logger, logging.Logger)
    assert issubclass(client_module.MQClientClosedError, Exception)
    assert issubclass(Client, EngineClient)


def test_the_constructor_takes_the_documents_arguments() -> None:
    assert differences(written("(ipc_path, engine_config, engine_pid)"), Client) == []


@each(("name", "text"), METHODS.items(), ids=METHODS)
def test_a_method_takes_the_calls_of_the_document(name: str, text: str) -> None:
    ours = getattr(Client, name)
    assert differences(written(text), ours) == []
    assert inspect.iscoroutinefunction(ours) is (name in COROUTINES)


@pytest.mark.parametrize(("name", "text"), STATIC.items(), ids=STATIC)
def test_a_static_method_is_one(name: str, text: str) -> None:
    assert isinstance(inspect.getattr_static(Client, name), staticmethod)
    assert differences(written(text), getattr(Client, name)) == []


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_is_one(name: str) -> None:
    assert isinstance(inspect.getattr_static(Client, name), property)


@each(("name", "value"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_a_new_client_has_this_attribute(name: str, value: Any) -> None:
    with made() as client:
        assert value(client) if callable(value) else getattr(client, name) == value


def test_a_new_client_is_well_and_owns_nothing_of_its_process() -> None:
    with made() as client:
        assert (client.is_running, client.is_stopped, client.errored) == (True, False, False)
        assert isinstance(client.dead_error, BaseException)


def test_the_data_socket_is_a_dealer_that_is_closed_with_its_block() -> None:
    with made() as client:
        with client.get_data_socket() as socket:
            assert isinstance(socket, zmq.asyncio.Socket)
            assert socket.type == zmq.DEALER
        assert socket.closed
        with pytest.raises(ZeroDivisionError), client.get_data_socket() as socket:
            raise ZeroDivisionError
        assert socket.closed


def test_closing_ends_the_context_and_with_it_every_socket() -> None:
    with made() as client:
        client.close()
        assert client.context.closed
        assert client.heartbeat_socket.closed
        assert client.input_socket.closed
        assert client.output_socket.closed
        assert (client.is_running, client.errored) == (True, False), "it is the engine's state"


def test_the_first_error_is_kept_and_the_dead_error_names_it() -> None:
    with made() as client:
        client._set_errored(first := OSError("the first"))
        client._set_errored(OSError("the second"))
        assert client._first_error is first
        assert (client.is_running, client.is_stopped, client.errored) == (False, True, True)
        dead = client.dead_error
        assert isinstance(dead, multiprocessing.MQEngineDeadError)
        assert isinstance(dead, RuntimeError)
        assert repr(first) in str(dead)
        assert repr(first) in str(multiprocessing.ENGINE_DEAD_ERROR(first))


async def test_health_is_the_first_error_itself() -> None:
    with made() as client:
        await client.check_health()
        client._set_errored(first := OSError("the first"))
        with pytest.raises(OSError, match="the first") as caught:
            await client.check_health()
        assert caught.value is first


async def test_nobody_answers_is_a_time_out_that_names_the_milliseconds() -> None:
    client = Client(PATH, CONFIG, os.getpid(), rpc_timeout_ms=50)
    with pytest.raises(TimeoutError, match=r"^RPCServer didn't reply within 50 ms$"):
        await client.setup()
    client.close()


def test_an_engine_has_ten_seconds_to_answer() -> None:
    assert import_module("diptych_engine.as_vllm.envs").VLLM_RPC_TIMEOUT == 10_000


@pytest.mark.parametrize(("size", "unsupported"), [(1, False), (2, True)])
def test_a_pipeline_is_unsupported(size: int, unsupported: bool) -> None:
    class Parallel:
        pipeline_parallel_size = size

    class Theirs:
        parallel_config = Parallel

    assert Client.is_unsupported_config(Theirs) is unsupported


def test_a_form_is_the_same_under_its_older_name() -> None:
    guided = sampling_params.GuidedDecodingParams(regex="[ab]", backend="guidance")
    params = sampling_params.SamplingParams(guided_decoding=guided, max_tokens=3)
    assert params.guided_decoding is guided
    assert params.logits_processors is None
    assert config_module.DecodingConfig.backend == "guidance"


def test_the_decoding_config_names_what_finds_reasoning() -> None:
    thinks = msgspec.structs.replace(CONFIG, reasoning_parser="think")
    of = config_module.DecodingConfig.of
    assert (of(CONFIG, None).reasoning_backend, of(thinks, None).reasoning_backend) == ("", "think")
    assert of(CONFIG, "<think></think>").reasoning_backend == "think"
