"""`routed_experts`: an answer tells which experts its tokens went through, if the engine is to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit.core import CLIENT, DUMMY, core_request, make_core, run, step, tokens
from engine_kit.handoff import save_toy
from model_kit.mixture import SIZES, experts_of, published_mixture

from diptych_engine import LLM, AsyncLLM, EngineArgs
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.collector import Collector, joined
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    Array,
    EngineCoreOutput,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    wire,
)
from diptych_protocol.wire import EngineCoreOutputs

LAYERS, TOP_K = SIZES["num_hidden_layers"], SIZES["num_experts_per_tok"]
PROMPTS = [[(7 * place + shift) % 64 for place in range(30 - shift)] for shift in (0, 0, 3, 11)]
"""Two of them are the same: the second finds its prefix in the cache."""
TELLS: dict[str, Any] = {"enable_return_routed_experts": True}
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


class Mixture:
    """A model whose layer 1 has no experts, and what its own router says."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        self._model = published_mixture(folder, mlp_only_layers=[1])

    def experts(self, token_ids: list[int]) -> Any:
        """The experts of all tokens but the last, as transformers chooses them."""
        return experts_of(self._model, token_ids[:-1]).numpy()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(tmp_path_factory.mktemp("mixture"))


def parts(outputs: list[EngineCoreOutput]) -> Any:
    return joined([o.routed_experts for o in outputs if o.routed_experts is not None])


def check(mixture: Mixture, prompt: list[int], outputs: list[EngineCoreOutput]) -> None:
    np.testing.assert_array_equal(parts(outputs), mixture.experts(prompt + tokens(outputs)))


def test_contract_M04_routed_experts_are_those_of_transformers_router(mixture: Mixture) -> None:
    """In chunks, with neighbours, and with a prefix from the cache."""
    options = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "num_threads": 1}
    with LLM(mixture.path, skip_tokenizer_init=True, max_num_seqs=3, **options, **TELLS) as llm:
        for _ in range(2):
            answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                [made] = answer.outputs
                assert made.routed_experts is not None
                assert made.routed_experts.dtype == np.int16
                assert made.routed_experts.shape == (len(prompt) + 9, LAYERS, TOP_K)
                expected = mixture.experts(prompt + made.token_ids)
                np.testing.assert_array_equal(made.routed_experts, expected)
                assert (expected[:, 1] == -1).all(), "layer 1 has no experts"
        assert all(answer.num_cached_tokens > 20 for answer in answers[:2])


def test_contract_M04_routed_experts_come_with_each_output_once(mixture: Mixture) -> None:
    core = make_core(mixture.path, block_size=4, max_num_batched_tokens=16, **TELLS)
    [outputs] = run(core, core_request("r", PROMPTS[0], max_tokens=4, ignore_eos=True)).values()
    shapes = [o.routed_experts.shape for o in outputs if o.routed_experts is not None]
    assert shapes == [(30, LAYERS, TOP_K), *[(1, LAYERS, TOP_K)] * 3]
    check(mixture, PROMPTS[0], outputs)
    again = wire.outputs_decoder.decode(wire.encoder.encode(EngineCoreOutputs(outputs=outputs)))
    assert [o.routed_experts for o in again.outputs] == [o.routed_experts for o in outputs]
    core.close()


def test_contract_M04_routed_experts_survive_preemption(mixture: Mixture) -> None:
    core = make_core(mixture.path, block_size=4, num_blocks=24, **TELLS)
    requests = [
        core_request(str(index), prompt, max_tokens=20, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS[1:])
    ]
    made = run(core, *requests)
    assert core.stats().num_preemptions > 0
    for index, prompt in enumerate(PROMPTS[1:]):
        check(mixture, prompt, made[str(index)])
    core.close()


def test_contract_M04_routed_experts_of_steps_that_run_ahead(mixture: Mixture) -> None:
    core = make_core(mixture.path, block_size=4, async_scheduling=True, **TELLS)
    requests = [
        core_request(str(index), prompt, max_tokens=6 + 3 * index, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS)
    ]
    made = run(core, *requests)
    for index, prompt in enumerate(PROMPTS):
        check(mixture, prompt, made[str(index)])
    core.close()


def test_contract_M04_routed_experts_of_steps_that_somebody_looks_into(mixture: Mixture) -> None:
    """A control call waits for all that was launched, before the results of the first of it are
    applied."""
    core = make_core(mixture.path, block_size=4, async_scheduling=True, **TELLS)
    core.add(core_request("r", PROMPTS[0], max_tokens=8, ignore_eos=True), CLIENT)
    outputs: list[EngineCoreOutput] = []
    while not outputs or not outputs[-1].finished:
        under_way = core.start_step()
        core.call("stats", [])
        core.finish_step(*under_way)
        core.call("stats", [])
        outputs += core.take_outputs()[CLIENT]
    check(mixture, PROMPTS[0], outputs)
    core.close()


def test_contract_M04_routed_experts_of_a_model_on_two_ranks(mixture: Mixture) -> None:
    """Each rank has a half of every expert; they choose alike."""
    alone = make_core(mixture.path, block_size=4)
    pair = make_core(mixture.path, block_size=4, tensor_parallel_size=2, **TELLS)
    try:
        request = core_request("r", PROMPTS[0], max_tokens=10, ignore_eos=True)
        [expected], [outputs] = run(alone, request).values(), run(pair, request).values()
        assert tokens(outputs) == tokens(expected)
        check(mixture, PROMPTS[0], outputs)
        assert parts(expected) is None
    finally:
        alone.close()
        pair.close()


def test_contract_M04_routed_experts_of_a_prompt_in_pieces(mixture: Mixture) -> None:
    """Each piece's answer has the tokens since the one before."""
    core = make_core(mixture.path, block_size=4, **TELLS)
    params = {"max_tokens": 3, "ignore_eos": True}

    def answered(piece: list[int]) -> list[EngineCoreOutput]:
        core.add(core_request("s", piece, resumable=True, **params), CLIENT)
        made: list[EngineCoreOutput] = []
        while not made or made[-1].piece_finish_reason is None:
            made += step(core)
        return made

    first, second = answered(PROMPTS[0][:9]), answered(PROMPTS[3])
    held = PROMPTS[0][:9] + tokens(first)[:-1]
    expected = mixture.experts(held + PROMPTS[3] + tokens(second))
    np.testing.assert_array_equal(parts(first), expected[: len(held)])
    np.testing.assert_array_equal(parts(second), expected[len(held) :])
    core.close()


async def test_contract_M04_routed_experts_come_with_the_last_output_of_a_stream(
    mixture: Mixture,
) -> None:
    """From a core in a process of its own; whatever the kind of output."""
    args = EngineArgs(mixture.path, num_threads=1, num_gpu_blocks_override=64, **TELLS)
    engine = AsyncLLM.from_engine_args(args)
    try:
        for kind in RequestOutputKind:
            params = SamplingParams(
                temperature=0.0, max_tokens=8, ignore_eos=True, output_kind=kind
            )
            outputs = [o async for o in engine.generate(PROMPTS[0], params, f"{kind}")]
            assert all(o.outputs[0].routed_experts is None for o in outputs[:-1])
            token_ids = outputs[-1].outputs[0].token_ids
            if kind is RequestOutputKind.DELTA:
                token_ids = [t for o in outputs for t in o.outputs[0].token_ids]
            expected = mixture.experts(PROMPTS[0] + token_ids)
            np.testing.assert_array_equal(outputs[-1].outputs[0].routed_experts, expected)
    finally:
        engine.shutdown()


def part(first: int, *shape: int, dtype: str = "int16") -> Array:
    return Array(dtype, shape, np.full(shape, first, dtype).tobytes())


def made_of(kind: RequestOutputKind, *outputs: EngineCoreOutput) -> Collector[RequestOutput]:
    """What a consumer who reads nothing before the end finds."""
    params = SamplingParams(output_kind=kind)
    processor, collector = OutputProcessor(None), Collector[RequestOutput]()
    processor.add(core_request("r", [1, 2], output_kind=params.output_kind), None, collector)
    for output in outputs:
        processor.process([output])
    return collector


def test_contract_M04_routed_experts_stay_with_a_stream_that_lags() -> None:
    outputs = [
        EngineCoreOutput("r", [5], routed_experts=part(3, 2, 1, 1)),
        EngineCoreOutput(
            "r", [6], routed_experts=part(4, 1, 1, 1), finish_reason=wire.FinishReason.STOP
        ),
        EngineCoreOutput("r", []),
    ]
    read = made_of(RequestOutputKind.DELTA, *outputs).take()
    assert read is not None
    assert read.outputs[0].routed_experts is not None
    assert read.outputs[0].routed_experts.tolist() == [[[3]], [[3]], [[4]]]


def test_contract_M04_routed_experts_of_what_a_stop_string_ends(tmp_path: Path) -> None:
    """The core does not know that it has ended."""
    tokenizer = load_tokenizer(resolve_model(save_toy(tmp_path)))
    processor, collector = OutputProcessor(tokenizer), Collector[RequestOutput]()
    processor.add(core_request("r", [1, 2], stop=["dc"]), None, collector)
    assert processor.process([EngineCoreOutput("r", [4], routed_experts=part(3, 2, 1, 1))]) == []
    last = EngineCoreOutput("r", [3], routed_experts=part(5, 1, 1, 1))
    assert processor.process([last]) == ["r"]
    read = collector.take()
    assert read is not None
    [made] = read.outputs
    assert made.stop_reason == "dc"
    assert made.routed_experts is not None
    assert made.routed_experts.tolist() == [[[3]], [[3]], [[5]]]


@pytest.mark.parametrize(
    "second", [part(4, 1, 2, 1), part(4, 1, 1), part(4, 1, 1, 1, dtype="int32")]
)
def test_contract_M04_routed_experts_that_fit_no_answer_fail_it(second: Array) -> None:
    outputs = [
        EngineCoreOutput("r", [5], routed_experts=part(3, 2, 1, 1)),
        EngineCoreOutput("r", [6], routed_experts=second, finish_reason=wire.FinishReason.STOP),
    ]
    collector = made_of(RequestOutputKind.FINAL_ONLY, *outputs)
    with pytest.raises(Exception, match="cannot be processed: routed_experts is int"):
        collector.take()


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (DUMMY, "enable_return_routed_experts needs experts, and this llama model has none"),
        (
            f"{DUMMY}&architecture=qwen3_moe&num_experts=8&num_experts_per_tok=8"
            "&moe_intermediate_size=8&max_position_embeddings=4000000",
            "max_model_len 4000000 is too long for enable_return_routed_experts",
        ),
    ],
)
def test_contract_M04_routed_experts_that_cannot_be_told_are_refused(
    model: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        make_core(model, **TELLS)
