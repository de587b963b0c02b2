"""The older client at work, on a real engine: rows Q1 to Q5, Q9 to Q13, Q15 to Q17, and C9."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
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
from diptych_frontend.v0.errors import MQClientClosedError
from diptych_frontend.v0.params import DecodingConfig, Device, PromptAdapterRequest
from diptych_frontend.v0.rpc import (
    RPCAbortRequest,
    RPCHeartbeatRequest,
    RPCStartupResponse,
    answer_in,
    frames_of,
)
from diptych_protocol import (
    EngineConfig,
    EngineCoreRequestType,
    EngineGenerateError,
    InvalidRequestError,
    LoRARequest,
    RequestOutputKind,
    UnsupportedFeatureError,
    UtilityError,
    UtilityOutput,
    wire,
)
from diptych_protocol.as_sent import encode_call
from diptych_protocol.wire import UtilityCall

CACHED = "The capital of France is Paris, and the capital of Italy is Rome, and so on and so forth"


async def cached_tokens(client: MQLLMEngineClient) -> int:
    params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = [o async for o in client.generate(CACHED, params, "cached")]
    return output.num_cached_tokens


async def greet(core: CoreProcess) -> None:
    client = client_of(core)
    try:
        await client.setup()
    finally:
        client.close()


async def greet_until_refused(core: CoreProcess) -> None:
    while True:
        await greet(core)


async def collect(outputs: AsyncIterator[Any]) -> list[Any]:
    return [output async for output in outputs]


async def num_running(client: MQLLMEngineClient) -> int:
    return (await client.refresh_stats()).num_running


# --- the wire, and the greeting ---------------------------------------------------------------


async def test_contract_Q01_raw_sockets_speak_every_role(client: MQLLMEngineClient) -> None:
    """A question, a heartbeat, and a request with its outputs, each on a connection of its own."""
    with client.get_data_socket() as data, client.get_data_socket() as heart:
        assert isinstance(await client._wait_for_server_rpc(data), RPCStartupResponse)
        await heart.send_multipart(frames_of(RPCHeartbeatRequest.HOW_ARE_YOU))
        await client._await_ack("no heartbeat", heart)
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
    await client._send_one_way_rpc_request(RPCAbortRequest(internal_id), client.input_socket)
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
    params = SamplingParams(temperature=0.0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    said = [o.outputs[0].text async for o in client.generate(COUNTING.words, params, "in order")]
    assert "".join(said).startswith(COUNTING.answer)
    assert len(said) > 3
    client.close()


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
    tasks = reading(client, "leaves", "stays", length=60)
    await eventually(lambda: len(client.output_queues) == 2)
    client.output_processor.abort(["leaves"])  # the core goes on, and so do its outputs
    assert len(await tasks[1]) == 60
    assert len(await tasks[0]) < 60
    assert not client.errored
    assert not client.output_queues


async def test_contract_Q10_what_is_handed_in_goes_to_its_request_or_to_nobody(
    client: MQLLMEngineClient,
) -> None:
    params = SamplingParams(max_tokens=LONG, ignore_eos=True)
    outputs = client.generate(FACT.words, params, "r")
    output = await anext(outputs)
    client._add_output(dataclasses.replace(output, request_id="never heard of"))
    client._add_output(dataclasses.replace(output, prompt="handed in", finished=True))
    assert [o.prompt async for o in outputs][-1] == "handed in"
    outputs = client.generate(FACT.words, params, "s")
    await anext(outputs)
    client.output_queues["s"].put_nowait(ZeroDivisionError("put there"))
    with pytest.raises(EngineGenerateError, match="put there"):
        await collect(outputs)
    assert not client.errored


# --- after the end ----------------------------------------------------------------------------


async def test_contract_Q11_an_abort_after_the_end_is_quiet(client: MQLLMEngineClient) -> None:
    client.close()
    await client.abort("anything")
    await client.abort(["one", "another"])


async def test_contract_Q12_every_call_after_the_end_says_so(client: MQLLMEngineClient) -> None:
    [task] = reading(client, "open", length=LONG)
    while not client.output_queues:
        await asyncio.sleep(0)
    client.close()
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: read(client, "r"),
        client.setup,
        client.refresh_stats,
        client.start_profile,
        client.stop_profile,
        client.reset_mm_cache,
        client.reset_prefix_cache,
        client.sleep,
        client.wake_up,
        client.is_sleeping,
        client.list_loras,
        lambda: client.add_lora(LoRARequest("name", 1, "/nowhere")),
        client.drain_report,
        client.check_live,
        lambda: client._await_ack("no", client.heartbeat_socket),
        lambda: client._wait_for_server_rpc(client.heartbeat_socket),
    ]
    for call in calls:
        with pytest.raises(MQClientClosedError):
            await call()
    with pytest.raises(MQClientClosedError), client.get_data_socket():
        pass
    with pytest.raises(Exception, match="shut down"):  # V0 left it waiting for ever
        await task


# --- calls ------------------------------------------------------------------------------------


async def test_contract_Q13_an_acknowledgement_is_waited_for(
    client: MQLLMEngineClient,
) -> None:
    with client.get_data_socket() as socket:
        call = UtilityCall(0, 1, "no_such_call", [])
        await socket.send_multipart((EngineCoreRequestType.UTILITY.value, *encode_call(call)))
        with pytest.raises(UtilityError, match="no_such_call"):
            await client._await_ack("no", socket)
        await socket.send_multipart(frames_of(RPCHeartbeatRequest.HOW_ARE_YOU))
        await client._await_ack("no", socket)
        socket.timeout_ms = 20
        with pytest.raises(TimeoutError, match="MQLLMEngine didn't reply within 20ms"):
            await client._await_ack("no", socket)  # nothing was asked


async def test_contract_Q15_questions_are_answered_while_others_generate(
    client: MQLLMEngineClient, eventually: Eventually
) -> None:
    [task] = reading(client, "r", length=LONG)
    await eventually(lambda: client.output_queues)
    assert await client.is_sleeping() is False
    with pytest.raises(UtilityError, match="adapter /nowhere"):
        await client.add_lora(LoRARequest("name", 3, "/nowhere"))
    assert "r" in client.output_queues, "both were answered before it ended"
    await client.abort("r")
    await task


async def test_contract_Q16_commands_are_one_way(
    client: MQLLMEngineClient, eventually: Eventually
) -> None:
    """None waits for the engine, which stands still; it does them when it goes on."""

    async def sleeps_at(level: int) -> None:
        await eventually(lambda: client._cores.members[0].stats.sleep_level == level)

    core = psutil.Process(client.description.pid)
    for command, level in (
        (lambda: client.sleep(2), 2),
        (lambda: client.wake_up(["weights"]), 1),
        (lambda: client.wake_up(None), 0),
    ):
        core.suspend()
        try:
            await command()
            await client.reset_mm_cache()
        finally:
            core.resume()
        await sleeps_at(level)
        assert await client.is_sleeping() is (level > 0)
    assert await answer(client, FACT.words, max_tokens=1) == FACT.answer


async def test_contract_Q16_a_command_that_means_nothing_is_refused_at_once(
    client: MQLLMEngineClient,
) -> None:
    """Its refusal by the engine would not be heard."""
    for command, field in (
        (client.sleep(7), "level"),
        (client.wake_up(["everything"]), "tags"),
        (client.reset_prefix_cache("cuda"), "device"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError, match=field):
            await command
    assert await client.is_sleeping() is False


async def test_contract_Q16_the_prefix_cache_is_forgotten_by_device(
    client: MQLLMEngineClient,
) -> None:
    await cached_tokens(client)
    assert await cached_tokens(client) > 0
    await client.reset_prefix_cache(Device.CPU)
    assert await cached_tokens(client) > 0, "no block was ever swapped out to there"
    for device in (None, Device.GPU):
        await client.reset_prefix_cache(device)
        assert await cached_tokens(client) == 0


async def test_contract_Q16_a_profile_is_written(
    client: MQLLMEngineClient, served: CoreProcess
) -> None:
    await client.start_profile()
    await read(client, "profiled", length=2)
    await client.stop_profile()
    await client.is_sleeping()  # answered after it
    assert served.config.profile_dir is not None
    [trace] = Path(served.config.profile_dir).iterdir()
    assert trace.stat().st_size > 0


async def test_contract_Q17_getters_tell_what_the_client_was_made_of(
    client: MQLLMEngineClient, served: CoreProcess
) -> None:
    assert await client.get_vllm_config() is served.config is client.vllm_config
    assert await client.get_model_config() is client.model_config
    assert await client.get_input_preprocessor() is client.input_preprocessor
    assert await client.get_decoding_config() is client.decoding_config == DecodingConfig()
    tokenizer = await client.get_tokenizer()
    assert tokenizer is await client.tokenizer.get_lora_tokenizer_async(None)
    assert tokenizer.decode(tokenizer.encode(FACT.words)) == FACT.words
    await client.do_log_stats(object(), [])
    await client.do_log_stats()


def test_the_heartbeat_is_a_question_with_an_answer() -> None:
    outputs = wire.EngineCoreOutputs(utility_output=UtilityOutput(1, result={}))
    assert answer_in(wire.encoder.encode(outputs)) == UtilityOutput(1, result={})
