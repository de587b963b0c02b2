"""Prompts that are embeddings, on the wire and in an engine core."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from engine_kit.core import CLIENT, VOCABULARY, core_request, generate, make_core, run, step, tokens
from engine_kit.pooling import runner_of
from torch import Tensor
from waits import PATIENCE_S

from diptych_engine.control.core import EngineCore
from diptych_engine.models.wire_arrays import as_tensor
from diptych_frontend.core_client.client import receive_frames
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    Array,
    EmbedsPrompt,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    PoolingParams,
    PromptType,
    SamplingParams,
    wire,
)

HIDDEN = 32
BLOCK = 4
PROMPT = [(5 * i * i + 2) % VOCABULARY for i in range(18)]
OTHER = [(3 * i * i + 1) % VOCABULARY for i in range(18)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def core() -> EngineCore:
    made = make_core(block_size=BLOCK, max_num_batched_tokens=8)
    for name, slot in runner_of(made).model.slots.items():
        if "norm" not in name:
            slot.target.mul_(10.0)  # large enough for outputs to vary
    return made


def array_of(values: Tensor) -> Array:
    """Over a copy of the tensor's bytes."""
    name = str(values.dtype).removeprefix("torch.")
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    return Array(name, tuple(values.shape), data)


def embeds_of(core: EngineCore, token_ids: list[int]) -> Array:
    """The model's own embeddings of some tokens."""
    table = runner_of(core).model.slots["model.embed_tokens.weight"].target
    return array_of(table[token_ids])


def embeds_request(
    core: EngineCore, name: str, token_ids: list[int], **fields: Any
) -> EngineCoreRequest:
    embeds = embeds_of(core, token_ids)
    return core_request(name, [0] * len(token_ids), prompt_embeds=embeds, **fields)


def test_contract_B10_the_embeddings_of_tokens_answer_as_the_tokens_do(core: EngineCore) -> None:
    """In chunks of 8 tokens, and then decoding."""
    expected = generate(core, PROMPT, max_tokens=8)
    assert expected != generate(core, OTHER, max_tokens=8)
    [outputs] = run(core, embeds_request(core, "e", PROMPT, max_tokens=8)).values()
    assert tokens(outputs) == expected
    assert outputs[0].num_cached_tokens == 0, "tokens and embeddings share no prefix"


def test_contract_B10_one_prompt_s_embeddings_never_hit_another_s(core: EngineCore) -> None:
    """Their placeholders are alike; only what stands for them differs."""
    made = {}
    for name, token_ids in (("a", PROMPT), ("b", OTHER), ("c", [*PROMPT[:-1], 1])):
        request = embeds_request(core, name, token_ids, max_tokens=8, cache_salt="hits")
        [outputs] = run(core, request).values()
        assert outputs[0].num_cached_tokens == 0
        made[name] = tokens(outputs)
    assert made["b"] == generate(core, OTHER, max_tokens=8)
    [again] = run(core, embeds_request(core, "d", PROMPT, max_tokens=8, cache_salt="hits")).values()
    assert again[0].num_cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK
    assert tokens(again) == made["a"]
    zeros = core_request("z", [0] * len(PROMPT), max_tokens=1, cache_salt="hits")
    [[output]] = run(core, zeros).values()
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("salt", [None, "mine"])
def test_contract_B10_no_salt_reaches_the_prefix_of_embeddings(
    core: EngineCore, salt: str | None
) -> None:
    """Not even one that is spelt as the engine itself names that prefix: nobody can read it, or
    put other KV in its place."""
    core.add(embeds_request(core, "e", OTHER, cache_salt=salt), CLIENT)
    name = core.scheduler.requests["e"].cache_salt
    assert name is not None
    run_to_end(core)
    forged = core_request("f", [0] * len(OTHER), cache_salt=name)
    [outputs] = run(core, forged).values()
    assert outputs[0].num_cached_tokens == 0


def run_to_end(core: EngineCore) -> None:
    while core.has_work:
        step(core)


def test_contract_B10_embeddings_and_tokens_share_steps(core: EngineCore) -> None:
    first, second = generate(core, PROMPT, max_tokens=9), generate(core, OTHER, max_tokens=9)
    outputs = run(
        core,
        core_request("t", PROMPT, max_tokens=9),
        embeds_request(core, "e", OTHER, max_tokens=9, cache_salt="mixed"),
        core_request("u", OTHER, max_tokens=9),
    )
    assert [tokens(made) for made in outputs.values()] == [first, second, second]


def test_contract_B10_embeddings_survive_preemption(core: EngineCore) -> None:
    """Twice while the prompt is computed, and twice while tokens are generated."""
    expected = generate(core, PROMPT, max_tokens=9)
    core.add(embeds_request(core, "e", PROMPT, max_tokens=9, cache_salt="lost"), CLIENT)
    outputs = []
    for number in range(40):
        outputs += step(core)
        if number in (0, 2, 8, 11):
            core.scheduler.preempt_all()
            assert core.scheduler.pool.forget_all()
    assert tokens(outputs) == expected


def test_contract_B10_embeddings_can_be_pooled(core: EngineCore) -> None:
    def pooling(request: EngineCoreRequest) -> EngineCoreRequest:
        request.sampling_params = None
        request.pooling_params = PoolingParams()
        return request

    outputs = run(
        core,
        pooling(core_request("t", PROMPT)),
        pooling(embeds_request(core, "e", PROMPT)),
    )
    by_tokens, by_embeds = (made[0].pooling_output for made in outputs.values())
    assert by_tokens is not None
    assert by_embeds is not None
    torch.testing.assert_close(as_tensor(by_embeds), as_tensor(by_tokens))


BAD: list[tuple[Any, str]] = [
    (array_of(torch.zeros(3, HIDDEN + 1)), "shape"),
    (array_of(torch.zeros(HIDDEN)), "shape"),
    (array_of(torch.zeros(0, HIDDEN)), "shape"),
    (array_of(torch.zeros(3, HIDDEN, dtype=torch.int32)), "type"),
    *[
        (array_of(torch.full((3, HIDDEN), value, dtype=dtype)), "finite")
        for dtype in DTYPES.values()
        for value in (float("nan"), float("-inf"))
    ],
]


@pytest.mark.parametrize(("embeds", "complaint"), BAD)
def test_contract_B10_embeddings_that_cannot_be_used_are_refused(
    core: EngineCore, embeds: Array, complaint: str
) -> None:
    """By the front-end, and by a core that is talked to directly."""
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        inputs().process("r", EmbedsPrompt(prompt_embeds=embeds), SamplingParams())
    assert caught.value.param == "prompt_embeds"
    [[output]] = run(core, core_request("r", [], prompt_embeds=embeds)).values()
    assert output.finish_reason is FinishReason.ERROR
    assert complaint in str(output.error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_B10_each_type_of_number_is_taken(core: EngineCore, dtype: str) -> None:
    embeds = array_of(torch.ones(5, HIDDEN, dtype=DTYPES[dtype]))
    request = inputs().process(
        "r", EmbedsPrompt(prompt_embeds=embeds, cache_salt="s"), SamplingParams(max_tokens=3)
    )
    assert (request.prompt_token_ids, request.cache_salt) == ([0] * 5, "s")
    assert request.prompt_embeds is embeds
    [outputs] = run(core, request).values()
    assert len(tokens(outputs)) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_M03_a_tensor_of_torch_s_is_taken_as_it_is(core: EngineCore, dtype: str) -> None:
    """Also one that is a view, or that has a gradient; and arrays of NumPy's."""
    table = runner_of(core).model.slots["model.embed_tokens.weight"].target
    plain = table[PROMPT].to(DTYPES[dtype])
    expected = generate(core, [0] * len(PROMPT), prompt_embeds=array_of(plain), max_tokens=3)
    wide = torch.cat([plain, plain], dim=1)
    forms: list[Any] = [plain, wide[:, :HIDDEN], plain.clone().requires_grad_()]
    if dtype != "bfloat16":
        forms.append(plain.numpy())
    for embeds in forms:
        prompt = EmbedsPrompt(prompt_embeds=embeds)
        request = inputs().process("r", prompt, SamplingParams(max_tokens=3, temperature=0.0))
        [outputs] = run(core, request).values()
        assert tokens(outputs) == expected


@pytest.mark.parametrize(
    "embeds",
    [
        torch.zeros(2, HIDDEN).to_sparse(),
        torch.zeros(2, HIDDEN, dtype=torch.complex64),
        torch.zeros(2, HIDDEN, dtype=torch.int32),
        np.array([["a"] * HIDDEN]),
        np.array([[None] * HIDDEN]),
    ],
    ids=["sparse", "complex", "integers", "texts", "objects"],
)
def test_contract_M03_a_tensor_that_cannot_be_sent_is_refused(embeds: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_embeds must be"):
        inputs().process("r", EmbedsPrompt(prompt_embeds=embeds), SamplingParams())


def test_contract_B10_embeddings_are_bounded_by_the_context(core: EngineCore) -> None:
    embeds = array_of(torch.zeros(64, HIDDEN))
    with pytest.raises(InvalidRequestError, match="64 tokens"):
        inputs().process("r", EmbedsPrompt(prompt_embeds=embeds), SamplingParams())
    rows = core_request("r", [0, 0], prompt_embeds=embeds)
    [[output]] = run(core, rows).values()
    assert "64 rows for 2" in str(output.error)


@pytest.mark.parametrize("prompt", [{"prompt_embeds": [[1.0]]}, {"prompt_embeds": b"x"}])
def test_contract_B10_what_is_no_array_is_refused(prompt: PromptType) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be a torch\.Tensor"):
        inputs().process("r", prompt, SamplingParams())


def test_contract_B10_embeddings_have_no_log_probabilities(core: EngineCore) -> None:
    prompt = EmbedsPrompt(prompt_embeds=embeds_of(core, [1, 2]))
    with pytest.raises(InvalidRequestError, match="are of tokens"):
        inputs().process("r", prompt, SamplingParams(prompt_logprobs=0))
    [[output]] = run(core, embeds_request(core, "r", [1, 2], prompt_logprobs=0)).values()
    assert "are of tokens" in str(output.error)


def inputs() -> InputProcessor:
    source = resolve_model(f"dummy://?vocab_size={VOCABULARY}&num_hidden_layers=2&hidden_size=32")
    return InputProcessor(TextRenderer(source), max_model_len=64, vocab_size=VOCABULARY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_M03_a_tensor_crosses_the_wire_in_memory_of_its_own(dtype: str) -> None:
    """Sent without a copy into a message, and read from the very memory of ZMQ's frame."""
    sent = torch.arange(40 * HIDDEN).reshape(40, HIDDEN).to(DTYPES[dtype])
    memory = sent.view(torch.uint8).numpy().data
    request = core_request("r", [0] * 40, prompt_embeds=Array(dtype, (40, HIDDEN), memory))
    frames = wire.encoder.encode(request)
    assert len(frames) == 2
    assert torch.frombuffer(frames[1], dtype=torch.uint8).data_ptr() == sent.data_ptr()

    context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    server.bind("inproc://wire")
    client.connect("inproc://wire")
    try:
        client.send_multipart([b"\x00", *frames])
        assert server.poll(int(PATIENCE_S * 1000))
        (_, kind, message), arrays = receive_frames(server, head=3)
        assert kind == b"\x00"
        payload = [message, *arrays]
        received = wire.request_decoder.decode(payload)
        assert received.prompt_embeds is not None
        assert received.prompt_embeds.data is payload[1]
        values = as_tensor(received.prompt_embeds)
        assert values.data_ptr() == torch.frombuffer(payload[1], dtype=torch.uint8).data_ptr()
        del frames, request, arrays, payload
        assert torch.equal(values, sent)
        assert msgspec.structs.replace(received, prompt_embeds=None).prompt_token_ids == [0] * 40
    finally:
        server.close(0)
        client.close(0)
        context.term()


def test_contract_M03_a_small_tensor_stands_inline() -> None:
    embeds = array_of(torch.ones(2, 4))
    frames = wire.encoder.encode(core_request("r", [0, 0], prompt_embeds=embeds))
    assert len(frames) == 1
    received = wire.request_decoder.decode(frames).prompt_embeds
    assert received == embeds
    assert received is not None
    assert torch.equal(as_tensor(received), torch.ones(2, 4))
