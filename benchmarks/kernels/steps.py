"""Whole steps of a model with random weights: what the kernels and the products add up to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from benchmarks.kernels import costs
from benchmarks.kernels.cases import Case, Sizes, Workload
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.models import CausalLM, StepInputs, build_model
from diptych_engine.models.decode_graphs import DecodeGraphs, cuda_recorder
from diptych_frontend.model_files.model_config import ModelConfig
from diptych_kernels.paged_attention import AttentionMetadata


def step_cases(workload: Workload, sizes: Sizes) -> Iterator[Case]:
    """Decode steps of several batches, prefills of one prompt, and both at once, on the same
    weights."""
    longest = max(context for _, context in sizes.decode_steps)
    mixed = (max(context, new) for _, context, new in sizes.mixed_steps)
    model = random_model(workload, max(longest, *sizes.prefill_steps, *mixed))
    for sequences, context in sizes.decode_steps:
        yield from decode_steps(workload, model, sequences, context)
    for new in sizes.prefill_steps:
        yield prefill_step(workload, model, new)
    for sequences, context, new in sizes.mixed_steps:
        yield mixed_step(workload, model, sequences, context, new)


def random_model(workload: Workload, max_tokens: int) -> CausalLM:
    """Weights small enough that hidden states stay finite."""
    shape = workload.model
    config = ModelConfig(
        architecture="llama", vocab_size=shape.vocabulary, hidden_size=shape.hidden,
        intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=max_tokens,
    )  # fmt: skip
    model = build_model(config, max_tokens, workload.dtype, workload.device)
    for _, tensor in model.named_parameters():
        tensor.normal_(0, 0.02)
    return model


def decode_steps(
    workload: Workload, model: CausalLM, sequences: int, context: int
) -> Iterator[Case]:
    """One new token for each of some sequences, up to the logits; on a GPU as a graph, too."""
    layers, tables = paged_cache(workload, sequences, context)
    starts = np.arange(sequences + 1)
    positions = np.full(sequences, context - 1)
    inputs = step_inputs(workload, starts, positions, tables, sequences)
    size, cost = (
        f"{sequences} x {context}",
        costs.decode_step(workload.model, [context] * sequences),
    )
    yield Case("decode step", size, cost, lambda: model.logits(model.forward(inputs, layers)), None)
    if workload.device.type != "cpu":
        graphs = DecodeGraphs(model, layers, context, cuda_recorder)
        yield Case(
            "decode step as a graph", size, cost,
            lambda: model.logits(graphs.forward(inputs)), None,
        )  # fmt: skip


def prefill_step(workload: Workload, model: CausalLM, new: int) -> Case:
    """A whole prompt, and the logits of its last token."""
    layers, tables = paged_cache(workload, 1, new)
    inputs = step_inputs(workload, np.array([0, new]), np.arange(new), tables, 0)
    return Case(
        "prefill step", f"{new} tokens", costs.prefill_step(workload.model, new),
        lambda: model.logits(model.forward(inputs, layers)[-1:]), None,
    )  # fmt: skip


def mixed_step(workload: Workload, model: CausalLM, sequences: int, context: int, new: int) -> Case:
    """Decodes and a whole prompt, and the logits of all their last tokens."""
    layers, tables = paged_cache(workload, sequences + 1, max(context, new))
    starts = np.array([*range(sequences + 1), sequences + new])
    positions = np.concatenate((np.full(sequences, context - 1), np.arange(new)))
    inputs = step_inputs(workload, starts, positions, tables, sequences)
    last = torch.from_numpy(starts[1:] - 1).to(workload.device)
    return Case(
        "mixed step", f"{sequences} x {context} and {new} tokens",
        costs.mixed_step(workload.model, [context] * sequences, new),
        lambda: model.logits(model.forward(inputs, layers).index_select(0, last)), None,
    )  # fmt: skip


def paged_cache(
    workload: Workload, sequences: int, context: int
) -> tuple[tuple[Tensor, ...], NDArray[np.int64]]:
    """The layers of a cache, and block tables that go through it in no order; its last block is in
    none of them."""
    shape = workload.model
    width = -(-context // shape.block_size)
    order = np.random.default_rng(0).permutation(sequences * width)
    cache = workload.random(
        sequences * width + 1, shape.layers, 2, shape.block_size, shape.kv_heads, shape.head_dim
    )
    return cache.unbind(1), order.reshape(sequences, width)


def step_inputs(
    workload: Workload,
    starts: NDArray[np.int64],
    positions: NDArray[np.int64],
    tables: NDArray[np.int64],
    num_decodes: int,
) -> StepInputs:
    """Sequences whose new tokens end their contexts."""
    size = workload.model.block_size
    blocks = tables[np.repeat(np.arange(len(tables)), np.diff(starts)), positions // size]

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(workload.device)

    return StepInputs(
        token_ids=tensor(positions % workload.model.vocabulary),
        positions=tensor(positions),
        slot_blocks=tensor(blocks),
        slot_offsets=tensor(positions % size),
        attention=AttentionMetadata(
            query_starts=starts,
            context_lens=positions[starts[1:] - 1] + 1,
            block_tables=tables,
            num_decodes=num_decodes,
            block_size=size,
            device=workload.device,
        ),
    )
