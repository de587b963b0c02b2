"""AsyncLLM as the contract has it: rows A1 to A9, and C1 and C10 of every client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import each
from engine_kit import executor
from engine_kit.async_llm import ARGS, ENDLESS, MODEL, final, params, until
from engine_kit.core import DUMMY
from engine_kit.stat_logger import RecordingLogger
from free_ports import free_port
from waits import PATIENCE_S

from diptych_engine import AsyncLLM
from diptych_frontend.core_client.curve import new_keys
from diptych_frontend.core_client.member import CoreMember
from diptych_protocol import (
    EngineClient,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeadError,
    InvalidRequestError,
    SchedulerStats,
    UnsupportedFeatureError,
    UsageContext,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONFIG = ARGS.create_engine_config()


def recording(engine: AsyncLLM) -> RecordingLogger:
    """The receiver of statistics that an engine was given."""
    assert engine.logger_manager is not None
    _, logger = engine.logger_manager.stat_loggers
    assert isinstance(logger, RecordingLogger)
    return logger


@pytest.fixture(scope="module")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, keys = tmp_path_factory.mktemp("keys"), new_keys()
    (folder / "curve-public").write_text(keys.public)
    (folder / "curve-secret").write_text(keys.secret)
    return folder


@pytest.fixture(scope="module")
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def engine(keys_dir: Path, address: str) -> Iterator[AsyncLLM]:
    """Made where no event loop runs; its first request waits until it is ready."""
    engine = AsyncLLM(
        ARGS.create_engine_config(),
        stat_loggers=[RecordingLogger],
        public_endpoint=address,
        keys_dir=keys_dir,
    )
    yield engine
    engine.shutdown()
    engine.shutdown()


async def test_contract_A01_built_without_a_loop_it_starts_with_the_first_request(
    engine: AsyncLLM,
) -> None:
    assert engine.is_running
    answer = await asyncio.wait_for(final(engine), PATIENCE_S)
    assert len(answer.outputs[0].token_ids) == 8
    assert engine.description.num_blocks == 8192


async def test_contract_A01_a_registry_of_processors_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="mm_registry"):
        AsyncLLM(EngineConfig(DUMMY), mm_registry=object())  # type: ignore[arg-type]


async def test_contract_A01_a_class_of_the_users_runs_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    support = Path(executor.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=os.pathsep)  # for the engine
    engine = AsyncLLM(CONFIG, executor.CountingExecutor)
    try:
        await asyncio.wait_for(engine.ready(), PATIENCE_S)
        [to_warm_up] = await engine.collective_rpc("launched")
        answer = await final(engine)
        steps = len(answer.outputs[0].token_ids)
        assert await engine.collective_rpc("launched") == [to_warm_up + steps]
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("executor_class", "why"),
    [
        (type("Local", (), {"__qualname__": "made.<locals>.Local"}), "can be imported"),
        ("ModelRunner", "can be imported"),
    ],
)
async def test_contract_A01_an_executor_without_a_name_is_refused(
    executor_class: Any, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as refusal:
        AsyncLLM(CONFIG, executor_class)
    assert refusal.value.param == "executor_class"


async def test_contract_A01_an_executor_that_runs_no_model_ends_the_start() -> None:
    engine = AsyncLLM(CONFIG, EngineConfig)
    with pytest.raises(EngineDeadError, match="exited with code 2"):
        await asyncio.wait_for(engine.ready(), PATIENCE_S)
    engine.shutdown()


@pytest.mark.parametrize("starts", [True, False])
async def test_contract_A01_the_engines_loop_starts_when_it_is_asked_to(starts: bool) -> None:
    engine = AsyncLLM(
        CONFIG,
        usage_context=UsageContext.API_SERVER,
        use_cached_outputs=True,
        start_engine_loop=starts,
        stat_loggers=[RecordingLogger],
    )
    try:
        assert engine.usage_context is UsageContext.API_SERVER
        assert all(member.is_watched is starts for member in engine._cores.members)
        await asyncio.wait_for(final(engine), PATIENCE_S)
        logger = recording(engine)
        assert logger.initialized == 1
        assert sum(each.num_generation_tokens for each in logger.iterations) == 8
        [ended] = [one for each in logger.iterations for one in each.finished_requests]
        assert ended.num_generation_tokens == 8
        await engine.sleep(0)
        await engine.wake_up()
        assert logger.sleeps == [(1, 0), (0, 0)]
    finally:
        engine.shutdown()


async def test_contract_A01_a_front_end_has_a_number_below_their_count() -> None:
    with pytest.raises(InvalidRequestError, match="client_index 2 is not one of 2"):
        AsyncLLM(EngineConfig(DUMMY), client_count=2, client_index=2)


async def test_contract_A01_a_second_front_end_may_join_a_core(
    engine: AsyncLLM, keys_dir: Path, address: str
) -> None:
    expected = await final(engine)
    second = AsyncLLM(
        engine.vllm_config,
        client_addresses={"input_address": address},
        client_count=2,
        client_index=1,
        keys_dir=keys_dir,
    )
    assert (await final(second)).outputs == expected.outputs
    assert second.description.epoch == engine.description.epoch
    second.shutdown()
    assert (await final(engine)).outputs == expected.outputs, "its core lives on"
    with pytest.raises(InvalidRequestError, match="input_address"):
        AsyncLLM(engine.vllm_config, client_addresses={"output_address": address})


async def test_contract_A02_arguments_make_the_configuration_that_the_engine_has() -> None:
    engine = AsyncLLM.from_engine_args(ARGS, stat_loggers=[RecordingLogger])
    expected = EngineConfig(
        MODEL, num_blocks=8192, num_threads=1, max_num_seqs=64, max_num_batched_tokens=256
    )
    assert engine.vllm_config == expected
    assert type(engine.vllm_config) is EngineConfig
    assert engine.logger_manager is not None
    _, logger = engine.logger_manager.stat_loggers
    assert isinstance(logger, RecordingLogger)
    engine.shutdown()


async def test_contract_A03_two_requests_may_have_the_same_id(engine: AsyncLLM) -> None:
    first, second = await asyncio.gather(final(engine, "same"), final(engine, "same"))
    assert first.request_id == second.request_id == "same"
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


async def test_contract_A03_a_request_is_registered_before_anything_is_awaited(
    engine: AsyncLLM,
) -> None:
    await engine.ready()
    adding = engine.add_request("eager", [1, 2], params())
    with pytest.raises(StopIteration) as returned:
        adding.send(None)
    collector = returned.value.value
    assert len(engine.output_processor.answers) == 1
    while not (await collector.get()).finished:
        pass
    assert collector.finished


async def test_contract_A04_each_of_n_answers_is_a_request_of_the_core(engine: AsyncLLM) -> None:
    collector = await engine.add_request("many", [1, 2], params(n=3, max_tokens=ENDLESS))
    assert [part.split("_")[0] for part in collector.request_ids] == ["0", "1", "2"]
    assert len(engine.output_processor.answers) == 3
    parent = collector.request_ids[0].removeprefix("0_")
    await engine.abort(parent, internal=True)
    assert len(engine.output_processor.answers) == 0


async def test_contract_A06_an_internal_id_names_one_of_several(engine: AsyncLLM) -> None:
    collectors = [await engine.add_request("same", [1, 2], params()) for _ in range(2)]
    await engine.abort(collectors[0].request_ids, internal=True)
    await engine.abort("same", internal=True)
    ends = []
    for collector in collectors:
        while not collector.finished:
            output = await collector.get()
        ends.append(output.outputs[0].finish_reason)
    assert ends == ["abort", "length"]


async def test_contract_A05_a_large_step_lets_others_run_between_its_pieces() -> None:
    seen: list[int] = []

    class Owner:
        def take(self, message: EngineCoreOutputs) -> None:
            seen.append(len(message.outputs))
            if message.scheduler_stats is not None:
                seen.append(-1)

        def die(self, cause: EngineDeadError) -> None:
            raise AssertionError(cause)

    owner = Owner()
    member = CoreMember(Unused(), 0, on_outputs=owner.take, on_death=owner.die)
    outputs = [EngineCoreOutput(str(i), [i]) for i in range(300)]
    member._take(EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats()))
    member._take(EngineCoreOutputs(outputs=outputs[:1]))
    assert seen == [128, -1], "the first piece at once"
    await asyncio.sleep(0)
    assert seen == [128, -1, 128]
    for _ in range(3):
        await asyncio.sleep(0)
    assert seen == [128, -1, 128, 44, 1], "what came later stays behind"


async def test_contract_A05_an_error_in_the_output_handler_reaches_who_waits() -> None:
    causes: list[str] = []

    class Owner:
        def take(self, message: EngineCoreOutputs) -> None:
            raise RuntimeError("cannot")

        def die(self, cause: EngineDeadError) -> None:
            causes.append(str(cause))

    owner = Owner()
    member = CoreMember(Unused(), 0, on_outputs=owner.take, on_death=owner.die)
    member._take(EngineCoreOutputs())
    assert causes == ["the output handler failed: RuntimeError('cannot')"]


class Unused:
    """A core that nobody talks to."""

    endpoint, keys = "ipc://nowhere", None

    def ended(self) -> None: ...

    async def wait(self) -> EngineDeadError:
        raise AssertionError

    def unlink(self) -> None: ...

    def terminate(self) -> None: ...

    def stop(self, timeout_s: float = 0) -> None: ...


async def test_contract_A06_an_abort_by_the_users_id_ends_all_that_have_it(
    engine: AsyncLLM,
) -> None:
    await engine.ready()
    running = [asyncio.create_task(final(engine, "gone", max_tokens=ENDLESS)) for _ in range(2)]
    other = asyncio.create_task(final(engine, "stays", max_tokens=400))
    await asyncio.sleep(0)
    assert len(engine.output_processor.answers) == 3
    await engine.abort(["gone", "never heard of"])
    await engine.abort("gone")
    assert [(await task).outputs[0].finish_reason for task in running] == ["abort", "abort"]
    assert (await other).outputs[0].finish_reason == "length"


async def test_contract_A08_draining_waits_for_every_request_or_says_so(engine: AsyncLLM) -> None:
    running = asyncio.create_task(final(engine, max_tokens=ENDLESS))
    await until(lambda: len(engine.output_processor.answers) == 1)
    with pytest.raises(TimeoutError, match="1 requests run"):
        await engine.wait_for_requests_to_drain(0)
    draining = asyncio.create_task(engine.wait_for_requests_to_drain(30))
    await engine.abort("r")
    await draining
    assert (await running).finished


async def test_contract_A09_an_engine_without_a_tokenizer_takes_and_gives_token_ids(
    engine: AsyncLLM,
) -> None:
    assert engine.tokenizer is None
    answer = await final(engine)
    assert (answer.outputs[0].text, len(answer.outputs[0].token_ids)) == ("", 8)
    with pytest.raises(InvalidRequestError, match="token ids"):
        await engine.get_tokenizer()
    with pytest.raises(InvalidRequestError, match="token ids"):
        await anext(engine.generate("words", params(), "text"))


async def test_contract_C10_statistics_are_logged_when_asked_for(engine: AsyncLLM) -> None:
    await final(engine, "counted")
    logger = recording(engine)
    await engine.refresh_stats()
    await engine.do_log_stats()
    assert logger.logged == 1
    assert logger.recorded[-1].tokens_generated > 0
    assert logger.config is engine.vllm_config


@each("missing", sorted(EngineClient.__abstractmethods__))
async def test_contract_C01_a_client_must_have_every_member(missing: str) -> None:
    members = {name: None for name in EngineClient.__abstractmethods__ if name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Partial", (EngineClient,), members)()


async def test_contract_C01_every_client_shows_what_it_is_made_of(engine: AsyncLLM) -> None:
    assert engine.vllm_config.model == MODEL
    assert engine.model_config.vocab_size == 64
    assert engine.input_processor.renderer is engine.renderer
    request = engine.input_processor.process("r", [1, 2], params())
    assert request.external_req_id == "r"
