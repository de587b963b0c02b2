"""The older client at work, on a real engine: rows Q1 to Q5, Q9, Q10, and C9."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from diptych_engine.as_vllm.sampling_params import (  # type: ignore[import-not-found]
    GuidedDecodingParams,
)
from engine_kit.core import DUMMY
from engine_kit.mq import (
    CONFIG,
    LONG,
    PATIENCE_MS,
    REAL,
    Eventually,
    answer,
    client_of,
    read,
    reading,
    real_with,
    running,
)
from model_kit.questions import COUNTING, FACT

from diptych_engine import MQLLMEngineClient
from diptych_engine.as_vllm import SamplingParams
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.v0.params import PromptAdapterRequest
from diptych_frontend.v0.sockets import HOW_ARE_YOU
from diptych_protocol import (
    EngineConfig,
    EngineCoreRequestType,
    InvalidRequestError,
    RequestOutputKind,
    UnsupportedFeatureError,
    UtilityCall,
    UtilityError,
    UtilityOutput,
    wire,
)
from diptych_protocol.as_sent import encode_call


async def greet(core: CoreProcess) -> None:
    client = client_of(core)
    try:
        await client.setup()
    finally:
        client.close()


async def greet_until_refused(core: CoreProcess) -> None:
    while True:
        await greet(core)


async def num_running(client: MQLLMEngineClient) -> int:
    return (await client.refresh_stats()).num_running


async def next_answer(socket: zmq.asyncio.Socket) -> UtilityOutput:
    """A core says nothing, in a message, to find out which of its clients have gone."""
    while True:
        message = wire.outputs_decoder.decode(await socket.recv_multipart())
        if message.utility_output is not None:
            return message.utility_output


# --- the wire, and the greeting ---------------------------------------------------------------


async def test_contract_Q01_raw_sockets_speak_every_role(client: MQLLMEngineClient) -> None:
    """A question, a heartbeat, and a request with its outputs, each on a connection of its own."""
    with client.get_data_socket() as data, client.get_data_socket() as heart:
        await heart.send_multipart(HOW_ARE_YOU)
        question = UtilityCall(0, 7, "describe", [])
        await data.send_multipart((EngineCoreRequestType.UTILITY.value, *encode_call(question)))
        greeted, beat = await next_answer(data), await next_answer(heart)
        assert (greeted.call_id, greeted.failure_message) == (7, None)
        assert (beat.call_id, beat.failure_message) == (0, None)
    with client.get_data_socket() as requests:
        request = client.input_processor.process("raw", FACT.words, SamplingParams(max_tokens=3))
        frames = (EngineCoreRequestType.ADD.value, *wire.encoder.encode(request))
        await requests.send_multipart(frames)
        tokens: list[int] = []
        while True:
            message = wire.outputs_decoder.decode(await requests.recv_multipart())
            for output in message.outputs:
                tokens += output.new_token_ids
            if message.outputs and message.outputs[0].finished:
                break
    assert len(tokens) == 3


async def test_contract_Q01_requests_and_outputs_have_one_connection(
    client: MQLLMEngineClient,
) -> None:
    """What is sent by one of its names ends what `generate` has asked for."""
    [task] = reading(client, "r", length=LONG)
    while not client.output_queues:
        await asyncio.sleep(0)
    [internal_id] = client._cores.members[0].open
    await client.input_socket.send_multipart(
        (EngineCoreRequestType.ABORT.value, *wire.encoder.encode([internal_id]))
    )
    assert len(await task) < LONG
    assert client.input_socket is client.output_socket


async def test_contract_Q01_one_client_after_the_other_is_served(served: CoreProcess) -> None:
    for _ in range(2):
        client = client_of(served)
        await client.setup()
        assert await answer(client, FACT.words, max_tokens=1) == FACT.answer
        client.close()


@pytest.mark.parametrize(("size", "unsupported"), [(1, False), (2, True), (8, True)])
def test_contract_Q02_layers_are_not_split_over_processes(size: int, unsupported: bool) -> None:
    config = msgspec.structs.replace(CONFIG, pipeline_parallel_size=size)
    assert MQLLMEngineClient.is_unsupported_config(config) is unsupported
    if unsupported:
        with pytest.raises(InvalidRequestError, match="pipeline_parallel_size must be 1"):
            config.check()


async def test_contract_Q03_setup_may_be_repeated_while_the_engine_starts(
    doomed: CoreProcess,
) -> None:
    client = client_of(doomed)
    await asyncio.gather(*(client.setup() for _ in range(5)))
    loops = (client.output_loop, client.health_loop)
    await client.setup()
    assert (client.output_loop, client.health_loop) == loops
    names = [task.get_name() for task in asyncio.all_tasks()]
    for loop in ("core watcher", "engine outputs", "engine health"):
        assert names.count(loop) == 1, loop
    assert len(await read(client, "in order", length=8)) == 8
    client.close()


async def test_outputs_come_in_order(client: MQLLMEngineClient) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    said = [o.outputs[0].text async for o in client.generate(COUNTING.words, params, "in order")]
    assert "".join(said).startswith(COUNTING.answer)
    assert len(said) > 3


async def test_contract_Q04_failures_leave_no_socket(
    client: MQLLMEngineClient, eventually: Eventually
) -> None:
    before = psutil.Process().num_fds()
    for _ in range(1000):
        with pytest.raises(RuntimeError), client.get_data_socket():
            raise RuntimeError
    # ZMQ's own threads close descriptors.
    await eventually(lambda: psutil.Process().num_fds() <= before + 2)


async def test_contract_Q04_failed_calls_leave_nothing(
    client: MQLLMEngineClient, eventually: Eventually
) -> None:
    before = psutil.Process().num_fds()
    for _ in range(200):
        with pytest.raises(UtilityError, match="no_such_call"):
            await client.call_core("no_such_call", timeout_s=PATIENCE_MS / 1000)
    await eventually(lambda: psutil.Process().num_fds() <= before + 2)
    assert client._cores.members[0].client._calls == {}


async def test_contract_Q05_an_engine_that_still_starts_is_a_time_out_and_no_more() -> None:
    with running(REAL) as core:
        client = client_of(core, rpc_timeout_ms=1)
        with pytest.raises(TimeoutError, match="RPCServer didn't reply within 1 ms"):
            await client.setup()
        client._rpc_timeout_ms = PATIENCE_MS
        await client.setup()  # as V0's server does: it asks again
        assert await answer(client, FACT.words, max_tokens=1) == FACT.answer
        client.close()


async def test_contract_Q05_an_engine_that_refuses_says_why() -> None:
    with running(real_with(shutdown_timeout_s=PATIENCE_MS / 1000)) as core:
        first = client_of(core)
        await first.setup()
        params = SamplingParams(max_tokens=LONG, ignore_eos=True)
        outputs = first.generate(FACT.words, params, "keeps it here")
        await anext(outputs)
        core.process.send_signal(signal.SIGTERM)
        with pytest.raises(UtilityError, match="shutting down"):
            await greet_until_refused(core)
        await outputs.aclose()
        first.close()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4318/v1/traces", None])
async def test_contract_C09_whether_it_traces_is_learned_from_the_engine(
    endpoint: str | None,
) -> None:
    theirs = EngineConfig(DUMMY, num_blocks=64, num_threads=1, otlp_traces_endpoint=endpoint)
    with running(theirs) as core:
        client = MQLLMEngineClient(
            core.endpoint, CONFIG, core.process.pid, rpc_timeout_ms=PATIENCE_MS
        )
        assert await client.is_tracing_enabled() is False
        await client.setup()
        assert await client.is_tracing_enabled() is client.tracing_flag is (endpoint is not None)
        client.close()


# --- requests ---------------------------------------------------------------------------------


async def test_contract_Q09_the_arguments_may_stand_in_the_documents_order(
    client: MQLLMEngineClient,
) -> None:
    assert await answer(client, FACT.words, None, None, None, 0, max_tokens=1) == FACT.answer
    with pytest.raises(InvalidRequestError, match="priority 3 needs"):
        await answer(client, FACT.words, None, None, None, 3)
    prompt_adapter = PromptAdapterRequest("soft", 1, "/soft", 8)
    with pytest.raises(UnsupportedFeatureError, match="prompt_adapter_request"):
        await answer(client, FACT.words, None, None, prompt_adapter)
    assert not client.output_queues


async def test_contract_Q09_an_id_may_run_once_at_a_time(
    client: MQLLMEngineClient, eventually: Eventually
) -> None:
    [task] = reading(client, "same", length=LONG)
    await eventually(lambda: "same" in client.output_queues)
    with pytest.raises(ValueError, match="Request same already exists"):
        await read(client, "same")
    assert list(client.output_queues) == ["same"]
    await client.abort("same")
    assert len(await task) < LONG
    assert len(await read(client, "same", length=5)) == 5


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 9, 50, 1000])
async def test_contract_Q09_whenever_a_reader_leaves_nothing_is_left(
    served: CoreProcess, eventually: Eventually, turns: int
) -> None:
    """The turns of the event loop are those before the connection, within it, and at work."""
    client = client_of(served)
    [task] = reading(client, "r", length=LONG)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not client.output_queues
    await client.setup()

    async def is_idle() -> bool:
        return await num_running(client) == 0

    await eventually(is_idle)
    client.close()


async def test_contract_Q09_what_is_refused_leaves_nothing(client: MQLLMEngineClient) -> None:
    for prompt, fields in (
        ([10**9], {}),
        ("text", {"max_tokens": -1}),
        ("text", {"guided_decoding": GuidedDecodingParams(regex="[")}),
    ):
        with pytest.raises(InvalidRequestError):
            await answer(client, prompt, **fields)
        assert not client.output_queues


async def test_contract_Q09_grammars_are_compiled_in_the_clients_process(
    client: MQLLMEngineClient,
) -> None:
    """With an engine that stands still, one that cannot be compiled is refused all the same."""
    pid = client.description.pid
    params: dict[str, Any] = {"guided_decoding": GuidedDecodingParams(choice=[" Lyon", " Nice"])}
    assert await answer(client, FACT.words, **params) in (" Lyon", " Nice")
    psutil.Process(pid).suspend()
    try:
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            await answer(
                client, FACT.words, guided_decoding=GuidedDecodingParams(grammar="start: nowhere")
            )
    finally:
        psutil.Process(pid).resume()


async def test_contract_Q09_the_callers_parameters_stay_as_they_are(
    client: MQLLMEngineClient,
) -> None:
    guided = GuidedDecodingParams(choice=[" Lyon", " Nice"])
    params = SamplingParams(max_tokens=4, guided_decoding=guided)
    async for _ in client.generate(FACT.words, params, "r"):
        pass
    assert params == SamplingParams(max_tokens=4, guided_decoding=guided)
    with pytest.raises(InvalidRequestError, match="guidance"):
        await answer(
            client, "x", guided_decoding=GuidedDecodingParams(regex="a", backend="outlines")
        )
    with pytest.raises(InvalidRequestError, match="none of this engine's functions"):
        await answer(client, "x", logits_processors=[lambda _ids, logits: logits])


async def test_contract_Q10_late_outputs_of_an_aborted_request_are_dropped(
    client: MQLLMEngineClient, eventually: Eventually
) -> None:
    [leaves] = reading(client, "leaves", length=LONG)
    [stays] = reading(client, "stays", length=60)
    await eventually(lambda: len(client.output_queues) == 2)
    [late] = client.output_processor.abort(["leaves"])  # the core goes on, and so do its outputs
    assert len(await stays) == 60
    assert len(await leaves) < LONG
    assert await num_running(client) == 1
    assert not client.errored
    assert not client.output_queues
    client._cores.abort([late])
