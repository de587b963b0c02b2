"""LLM: whole batches, offline, in words and vectors; rows A9 and L4 with a real tokenizer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from client_kit.calling_model import write_calling_model
from engine_kit.core import DUMMY
from engine_kit.llm_engine import params, run, stats
from model_kit.questions import FACT
from waits import PATIENCE_S

from diptych_engine import LLM
from diptych_frontend.text.input_processor import InputProcessor
from diptych_protocol import (
    EngineConfig,
    InvalidRequestError,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)


@pytest.fixture(scope="module")
def real(smollm2: str) -> Iterator[LLM]:
    with LLM(smollm2, num_blocks=16, num_threads=1) as llm:
        yield llm


def test_contract_L04_stop_strings_end_a_request_in_the_core_too(real: LLM) -> None:
    engine = real.llm_engine
    engine.add_request("r", FACT.words, params(max_tokens=60, stop=["Paris"]))
    output = run(engine)["r"][-1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "Paris")
    assert "Paris" not in output.outputs[0].text
    assert stats(engine).num_running == 0


def test_contract_A09_without_its_tokenizer_a_model_takes_token_ids_only(smollm2: str) -> None:
    inputs = InputProcessor.of(EngineConfig(smollm2, skip_tokenizer_init=True))
    assert inputs.renderer.tokenizer is None
    assert inputs.process("r", [504, 3575], params()).prompt_token_ids == [504, 3575]
    for ask in (
        lambda: inputs.renderer.render_prompt("The capital of France is"),
        lambda: inputs.renderer.render_chat([{"role": "user", "content": "Hello"}]),
        inputs.renderer.get_tokenizer,
    ):
        with pytest.raises(InvalidRequestError, match="token ids"):
            ask()


def test_a_batch_larger_than_the_engine_is_answered_in_its_order() -> None:
    with LLM(DUMMY, num_blocks=64, num_threads=1, max_num_seqs=4, max_num_waiting=2) as llm:
        prompts = [[1 + i % 60, 2] for i in range(20)]
        answers = llm.generate(prompts, params(n=2), use_tqdm=False)
        assert [answer.prompt_token_ids for answer in answers] == prompts
        assert all(len(answer.outputs) == 2 for answer in answers)
        with pytest.raises(InvalidRequestError, match="2 sets of parameters for 1"):
            llm.generate([[1]], [params(), params()])
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            llm.generate([[1], [99999]])
        assert not llm.llm_engine.has_unfinished_requests()


def test_calls_of_several_threads_take_turns() -> None:
    prompts = [[[1 + i, 2], [3 + i, 4]] for i in range(8)]
    with LLM(DUMMY, num_blocks=64, num_threads=1) as llm, ThreadPoolExecutor(4) as pool:
        wanted = [tokens_of(llm.generate(each, params(), use_tqdm=False)) for each in prompts]
        found = pool.map(lambda each: llm.generate(each, params(), use_tqdm=False), prompts)
        assert [tokens_of(each) for each in found] == wanted


def test_what_was_asked_for_step_by_step_is_no_answer_of_a_batch() -> None:
    with LLM(DUMMY, num_blocks=64, num_threads=1) as llm:
        llm.llm_engine.add_request("mine", [5, 6], params(max_tokens=1))
        answers = llm.generate([[1, 2], [3, 4]], params(), use_tqdm=False)
        assert [answer.prompt_token_ids for answer in answers] == [[1, 2], [3, 4]]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_no_part_in_the_engine() -> None:
    with LLM(DUMMY, num_blocks=64, num_threads=1) as llm:
        ours, theirs = socket.socketpair()
        if not os.fork():
            try:
                llm.generate([[1]], params(), use_tqdm=False)
            except BaseException as exc:
                theirs.send(type(exc).__name__.encode())
            os._exit(0)
        with ours, theirs:
            ours.settimeout(PATIENCE_S)
            assert ours.recv(100) == b"ClientClosedError"
        os.wait()
        assert llm.generate([[1]], params(), use_tqdm=False)


def test_a_batch_does_not_wait_for_an_engine_that_sleeps() -> None:
    with LLM(DUMMY, num_blocks=64, num_threads=1) as llm:
        for stop, go_on in (
            (partial(llm.sleep, 1), llm.wake_up),
            (llm.pause_generation, llm.resume_generation),
        ):
            stop()
            with pytest.raises(InvalidRequestError, match="asleep or paused"):
                llm.generate([[1]], params(), use_tqdm=False)
            go_on()
            assert llm.generate([[1]], params(), use_tqdm=False)


def test_a_batch_program_controls_its_engine_as_with_vllm() -> None:
    with LLM(DUMMY, num_blocks=64, num_threads=1) as llm:
        before = tokens_of(llm.generate([[1, 2]], params(), use_tqdm=False))
        assert llm.reset_prefix_cache()
        [number] = llm.apply_model(lambda model: len([*model.named_parameters()]))
        assert llm.collective_rpc(lambda runner: len([*runner.model.named_parameters()])) == [
            number
        ]
        llm.sleep(1)
        assert llm.is_sleeping()
        llm.wake_up()
        assert tokens_of(llm.generate([[1, 2]], params(), use_tqdm=False)) == before


def tokens_of(answers: list[RequestOutput]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in answers]


def test_contract_L03_what_is_no_batch_is_refused_by_name(real: LLM) -> None:
    wrong: dict[str, list[Any]] = {
        "prompts": [5, None],
        "prompt": [[[]], [5.0], [None]],
        "sampling_params": ["hot", 7, [PoolingParams()], PoolingParams()],
        "messages": [5, [], None],
        "pooling_params": [SamplingParams()],
    }
    for prompts in wrong["prompts"] + wrong["prompt"]:
        with pytest.raises(InvalidRequestError, match="prompt"):
            real.generate(prompts)
    for given in wrong["sampling_params"]:
        with pytest.raises(InvalidRequestError, match="sampling_params"):
            real.generate([[1]], given)
    for messages in wrong["messages"]:
        with pytest.raises(InvalidRequestError, match="messages"):
            real.chat(messages)
    for given in wrong["pooling_params"]:
        with pytest.raises(InvalidRequestError, match="pooling_params"):
            real.embed([[1]], given)
    with pytest.raises(InvalidRequestError, match="temperature"):
        real.generate([[1]], SamplingParams(temperature=None))  # type: ignore[arg-type]
    assert not real.llm_engine.has_unfinished_requests()


def test_contract_L04_a_single_stop_string_is_not_taken_letter_by_letter(real: LLM) -> None:
    stop: Any = "Paris"
    [answer] = real.generate(FACT.words, params(max_tokens=60, stop=stop), use_tqdm=False)
    assert answer.outputs[0].stop_reason == "Paris"


def test_contract_B02_seeds_at_the_ends_of_64_bits_have_children(real: LLM) -> None:
    for seed in (2**63 - 1, -(2**63)):
        [both] = real.generate([[5, 6]], params(temperature=1.0, max_tokens=3, seed=seed, n=2))
        wrapped = (seed + 1 + 2**63) % 2**64 - 2**63
        # As many at a time: without packed weights sums are rounded by the rows of a batch.
        [next_] = real.generate([[5, 6]], params(temperature=1.0, max_tokens=3, seed=wrapped, n=2))
        assert both.outputs[1].token_ids == next_.outputs[0].token_ids


def test_a_conversation_is_answered_in_words(real: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    question = {"role": "user", "content": "Answer with one word: what colour is the sky?"}
    [answer] = real.chat([question], params(max_tokens=4), use_tqdm=True)
    assert answer.outputs[0].text
    assert answer.prompt is not None
    assert question["content"] in answer.prompt
    assert "1/1" in capsys.readouterr().err
    kwargs = {"enable_thinking": False}  # which the template of this model does not look at
    [same] = real.chat([question], params(max_tokens=4), chat_template_kwargs=kwargs)
    assert same.prompt == answer.prompt
    with pytest.raises(InvalidRequestError, match="messages is set by the server"):
        real.chat([question], params(), chat_template_kwargs={"messages": []})


def test_an_answer_that_was_begun_goes_on(real: LLM) -> None:
    begun = {"role": "assistant", "content": "The capital of France is"}
    question = {"role": "user", "content": "What is the capital of France?"}
    [answer] = real.chat([question, begun], params(max_tokens=1), continue_final_message=True)
    assert answer.prompt is not None
    assert answer.prompt.endswith(begun["content"])


def test_tools_are_shown_to_the_model_or_refused(real: LLM, smollm2: str, tmp_path: Path) -> None:
    """As vLLM's `chat` takes them."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    question = {"role": "user", "content": "What is 1 + 1?"}
    with pytest.raises(InvalidRequestError, match="has no place for tools") as refused:
        real.chat([question], params(max_tokens=1), tools=tools)
    assert refused.value.param == "tools"
    path = write_calling_model(smollm2, tmp_path / "calls.gguf")
    with LLM(path, num_blocks=16, num_threads=1) as llm:
        [answer] = llm.chat([question], params(max_tokens=1), tools=tools)
    assert answer.prompt is not None
    assert '"name": "add"' in answer.prompt


def test_similar_texts_have_similar_vectors(real: LLM) -> None:
    outputs = real.embed(["a small dog", "a little dog", "stock market index"])
    first, second, third = ([*output.outputs.data.tolist()] for output in outputs)

    def product(one: list[float], other: list[float]) -> float:
        return sum(x * y for x, y in zip(one, other, strict=True))

    assert product(first, first) == pytest.approx(1.0, abs=1e-4)
    assert product(first, second) > product(first, third)
    with pytest.raises(InvalidRequestError, match="dimensions"):
        real.embed("a dog", PoolingParams(dimensions=10**6))
