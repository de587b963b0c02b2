"""A packed model's layers as a table of kernel calls: the same bits as one call after another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from diptych_engine.models.groups import read_groups
from diptych_engine.models.interface import GivenEmbeddings, StepInputs
from diptych_engine.models.llama import LlamaModel
from diptych_engine.models.packed import PackedMatrix
from diptych_frontend.model_files.model_config import ModelConfig
from diptych_kernels.paged_attention import AttentionMetadata

BLOCK_SIZE, BLOCKS_EACH, MAX_SEQUENCES = 4, 8, 6
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
"""Heads of a size whose kernels are compiled before the tests."""
FAMILIES = {
    "llama": CONFIG,
    "qwen2": msgspec.structs.replace(CONFIG, attention_bias=True),
    "qwen3": msgspec.structs.replace(CONFIG, qk_norm=True),
}
families = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)

pytestmark = pytest.mark.usefixtures("compiled_level")


def packed_model(config: ModelConfig = CONFIG) -> LlamaModel:
    model = LlamaModel(config, 128, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.normal_(0.0, 0.2, generator=generator)
    pack(model)
    return model


def pack(model: LlamaModel) -> None:
    for packable in model.packables:
        values = packable.linear.weight.t().clone(memory_format=torch.contiguous_format)
        raw = gguf.quants.quantize(values.numpy(), Kind.Q4_1)
        groups = read_groups(raw.reshape(-1), Kind.Q4_1, tuple(values.shape))
        assert groups is not None
        matrix = PackedMatrix.of([groups])
        assert matrix is not None
        packable.linear.pack(matrix)


def step_of(decodes: Sequence[int], chunks: Sequence[tuple[int, int]] = ()) -> StepInputs:
    """Decodes with so many tokens before them; chunks of (tokens before, new tokens)."""
    starts = np.array([*decodes, *(start for start, _ in chunks)])
    counts = np.array([*(1 for _ in decodes), *(count for _, count in chunks)])
    query_starts = np.concatenate(([0], counts.cumsum()))
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    tables = np.arange(len(counts) * BLOCKS_EACH).reshape(len(counts), BLOCKS_EACH)
    rows = np.repeat(np.arange(len(counts)), counts)
    return StepInputs(
        token_ids=torch.from_numpy(positions * 7 % CONFIG.vocab_size),
        positions=torch.from_numpy(positions),
        slot_blocks=torch.from_numpy(tables[rows, positions // BLOCK_SIZE]),
        slot_offsets=torch.from_numpy(positions % BLOCK_SIZE),
        attention=AttentionMetadata(
            query_starts=query_starts,
            context_lens=starts + counts,
            block_tables=tables,
            num_decodes=len(decodes),
            block_size=BLOCK_SIZE,
        ),
    )


def cache_of(config: ModelConfig = CONFIG) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    shape = (BLOCKS_EACH * MAX_SEQUENCES, config.num_hidden_layers, 2, BLOCK_SIZE, 2, 32)
    return torch.randn(shape, generator=generator)


def forward(model: LlamaModel, inputs: StepInputs, *, as_table: bool) -> tuple[Tensor, Tensor]:
    """What the step yields, and the cache after it."""
    cache = cache_of(model.config)
    model._may_have_calls = as_table
    with torch.inference_mode():
        return model.forward(inputs, cache.unbind(1)), cache


def assert_same(model: LlamaModel, inputs: StepInputs) -> None:
    for actual, expected in zip(
        forward(model, inputs, as_table=True), forward(model, inputs, as_table=False), strict=True
    ):
        assert torch.equal(actual, expected)


STEPS = {
    "one decode": step_of([5]),
    "decodes": step_of([5, 0, 12, 30]),
    "a chunk": step_of([], [(0, 9)]),
    "a chunk behind a prefix": step_of([], [(6, 3)]),
    "decodes and chunks": step_of([3, 17], [(0, 20), (8, 5), (4, 1)]),
}


@families
def test_a_packed_model_has_a_table(config: ModelConfig) -> None:
    assert packed_model(config)._may_have_calls


@families
@pytest.mark.parametrize("name", STEPS)
def test_a_step_yields_the_same_bits(name: str, config: ModelConfig) -> None:
    assert_same(packed_model(config), STEPS[name])


def test_one_table_serves_steps_of_different_sizes() -> None:
    model = packed_model()
    for inputs in [*STEPS.values(), *reversed(STEPS.values())]:
        assert_same(model, inputs)


def test_threads_may_become_more() -> None:
    model, before = packed_model(), torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            assert_same(model, STEPS["decodes and chunks"])
    finally:
        torch.set_num_threads(before)


def test_given_embeddings_go_in() -> None:
    given = GivenEmbeddings(torch.tensor([2, 7]), torch.randn(2, CONFIG.hidden_size))
    inputs = replace(STEPS["a chunk"], given=given)
    model = packed_model()
    assert_same(model, inputs)
    assert not torch.equal(
        forward(model, inputs, as_table=True)[0], forward(model, STEPS["a chunk"], as_table=True)[0]
    )


@families
def test_weights_may_move_between_steps(config: ModelConfig) -> None:
    """As when an engine has slept: the same tensors, at other addresses."""
    model, inputs = packed_model(config), STEPS["decodes"]
    before, _ = forward(model, inputs, as_table=True)
    kept = []
    for tensor in model.weight_memory:
        storage = tensor.untyped_storage()
        copy = storage.clone()
        storage.resize_(0)
        kept.append(torch.empty(len(copy), dtype=torch.uint8))  # takes the old place, perhaps
        storage.resize_(len(copy))
        storage.copy_(copy)
    after, _ = forward(model, inputs, as_table=True)
    assert torch.equal(after, before)


def test_new_weights_are_used() -> None:
    model, inputs = packed_model(), STEPS["decodes"]
    before, _ = forward(model, inputs, as_table=True)
    with torch.inference_mode():
        for packable in model.packables:
            packable.linear.unpack()
        for weight in model.parameters():
            weight.mul_(1.5)
    plain, _ = forward(model, inputs, as_table=True)
    assert not torch.allclose(plain, before)
    pack(model)
    assert_same(model, inputs)
    again, _ = forward(model, inputs, as_table=True)
    assert float((again - plain).norm() / plain.norm()) < 0.2
    assert not torch.allclose(again, before)


def test_a_layer_costs_few_calls_from_python() -> None:
    """Nine kernels, each of which would be some forty: the addresses of what may have moved."""

    def calls(layers: int) -> int:
        model = packed_model(msgspec.structs.replace(CONFIG, num_hidden_layers=layers))
        forward(model, STEPS["decodes"], as_table=True)
        count = 0

        def saw(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(saw)
        try:
            forward(model, STEPS["decodes"], as_table=True)
        finally:
            sys.setprofile(None)
        return count

    assert calls(12) - calls(2) <= 10 * 8
