"""AsyncLLM as the contract has it: rows A1 to A10, and C1 to C4 and C10 of every client."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from core_kit import DUMMY
from service_kit import free_port

from diptych_engine import AsyncLLM, EngineArgs
from diptych_frontend import core_link
from diptych_frontend.core_launcher import CoreProcess
from diptych_frontend.curve import new_keys
from diptych_protocol import (
    ClientClosedError,
    EngineClient,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeadError,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    UnsupportedFeatureError,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = f"{DUMMY}&max_position_embeddings=65536"
ENDLESS = 60_000
"""Tokens: more than any test waits for."""
ARGS = EngineArgs(
    MODEL, num_gpu_blocks_override=8192, num_threads=1, max_num_seqs=64, max_num_batched_tokens=256
)


class CountingLogger:
    def __init__(self, config: EngineConfig, engine_index: int) -> None:
        self.config = config
        self.recorded: list[SchedulerStats] = []
        self.logged = 0
        made.append(self)

    def record(self, stats: SchedulerStats, engine_index: int = 0) -> None:
        self.recorded.append(stats)

    def log(self) -> None:
        self.logged += 1


made: list[CountingLogger] = []


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
        stat_loggers=[CountingLogger],
        public_endpoint=address,
        keys_dir=keys_dir,
    )
    yield engine
    engine.shutdown()
    engine.shutdown()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields})


async def final(engine: AsyncLLM, request_id: str = "r", **fields: Any) -> RequestOutput:
    wanted = params(output_kind=RequestOutputKind.FINAL_ONLY, **fields)
    [output] = [o async for o in engine.generate([1, 2, 3], wanted, request_id)]
    return output


async def test_contract_A01_built_without_a_loop_it_starts_with_the_first_request(
    engine: AsyncLLM,
) -> None:
    assert engine.is_running
    answer = await asyncio.wait_for(final(engine), 60)
    assert len(answer.outputs[0].token_ids) == 8
    assert engine.description.num_blocks == 8192


@pytest.mark.parametrize(
    "option",
    [
        {"executor_class": object},
        {"usage_context": "api"},
        {"mm_registry": object()},
        {"use_cached_outputs": True},
        {"start_engine_loop": False},
    ],
    ids=lambda option: next(iter(option)),
)
async def test_contract_A01_an_option_without_a_meaning_here_is_refused(
    option: dict[str, Any],
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=next(iter(option))):
        AsyncLLM(EngineConfig(DUMMY), **option)


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
    engine = AsyncLLM.from_engine_args(ARGS)
    expected = EngineConfig(
        MODEL, num_blocks=8192, num_threads=1, max_num_seqs=64, max_num_batched_tokens=256
    )
    assert engine.vllm_config == expected
    assert type(engine.vllm_config) is EngineConfig
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
    assert engine.output_processor.num_unfinished == 1
    while not (await collector.get()).finished:
        pass
    assert collector.finished


async def test_contract_A04_each_of_n_answers_is_a_request_of_the_core(engine: AsyncLLM) -> None:
    collector = await engine.add_request("many", [1, 2], params(n=3, max_tokens=ENDLESS))
    assert [part.split("_")[0] for part in collector.request_ids] == ["0", "1", "2"]
    assert engine.output_processor.num_unfinished == 3
    parent = collector.request_ids[0].removeprefix("0_")
    engine._withdraw(engine.output_processor.abort([parent], internal=True))
    assert engine.output_processor.num_unfinished == 0


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
    link = core_link.CoreLink(Unused(), on_outputs=owner.take, on_dead=owner.die)
    outputs = [EngineCoreOutput(str(i), [i]) for i in range(300)]
    link._take(EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats()))
    link._take(EngineCoreOutputs(outputs=outputs[:1]))
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
    core_link.CoreLink(Unused(), on_outputs=owner.take, on_dead=owner.die)._take(
        EngineCoreOutputs()
    )
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
    assert engine.output_processor.num_unfinished == 3
    await engine.abort(["gone", "never heard of"])
    await engine.abort("gone")
    assert [(await task).outputs[0].finish_reason for task in running] == ["abort", "abort"]
    assert (await other).outputs[0].finish_reason == "length"


async def test_contract_A08_draining_waits_for_every_request_or_says_so(engine: AsyncLLM) -> None:
    running = asyncio.create_task(final(engine, max_tokens=ENDLESS))
    await until(lambda: engine.output_processor.num_unfinished == 1)
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
    [logger] = made
    await engine.refresh_stats()
    await engine.do_log_stats()
    assert logger.logged == 1
    assert logger.recorded[-1].tokens_generated > 0
    assert logger.config is engine.vllm_config


@dataclass
class Killed:
    """An engine whose core was killed under fifty requests."""

    engine: AsyncLLM
    states: list[tuple[bool, bool, bool]]
    """(is_running, is_stopped, errored): new, at work, killed."""
    ends: list[RequestOutput | BaseException]


def state(engine: AsyncLLM) -> tuple[bool, bool, bool]:
    return engine.is_running, engine.is_stopped, engine.errored


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def killed() -> AsyncIterator[Killed]:
    made: list[AsyncLLM] = []
    maker = threading.Thread(
        target=lambda: made.append(AsyncLLM.from_vllm_config(ARGS.create_engine_config()))
    )
    maker.start()
    maker.join()  # an engine outlives the thread that made it
    [engine] = made
    states = [state(engine)]
    open_requests = [
        asyncio.create_task(final(engine, str(i), max_tokens=ENDLESS)) for i in range(50)
    ]
    await until(lambda: engine.output_processor.num_unfinished == 50, 60)
    states.append(state(engine))
    os.kill(engine.description.pid, signal.SIGKILL)
    await until(lambda: engine.errored, 1.0)
    states.append(state(engine))
    yield Killed(engine, states, await asyncio.gather(*open_requests, return_exceptions=True))
    engine.shutdown()


async def test_contract_A05_a_death_reaches_everybody_who_waits(killed: Killed) -> None:
    assert len(killed.ends) == 50
    assert all(isinstance(end, EngineDeadError) for end in killed.ends)
    with pytest.raises(EngineDeadError):
        await killed.engine.add_request("late", [1], params())


async def test_contract_C01_it_runs_before_its_first_request_and_until_it_dies(
    killed: Killed,
) -> None:
    assert [is_running for is_running, _, _ in killed.states] == [True, True, False]


async def test_contract_C02_stopped_is_errored(killed: Killed) -> None:
    assert all(is_stopped == errored for _, is_stopped, errored in killed.states)


async def test_contract_C03_a_killed_core_is_noticed_within_a_second(killed: Killed) -> None:
    assert [errored for _, _, errored in killed.states] == [False, False, True]


async def test_contract_C04_the_dead_error_names_the_cause(killed: Killed) -> None:
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            raise killed.engine.dead_error
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        await killed.engine.check_health()


async def test_contract_C02_after_its_end_an_engine_is_stopped_for_good(killed: Killed) -> None:
    killed.engine.shutdown()
    assert state(killed.engine) == (False, True, True)
    with pytest.raises(ClientClosedError):
        await anext(killed.engine.generate([1], params(), "after the end"))


async def test_contract_A05_a_dropped_client_takes_its_core_with_it() -> None:
    engine = AsyncLLM(ARGS.create_engine_config())
    engine._run_output_handler()
    pid = core_pid(engine)
    await asyncio.sleep(0)  # the watcher is on its way
    client = weakref.ref(engine)
    gc.disable()  # no help: nothing may hold it
    try:
        del engine
        assert client() is None
    finally:
        gc.enable()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_contract_C03_a_core_that_dies_before_the_first_request_is_seen() -> None:
    engine = AsyncLLM(ARGS.create_engine_config())
    os.kill(core_pid(engine), signal.SIGKILL)
    await until(lambda: engine.errored, 1.0)
    assert (engine.is_running, engine.is_stopped) == (False, True)
    assert isinstance(engine.dead_error, EngineDeadError)
    assert "killed by signal 9" in str(engine.dead_error)
    with pytest.raises(EngineDeadError):
        await final(engine)
    engine.shutdown()


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("os.kill(os.getpid(), 9)", -9)], ids=["ends", "is killed"]
)
async def test_contract_A10_a_program_that_ends_without_a_shutdown_leaves_no_core(
    end: str, code: int
) -> None:
    script = f"""
        import asyncio, os
        from diptych_engine import AsyncLLM, EngineArgs
        from diptych_protocol import SamplingParams

        engine = AsyncLLM.from_engine_args(EngineArgs({DUMMY!r}, num_blocks=8, num_threads=1))

        async def main():
            async for output in engine.generate([1], SamplingParams(max_tokens=2), "r"):
                pass
            print(engine.description.pid, flush=True)

        asyncio.run(main())
        {end}
    """
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    await until(lambda: has_ended(int(run.stdout)))


@pytest.mark.parametrize("missing", sorted(EngineClient.__abstractmethods__))
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


def has_ended(pid: int) -> bool:
    """Whether or not somebody has buried it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def core_pid(engine: AsyncLLM) -> int:
    [member] = engine._cores.members
    assert isinstance(member.process, CoreProcess)
    return member.process.process.pid


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        await asyncio.sleep(0.01)
