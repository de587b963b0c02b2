"""Log-probabilities of a prompt come once, with the first output, and are those of the model."""

from __future__ import annotations

from typing import Any

import pytest
from engine_kit.core import DUMMY, VOCABULARY, core_request, make_core, run, step

from diptych_engine.control.core import EngineCore
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.collector import Collector
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor, ParentRequest
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineCoreOutput,
    LogprobsTensors,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    wire,
)
from diptych_protocol.arrays import MAX_FRAMES
from diptych_protocol.wire import EngineCoreOutputs

PROMPT = [(7 * i) % VOCABULARY for i in range(40)]


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return make_core(block_size=4, max_num_batched_tokens=16)


def prompt_logprobs(outputs: list[EngineCoreOutput]) -> LogprobsTensors:
    """Those of the first output; the others must have none."""
    [first, *later] = [o for o in outputs if o.new_token_ids]
    assert all(o.new_prompt_logprobs_tensors is None for o in later)
    assert first.new_prompt_logprobs_tensors is not None
    return first.new_prompt_logprobs_tensors


def test_contract_B06_chunks_and_neighbours_change_nothing(core: EngineCore) -> None:
    """One chunk alone, and three chunks among others, some of which want none."""
    whole = make_core(max_num_batched_tokens=256)
    [expected] = run(whole, core_request("r", PROMPT, max_tokens=1, prompt_logprobs=3)).values()
    together = run(
        core,
        *(
            core_request(f"{i}", PROMPT[i:], max_tokens=4, prompt_logprobs=None if i % 2 else 3)
            for i in range(4)
        ),
    )
    a, b = prompt_logprobs(expected), prompt_logprobs(together["0"])
    assert a.logprob_token_ids == b.logprob_token_ids
    assert a.selected_token_ranks == b.selected_token_ranks
    assert a.logprobs.tolist() == [pytest.approx(row, abs=1e-5) for row in b.logprobs.tolist()]
    assert all(o.new_prompt_logprobs_tensors is None for o in together["1"])
    assert prompt_logprobs(together["2"]).logprobs.shape == (37, 4)


def test_contract_B06_the_first_position_has_none(core: EngineCore) -> None:
    [outputs] = run(core, core_request("r", [3], max_tokens=2, prompt_logprobs=2)).values()
    assert prompt_logprobs(outputs).logprobs.shape == (0, 3)


def test_contract_B06_a_preempted_prefill_is_gathered_anew(core: EngineCore) -> None:
    request = core_request("r", PROMPT, max_tokens=2, prompt_logprobs=1)
    [expected] = run(core, request).values()
    core.add(request, b"client")
    assert step(core) == []  # the first chunk
    core.scheduler.preempt_all()
    outputs: list[EngineCoreOutput] = []
    while not (outputs and outputs[-1].finished):
        outputs += step(core)
    assert prompt_logprobs(outputs) == prompt_logprobs(expected)


def test_contract_B06_whoever_goes_on_with_a_request_says_nothing(core: EngineCore) -> None:
    """After a hand-off or a loss: the engine that made the first token has told them."""
    request = core_request("r", PROMPT, max_tokens=4, prompt_logprobs=1, generated_token_ids=[1, 2])
    [outputs] = run(core, request).values()
    assert all(o.new_prompt_logprobs_tensors is None for o in outputs)


def test_contract_B06_more_arrays_than_frames_arrive(core: EngineCore) -> None:
    [outputs] = run(core, core_request("r", PROMPT * 4, max_tokens=1, prompt_logprobs=3)).values()
    message = EngineCoreOutputs(outputs=outputs * MAX_FRAMES)
    frames = wire.encoder.encode(message)
    assert len(frames) == MAX_FRAMES
    assert wire.outputs_decoder.decode(frames).outputs == message.outputs


# --- what consumers read --------------------------------------------------------------------------


async def consume(core: EngineCore, kind: RequestOutputKind, n: int) -> list[RequestOutput]:
    """The outputs of one request, with every step read at once."""
    inputs = InputProcessor(
        TextRenderer(resolve_model(DUMMY)), max_model_len=64, vocab_size=VOCABULARY
    )
    params = SamplingParams(
        n=n, temperature=1.0, seed=7, max_tokens=3, prompt_logprobs=2, output_kind=kind
    )
    request = inputs.process("r", PROMPT, params)
    parent = ParentRequest(request) if n > 1 else None
    parts = [parent.child(i) for i in range(n)] if parent else [request]
    outputs, collector, seen = OutputProcessor(None), Collector(), []
    for index, part in enumerate(parts):
        outputs.add(part, None, collector, parent, index)
        core.add(part, b"client")
    while len(outputs.answers):
        outputs.process(step(core))
        if (output := collector.take()) is not None:
            seen.append(output)
    return seen


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]
)
async def test_contract_B06_consumers_get_them_in_every_kind_of_output(
    core: EngineCore, kind: RequestOutputKind, n: int
) -> None:
    seen = await consume(core, kind, n)
    told = [output.prompt_logprobs is not None for output in seen]
    if kind is RequestOutputKind.DELTA:
        assert sum(told) == 1
    else:
        assert told[-1]
        assert all(told[told.index(True) :])
    [rows, *_] = [o.prompt_logprobs for o in seen if o.prompt_logprobs is not None]
    assert rows[0] is None
    assert len(rows) == len(PROMPT)
    for token, row in zip(PROMPT[1:], rows[1:], strict=True):
        assert row is not None
        assert next(iter(row)) == token
        ranks: list[Any] = sorted(entry.rank for entry in row.values() if entry.rank is not None)
        assert ranks[:2] == [1, 2]
