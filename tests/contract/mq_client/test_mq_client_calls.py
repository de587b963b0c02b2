"""The older client's calls to a real engine, and those after its end: rows Q9, Q11 to Q17, Q19."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_kit.mq import LONG, Eventually, answer, read, reading, real_with, running, set_up
from model_kit.questions import FACT
from waits import PATIENCE_S

from diptych_engine import MQLLMEngineClient
from diptych_engine.as_vllm import SamplingParams
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.v0.mq_client import MQClientClosedError
from diptych_frontend.v0.params import DecodingConfig, Device
from diptych_protocol import (
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    UtilityError,
)

CACHED = "The capital of France is Paris, and the capital of Italy is Rome, and so on and so forth"


async def cached_tokens(client: MQLLMEngineClient) -> int:
    params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = [o async for o in client.generate(CACHED, params, "cached")]
    return output.num_cached_tokens


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
    ]
    for call in calls:
        with pytest.raises(MQClientClosedError):
            await call()
    with pytest.raises(MQClientClosedError), client.get_data_socket():
        pass
    with pytest.raises(Exception, match="shut down"):  # V0 left it waiting for ever
        await task


# --- requests of other kinds ---------------------------------------------------------------------


async def test_contract_Q09_a_prompt_is_encoded_in_the_documents_order_of_arguments(
    client: MQLLMEngineClient,
) -> None:
    params = PoolingParams(task="embed")
    outputs = [o async for o in client.encode(FACT.words, params, "e", None, None, 0)]
    [vector] = [output.outputs.data for output in outputs]
    assert outputs[0].finished
    assert vector.shape == (client.model_config.hidden_size,)
    by_ids = client.encode(outputs[0].prompt_token_ids, params, "e")
    [same] = [output.outputs.data async for output in by_ids]
    assert same.tolist() == pytest.approx(vector.tolist(), abs=1e-4)
    with pytest.raises(InvalidRequestError, match="priority 3 needs"):
        await anext(client.encode(FACT.words, params, "e", None, None, 3))
    with pytest.raises(InvalidRequestError, match="embed"):
        await anext(client.encode(FACT.words, PoolingParams(task="no such"), "e"))
    assert not client.output_queues


async def test_contract_Q19_the_lower_priority_is_served_first_where_they_count(
    eventually: Eventually,
) -> None:
    with running(real_with(scheduling_policy="priority", max_num_seqs=1)) as core:
        async with set_up(core) as client:
            ended: list[str] = []

            async def ask(name: str, priority: int) -> None:
                outputs = client.generate(FACT.words, params, name, None, None, None, priority)
                ended.extend([output.request_id async for output in outputs])

            async def wait(number: int) -> bool:
                return (await client.refresh_stats()).num_waiting == number

            params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY)
            long = SamplingParams(max_tokens=LONG, ignore_eos=True)
            runs = client.generate(FACT.words, long, "runs", priority=-1)
            await anext(runs)
            tasks = [asyncio.create_task(ask("later", 5)), asyncio.create_task(ask("sooner", 1))]
            await eventually(partial(wait, 2))
            await runs.aclose()
            await asyncio.gather(*tasks)
            assert ended == ["sooner", "later"]


# --- calls ------------------------------------------------------------------------------------


async def test_contract_Q13_an_acknowledgement_is_waited_for(client: MQLLMEngineClient) -> None:
    with pytest.raises(UtilityError, match="no_such_call"):
        await client.call_core("no_such_call", timeout_s=PATIENCE_S)
    core = psutil.Process(client.description.pid)
    core.suspend()
    try:
        with pytest.raises(TimeoutError, match=r"is_sleeping: no answer within 0\.02 s"):
            await client.call_core("is_sleeping", timeout_s=0.02)
    finally:
        core.resume()
    assert await client.is_sleeping() is False


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


async def test_contract_Q16_a_healthy_session_says_nothing_in_the_log(
    client: MQLLMEngineClient, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither here nor, at the level of a warning, in the engine."""
    async for _ in client.generate(FACT.words, SamplingParams(max_tokens=2), "healthy"):
        pass
    for call in (client.sleep, client.wake_up, client.reset_prefix_cache, client.check_health):
        await call()
    await client.abort("nobody")
    assert await client.is_sleeping() is False
    assert caplog.records == []
    assert " W [" not in capfd.readouterr().err
