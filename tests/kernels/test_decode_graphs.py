"""Decodes as recorded launches compute what they would compute one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_kit.kernel_model import (
    BLOCK_SIZE,
    CPU,
    FAMILIES,
    choose_kernels,
    config,
    make_cache,
    make_model,
)
from numpy.typing import NDArray

from diptych_engine.models import StepInputs
from diptych_engine.models.decode_graphs import Compute, DecodeGraphs, Recorder, cuda_recorder
from diptych_engine.models.interface import GivenEmbeddings
from diptych_engine.models.mixture import stacks_pay
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_kernels.paged_attention import triton as paged_attention
from diptych_kernels.paged_attention.gpu_schedule import Geometry

LONGEST = 640
STEPS = [[300], [301], [7, 0, 600], [8, 1, 601, 255], [602, 9], [2, 10, 603]]
"""Places of new tokens. Three rows are padded to four, and what was recorded for two and four comes
back with other contexts."""
ALL, PADDED = range(len(STEPS)), (2, 3)
SEQUENCES = [[0], [0], [1, 2, 0], [1, 2, 0, 3], [0, 1], [2, 1, 0]]
NUM_BLOCKS = 4 * LONGEST // BLOCK_SIZE
TABLES = np.random.default_rng(1).permutation(NUM_BLOCKS).reshape(4, -1)


def decodes(step: int, device: torch.device) -> StepInputs:
    places, tables = np.array(STEPS[step]), TABLES[SEQUENCES[step]]
    blocks = tables[np.arange(len(places)), places // BLOCK_SIZE]
    attention = AttentionMetadata(
        query_starts=np.arange(len(places) + 1),
        context_lens=places + 1,
        block_tables=tables[:, : places.max() // BLOCK_SIZE + 1],
        num_decodes=len(places),
        block_size=BLOCK_SIZE,
        device=device,
    )
    numbers = (places % 50, places, blocks, places % BLOCK_SIZE)
    return StepInputs(*(torch.from_numpy(number).to(device) for number in numbers), attention)  # type: ignore[arg-type, call-arg]


@pytest.fixture
def make_recorder(device: torch.device) -> Callable[[], Recorder]:
    """A graph computes the same at the same addresses again, as a second call does."""
    return cuda_recorder if device != CPU else lambda: lambda compute: compute


@pytest.mark.parametrize(
    ("family", "processors", "steps"),
    [
        pytest.param(family, processors, steps, id=f"{family}-{contexts}", marks=marks)
        # Triton's interpreter takes its time. All steps of one family are in a quick test, and of
        # one that has most of what others have two: what was recorded with a padded row comes back.
        for number, family in enumerate(FAMILIES)
        for processors, contexts, steps, marks in (
            (1, "whole contexts", ALL, [pytest.mark.slow] if number else []),
            (6, "split contexts", ALL, [pytest.mark.slow]),
            (
                6,
                "split contexts, two steps",
                PADDED,
                [] if family == "gpt_oss" else [pytest.mark.slow],
            ),
        )
        if number or steps is ALL
    ],
)
def test_recorded_decodes_are_those_of_the_model(
    family: str,
    processors: int,
    steps: Sequence[int],
    device: torch.device,
    make_recorder: Callable[[], Recorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = config(**FAMILIES[family])
    if device != CPU and chosen.num_experts and not stacks_pay(chosen, device, torch.float32):
        pytest.skip("an engine does not record such a model here: each layer waits for counts")
    choose_kernels(device, monkeypatch)
    monkeypatch.setattr(paged_attention, "num_processors", lambda _: processors)
    model = make_model(chosen, device, LONGEST)
    layers, own_layers = (make_cache(device, NUM_BLOCKS + 1) for _ in range(2))
    graphs = DecodeGraphs(model, own_layers, LONGEST, make_recorder)
    with torch.inference_mode():
        for step in steps:
            inputs = decodes(step, device)
            assert graphs.fit(inputs)
            expected = model.forward(inputs, layers)
            actual = graphs.forward(decodes(step, device)).clone()
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
            for own, layer in zip(own_layers, layers, strict=True):
                torch.testing.assert_close(own[:-1], layer[:-1], atol=2e-4, rtol=2e-4)


def in_groups(inputs: StepInputs, others: NDArray[np.int64]) -> StepInputs:
    """The same step for two groups of layers, of which the second keeps each block elsewhere."""
    attention, slots = inputs.attention, inputs.slot_blocks.cpu().numpy()
    tables = np.stack((attention.block_tables, others[attention.block_tables]), -1)
    return replace(
        inputs,
        slot_blocks=torch.from_numpy(np.stack((slots, others[slots]))).to(inputs.token_ids.device),
        attention=replace(attention, block_tables=tables.reshape(len(tables), -1), num_groups=2),
    )


def test_recorded_decodes_of_layers_in_groups_are_those_of_all_in_one(
    device: torch.device,
    make_recorder: Callable[[], Recorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_kernels(device, monkeypatch)
    chosen = config(**FAMILIES["gemma3_text"])
    model = make_model(chosen, device, LONGEST)
    divided = make_model(chosen, device, LONGEST, group_of=(1, 0))
    layers, own_layers = (make_cache(device, NUM_BLOCKS + 1) for _ in range(2))
    graphs = DecodeGraphs(divided, own_layers, LONGEST, make_recorder)
    others = np.random.default_rng(2).permutation(NUM_BLOCKS)
    with torch.inference_mode():
        for step in range(1, 4):
            inputs = decodes(step, device)
            expected = model.forward(inputs, layers)
            actual = graphs.forward(in_groups(inputs, others))
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


class Recorders:
    """Each is a list of what it has recorded."""

    def __init__(self) -> None:
        self.made: list[list[Compute]] = []

    def __call__(self) -> Recorder:
        mine: list[Compute] = []
        self.made.append(mine)

        def record(compute: Compute) -> Compute:
            mine.append(compute)
            return compute

        return record


@torch.inference_mode()
def test_what_was_recorded_is_forgotten_and_recorded_by_another_recorder(
    device: torch.device,
) -> None:
    """The memory of graphs is gone with the last of them."""
    model, layers = make_model(config(), device, LONGEST), make_cache(device, NUM_BLOCKS + 1)
    recorders = Recorders()
    graphs = DecodeGraphs(model, layers, LONGEST, recorders)
    for step, times in ((0, 1), (1, 1), (2, 2)):
        graphs.forward(decodes(step, device))
        assert [len(mine) for mine in recorders.made] == [times]
    graphs.forget()
    graphs.forward(decodes(0, device))
    assert [len(mine) for mine in recorders.made] == [2, 1]


@torch.inference_mode()
def test_only_what_has_moved_is_forgotten(device: torch.device) -> None:
    model, layers = make_model(config(), device, LONGEST), make_cache(device, NUM_BLOCKS + 1)
    recorders = Recorders()
    graphs = DecodeGraphs(model, layers, LONGEST, recorders)
    graphs.forget_moved()
    graphs.forward(decodes(0, device))
    next(iter(model.weight_memory)).mul_(2)
    graphs.forget_moved()
    assert len(recorders.made) == 1
    for away in (next(iter(model.weight_memory)), layers[0]):
        storage = away.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        graphs.forget_moved()
        storage.resize_(size)
        away.zero_()
        graphs.forward(decodes(0, device))
    assert [len(mine) for mine in recorders.made] == [1, 1, 1]


@torch.inference_mode()
def test_padding_reads_one_key_whatever_the_first_row_reads(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 128k tokens that is repeated 31 times is read 31 times more."""
    model, layers = make_model(config(), device, LONGEST), make_cache(device, NUM_BLOCKS + 1)
    seen: list[StepInputs] = []
    forward = model.forward

    def watched(inputs: StepInputs, kv_layers: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append(inputs)
        return forward(inputs, kv_layers)

    monkeypatch.setattr(model, "forward", watched)
    graphs = DecodeGraphs(model, layers, LONGEST, Recorders())
    geometry = Geometry(heads=6, kv_heads=2, processors=6)
    for step in (2, 5):
        graphs.forward(decodes(step, device))
        plan, numbers = seen[0].attention.on_device(geometry)
        contexts = numbers[plan.context_lens_at :][:4].tolist()
        assert contexts == [*(place + 1 for place in STEPS[step]), 1]
        assert seen[0].slot_blocks.tolist()[-1] == NUM_BLOCKS


def test_only_plain_decodes_fit(device: torch.device) -> None:
    inputs = decodes(2, device)
    given = GivenEmbeddings(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 24))
    chunk = replace(inputs.attention, num_decodes=2)
    assert DecodeGraphs.fit(inputs)
    assert not DecodeGraphs.fit(replace(inputs, given=given))
    assert not DecodeGraphs.fit(replace(inputs, attention=chunk))
    assert not DecodeGraphs.fit(replace(inputs, routed=torch.zeros(1, 1, 1, dtype=torch.int16)))
