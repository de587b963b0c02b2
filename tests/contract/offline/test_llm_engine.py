"""LLMEngine as the contract has it: rows L1 to L6 and L9 to L12."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter as Counting
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from engine_kit import worker_extension
from engine_kit.llm_engine import ARGS, CONFIG, params, run, stats

from diptych_engine import AsyncLLM, LLMEngine
from diptych_engine.execution.runner import ModelRunner
from diptych_engine.serving.sync_core import MULTIPROCESSING
from diptych_frontend.observability.metric_snapshot import Counter, Gauge, Histogram
from diptych_protocol import (
    ClientClosedError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    UnsupportedFeatureError,
    UsageContext,
    UtilityError,
)


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(scope="module")
def in_process() -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(ARGS)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def in_child() -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(ARGS, enable_multiprocessing=True)
    yield engine
    engine.shutdown()
    engine.shutdown()


@pytest.fixture(params=["in_process", "in_child"])
def engine(request: pytest.FixtureRequest) -> LLMEngine:
    """Each mode in turn."""
    engine: LLMEngine = request.getfixturevalue(request.param)
    return engine


def test_contract_L01_both_modes_give_the_same_answers(
    in_process: LLMEngine, in_child: LLMEngine
) -> None:
    answers = []
    for engine in (in_process, in_child):
        for number in range(5):
            wanted = params(temperature=0.8, seed=number, logprobs=2, max_tokens=5 + number)
            engine.add_request(f"r{number}", [1, 2, 3 + number], wanted)
        last = {name: outputs[-1] for name, outputs in run(engine).items()}
        # Batches differ with the moment at which requests arrive, and so the last bits of numbers.
        answers.append(
            {
                name: (answer.token_ids, answer.finish_reason, len(answer.logprobs or ()))
                for name, output in last.items()
                for answer in output.outputs
            }
        )
    assert answers[0] == answers[1]
    assert len(answers[0]) == 5
    assert in_process.model_executor.model is not None
    with pytest.raises(UnsupportedFeatureError, match="another process"):
        _ = in_child.model_executor


def test_contract_L01_a_registry_of_processors_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="mm_registry"):
        LLMEngine(CONFIG, mm_registry=object())  # type: ignore[arg-type]


class OwnRunner(ModelRunner):
    """A class of the user's."""


def test_contract_L01_the_users_class_runs_the_model() -> None:
    engine = LLMEngine(CONFIG, OwnRunner, True, usage_context=UsageContext.LLM_CLASS)
    assert isinstance(engine.model_executor, OwnRunner)
    assert engine.usage_context is UsageContext.LLM_CLASS
    engine.shutdown()


def test_contract_L01_a_class_that_runs_no_model_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="subclass of ModelRunner") as refusal:
        LLMEngine(CONFIG, UsageContext)
    assert refusal.value.param == "executor_class"


def test_contract_L01_one_engine_has_one_core() -> None:
    with pytest.raises(UnsupportedFeatureError, match="AsyncLLM"):
        LLMEngine(msgspec.structs.replace(CONFIG, data_parallel_size=2))


def test_contract_L02_the_environment_decides_where_an_engine_lives_and_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = child_pids()
    monkeypatch.setenv(MULTIPROCESSING, "0")
    inside = LLMEngine.from_vllm_config(CONFIG)
    assert child_pids() == before
    monkeypatch.setenv(MULTIPROCESSING, "1")
    outside = LLMEngine.from_vllm_config(CONFIG, disable_log_stats=True)
    assert len(child_pids() - before) == 1
    assert (inside.log_stats, outside.log_stats) == (True, False)
    assert inside.description.compat == outside.description.compat
    outside.add_request("r", [1], params(max_tokens=3000))
    os.kill(outside.description.pid, signal.SIGKILL)
    for call in (lambda: run(outside), lambda: stats(outside)):
        with pytest.raises(EngineDeadError, match=r"killed by signal 9|has ended"):
            call()
    for engine in (inside, outside):
        engine.shutdown()
        with pytest.raises(ClientClosedError):
            engine.add_request("late", [1], params())
    assert child_pids() == before


def test_contract_L02_an_argument_asks_for_a_process_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = child_pids()
    monkeypatch.setenv(MULTIPROCESSING, "0")
    engine = LLMEngine.from_engine_args(ARGS, enable_multiprocessing=True)
    assert len(child_pids() - before) == 1
    engine.shutdown()


def test_contract_L03_an_id_must_be_text(engine: LLMEngine) -> None:
    with pytest.raises(TypeError, match="must be a string, got <class 'int'>"):
        engine.add_request(7, [1], params())  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


def test_contract_L06_calls_out_of_order_harm_nobody(engine: LLMEngine) -> None:
    assert engine.step() == []
    engine.abort_request(["never heard of"])
    engine.abort_request("nor of this")
    with pytest.raises(InvalidRequestError, match="must be a string"):
        engine.abort_request([["r"]])  # type: ignore[list-item]
    session = EngineCoreRequest(
        "s", [1], None, params(), None, None, 0.0, None, None, None, resumable=True
    )
    with pytest.raises(InvalidRequestError, match="resumable"):
        engine.add_request("s", session, params())
    with pytest.raises(InvalidRequestError, match="sleep"):
        engine.call_core("sleep", object())
    assert not engine.has_unfinished_requests()


def test_contract_L03_the_internal_id_names_one_of_several(engine: LLMEngine) -> None:
    first = engine.add_request("same", [1, 2], params())
    second = engine.add_request("same", [1, 2], params(max_tokens=4))
    assert first != second
    assert first.startswith("same-")
    engine.abort_request([first], internal=True)
    [outputs] = run(engine).values()
    assert len(outputs[-1].outputs[0].token_ids) == 4


def test_contract_L03_n_answers_come_under_one_id_each_with_its_own_seed(
    engine: LLMEngine,
) -> None:
    seeded = params(n=3, seed=11, temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("three", [1, 2], seeded)
    assert engine.get_num_unfinished_requests() == 3
    [[together]] = run(engine).values()
    for index in range(3):
        engine.add_request(f"{index}", [1, 2], params(seed=11 + index, temperature=1.0))
    alone = run(engine)
    assert [answer.token_ids for answer in together.outputs] == [
        alone[str(index)][-1].outputs[0].token_ids for index in range(3)
    ]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_contract_L04_steps_tell_as_much_as_was_asked_for(
    engine: LLMEngine, kind: RequestOutputKind
) -> None:
    engine.add_request("r", [1, 2, 3], params(output_kind=kind))
    outputs = run(engine)["r"]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    match kind:
        case RequestOutputKind.DELTA:
            assert sum(lengths) == 8
        case RequestOutputKind.CUMULATIVE:
            assert lengths == sorted(lengths)
            assert lengths[-1] == 8
        case RequestOutputKind.FINAL_ONLY:
            assert lengths == [8]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert engine.step() == []


def test_contract_L04_steps_make_what_an_async_engine_makes(engine: LLMEngine) -> None:
    prompts = {name: [ord(letter) % 61 for letter in name] for name in ("one", "another", "third")}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params(max_tokens=12))
    made = {name: outputs[-1] for name, outputs in run(engine).items()}

    async def made_otherwise() -> dict[str, RequestOutput]:
        other = AsyncLLM.from_engine_args(ARGS)
        try:
            return {
                name: [x async for x in other.generate(prompt, params(max_tokens=12), name)][-1]
                for name, prompt in prompts.items()
            }
        finally:
            other.shutdown()

    for name, wanted in asyncio.run(made_otherwise()).items():
        assert made[name].outputs[0].token_ids == wanted.outputs[0].token_ids
        assert made[name].outputs[0].finish_reason == wanted.outputs[0].finish_reason


def test_contract_L04_a_failed_request_ends_with_its_reason_and_others_go_on(
    in_process: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = in_process.add_request("bad", [1, 2], params(n=2))
    in_process.add_request("good", [1, 2], params())
    core = in_process.engine_core.core  # type: ignore[attr-defined]
    core._outputs[b""].append(
        EngineCoreOutput(f"0_{bad}", [], finish_reason=FinishReason.ERROR, error="poisoned")
    )
    outputs = run(in_process)
    assert [o.outputs[0].finish_reason for o in outputs["bad"]] == ["error"]
    assert outputs["bad"][0].outputs[0].stop_reason == "poisoned"
    assert len(outputs["good"][-1].outputs[0].token_ids) == 8
    in_process.add_request("after", [1], params())
    run(in_process)
    assert stats(in_process).num_running == 0


def test_contract_L05_alone_an_engine_is_unfinished_by_its_own_work_only(
    engine: LLMEngine,
) -> None:
    assert not engine.has_unfinished_requests_dp(False)
    assert engine.has_unfinished_requests_dp(True)


def test_contract_L06_after_an_abort_nothing_more_is_told(engine: LLMEngine) -> None:
    free = stats(engine).blocks_free
    mine = engine.add_request("mine", [1, 2], params(n=2, max_tokens=500))
    engine.add_request("gone", [1, 2], params(max_tokens=500))
    engine.add_request("stays", [1, 2], params())
    engine.step()
    engine.abort_request(["gone", "never heard of"])
    engine.abort_request([mine], internal=True)
    engine.abort_request([mine], internal=True)
    assert set(run(engine)) == {"stays"}
    assert stats(engine).blocks_free == free


def test_contract_L07_counters_equal_what_was_made(engine: LLMEngine) -> None:
    def read() -> Counting[str]:
        sums: Counting[str] = Counting()
        for metric in engine.get_metrics():
            if isinstance(metric, Counter):
                sums[metric.name] += metric.value  # type: ignore[assignment]
        return sums

    before = read()
    for kind in RequestOutputKind:
        engine.add_request(kind.name, [1, 2, 3], params(output_kind=kind, n=2))
    run(engine)
    after = read()
    made = {name: after[name] - before[name] for name in after}
    assert made["diptych:generation_tokens"] == made["diptych:engine_tokens_generated"] == 48
    assert made["diptych:prompt_tokens"] == 9
    assert made["diptych:request_success"] == 6
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    running, e2e = (
        metrics["diptych:num_requests_running"],
        metrics["diptych:e2e_request_latency_seconds"],
    )
    assert isinstance(running, Gauge)
    assert running.value == 0
    assert isinstance(e2e, Histogram)
    assert e2e.count == list(e2e.buckets.values())[-1] >= 3
    assert e2e.labels == {"model_name": engine.vllm_config.name}


def test_contract_L09_the_prefix_cache_is_reset_unless_it_is_in_use(engine: LLMEngine) -> None:
    prompt = list(range(1, 40))
    engine.add_request("warm", prompt, params(max_tokens=1))
    run(engine)
    engine.add_request("hit", prompt, params(max_tokens=1))
    assert run(engine)["hit"][-1].num_cached_tokens == 32
    engine.add_request("running", prompt, params(max_tokens=500))
    engine.step()
    assert engine.reset_prefix_cache() is False
    engine.abort_request(["running"])
    assert engine.reset_prefix_cache() is True
    engine.add_request("cold", prompt, params(max_tokens=1))
    assert run(engine)["cold"][-1].num_cached_tokens == 0


@pytest.mark.parametrize(("level", "tags"), [(0, None), (1, ["weights", "kv_cache"]), (2, None)])
def test_contract_L09_a_sleeping_engine_keeps_what_it_is_asked_for_its_waking(
    engine: LLMEngine, level: int, tags: list[str] | None
) -> None:
    engine.add_request("before", [1, 2, 3], params())
    expected = run(engine)["before"][-1].outputs[0].token_ids
    engine.add_request("aborted", [1, 2, 3], params(max_tokens=500))
    engine.step()
    assert not engine.is_sleeping()
    engine.sleep(level)
    assert engine.is_sleeping()
    assert engine.is_paused()
    engine.add_request("asleep", [1, 2, 3], params())
    [aborted] = run_until(engine, "aborted")
    assert aborted.outputs[0].finish_reason == "abort"
    engine.wake_up(tags)
    assert not engine.is_sleeping()
    assert run(engine)["asleep"][-1].outputs[0].token_ids == expected


def run_until(engine: LLMEngine, request_id: str) -> list[RequestOutput]:
    """The outputs of the step in which a request ends."""
    while True:
        outputs = engine.step()
        if any(output.request_id == request_id and output.finished for output in outputs):
            return [output for output in outputs if isinstance(output, RequestOutput)]


def test_contract_L09_a_pause_may_wait_for_what_runs_and_keeps_its_outputs(
    engine: LLMEngine,
) -> None:
    engine.add_request("runs", [1, 2], params(output_kind=RequestOutputKind.DELTA))
    engine.step()
    engine.pause_generation(mode="wait")
    assert engine.is_paused()
    engine.resume_generation()
    assert not engine.is_paused()
    outputs = run(engine)["runs"]
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_contract_L09_there_is_nothing_multimodal_to_forget(engine: LLMEngine) -> None:
    engine.reset_mm_cache()
    engine.reset_encoder_cache()


def test_contract_L09_a_profile_is_written_and_a_second_one_refused(tmp_path: Path) -> None:
    engine = LLMEngine(msgspec.structs.replace(CONFIG, profile_dir=str(tmp_path)))
    engine.start_profile()
    with pytest.raises(UtilityError, match="running already"):
        engine.start_profile()
    engine.add_request("r", [1], params(max_tokens=1))
    run(engine)
    engine.stop_profile()
    engine.stop_profile()
    assert len(list(tmp_path.iterdir())) == 1
    engine.start_profile("mine")
    engine.stop_profile()
    assert len(list(tmp_path.glob("mine-*.pt.trace.json"))) == 1
    for bad in ("../mine", "a" * 129, "a\n"):
        with pytest.raises(InvalidRequestError, match="profile_prefix must be"):
            engine.start_profile(bad)
    with pytest.raises(UtilityError, match="profile_prefix must be"):
        engine.call_core("start_profile", "../mine")
    engine.shutdown()


def test_contract_L09_a_wait_that_takes_too_long_is_given_up(in_process: LLMEngine) -> None:
    in_process.add_request("endless", [1], params(max_tokens=3000))
    in_process.step()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        in_process.call_core("pause_generation", "wait", timeout_s=0.05)
    in_process.resume_generation()
    in_process.abort_request(["endless"])
    assert not in_process.has_unfinished_requests()


def test_contract_L10_adapters_are_listed_and_unknown_ones_cannot_be_removed(
    engine: LLMEngine,
) -> None:
    assert engine.list_loras() == set()
    assert engine.remove_lora(7) is False
    assert engine.pin_lora(7) is False


def test_contract_L11_functions_reach_the_worker_and_the_model_of_this_process(
    in_process: LLMEngine, in_child: LLMEngine
) -> None:
    [names] = in_process.apply_model(lambda model: sorted(model.slots))
    assert len(names) > 10
    [blocks] = in_process.collective_rpc(lambda worker, plus: worker.num_blocks + plus, args=(1,))
    assert blocks == 257
    with pytest.raises(UnsupportedFeatureError, match="allow_functions"):
        in_child.apply_model(worker_extension.names_of_weights)
    with pytest.raises(UnsupportedFeatureError, match="allow_functions"):
        in_child.collective_rpc(worker_extension.num_blocks, args=(1,))
    for engine in (in_process, in_child):
        with pytest.raises(UtilityError, match=r"collective_rpc: no .* method"):
            engine.collective_rpc("no_such")


@pytest.mark.parametrize("ranks", [1, 2])
def test_contract_L11_functions_reach_other_processes_by_name_if_the_engine_allows_it(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    support = Path(worker_extension.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=os.pathsep)  # for the engine
    config = msgspec.structs.replace(CONFIG, allow_functions=True, tensor_parallel_size=ranks)
    engine = LLMEngine(config, None, True, multiprocess_mode=ranks == 1)
    try:
        for names in engine.apply_model(worker_extension.names_of_weights):
            assert len(names) > 10
        blocks = engine.collective_rpc(worker_extension.num_blocks, args=(1,))
        assert blocks == [257] * ranks
        with pytest.raises(InvalidRequestError, match=r"func must be .* imported"):
            engine.apply_model(lambda model: 1)
        with pytest.raises(UtilityError, match="ModuleNotFoundError"):
            engine.collective_rpc("call_function", args=("no_such:function",))
    finally:
        engine.shutdown()


def test_contract_L12_tasks_and_tokenizer_are_known_without_asking(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.engine_core, "call", None)
    assert "generate" in engine.get_supported_tasks()
    assert engine.tokenizer is None
    with pytest.raises(InvalidRequestError, match="token ids"):
        engine.get_tokenizer()


def test_contract_L03_options_of_the_tokenizer_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="tokenization_kwargs"):
        engine.add_request("r", [1], params(), tokenization_kwargs={"padding": True})
