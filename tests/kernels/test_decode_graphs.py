"""Decodes as recorded launches compute what they would compute one by one."""

from __future__ import annotations

from collections.abc import Callable
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

from diptych_engine.models import StepInputs
from diptych_engine.models.decode_graphs import Compute, DecodeGraphs, cuda_recorder
from diptych_engine.models.interface import GivenEmbeddings
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_kernels.paged_attention import triton as paged_attention

LONGEST = 640
STEPS = [[300], [301], [7, 0, 600], [8, 1, 601, 255], [602, 9], [2, 10, 603]]
"""Places of new tokens. Three rows are padded to four, and what was recorded for two and four comes
back with other contexts."""
SEQUENCES = [[0], [0], [1, 2, 0], [1, 2, 0, 3], [0, 1], [2, 1, 0]]
NUM_BLOCKS = 4 * LONGEST // BLOCK_SIZE
TABLES = np.random.default_rng(1).permutation(NUM_BLOCKS).reshape(4, -1)


def decodes(step: int, window: int | None, device: torch.device) -> StepInputs:
    places, tables = np.array(STEPS[step]), TABLES[SEQUENCES[step]]
    blocks = tables[np.arange(len(places)), places // BLOCK_SIZE]
    attention = AttentionMetadata(
        query_starts=np.arange(len(places) + 1),
        context_lens=places + 1,
        block_tables=tables[:, : places.max() // BLOCK_SIZE + 1],
        num_decodes=len(places),
        block_size=BLOCK_SIZE,
        window=window,
        device=device,
    )
    numbers = (places % 50, places, blocks, places % BLOCK_SIZE)
    return StepInputs(*(torch.from_numpy(number).to(device) for number in numbers), attention)  # type: ignore[arg-type, call-arg]


@pytest.fixture
def record(device: torch.device) -> Callable[[Compute], Compute]:
    """A graph computes the same at the same addresses again, as a second call does."""
    return cuda_recorder() if device != CPU else lambda compute: compute


@pytest.mark.parametrize(
    ("family", "processors"),
    [
        pytest.param(family, processors, id=f"{family}-{contexts}", marks=marks)
        # Triton's interpreter takes its time: each family and either form in a quick test.
        for number, family in enumerate(FAMILIES)
        for processors, contexts, marks in (
            (1, "whole contexts", [pytest.mark.slow] if number else []),
            (6, "split contexts", [] if number else [pytest.mark.slow]),
        )
    ],
)
def test_recorded_decodes_are_those_of_the_model(
    family: str,
    processors: int,
    device: torch.device,
    record: Callable[[Compute], Compute],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_kernels(device, monkeypatch)
    monkeypatch.setattr(paged_attention, "num_processors", lambda _: processors)
    model = make_model(config(**FAMILIES[family]), device, LONGEST)
    layers, own_layers = (make_cache(device, NUM_BLOCKS) for _ in range(2))
    graphs = DecodeGraphs(model, own_layers, LONGEST, record)
    window = config(**FAMILIES[family]).sliding_window
    with torch.inference_mode():
        for step in range(len(STEPS)):
            inputs = decodes(step, window, device)
            assert graphs.fit(inputs)
            expected = model.forward(inputs, layers)
            actual = graphs.forward(decodes(step, window, device)).clone()
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(own_layers, layers, atol=2e-4, rtol=2e-4)


def test_what_was_recorded_is_forgotten(device: torch.device) -> None:
    model, layers = make_model(config(), device, LONGEST), make_cache(device, NUM_BLOCKS)
    recorded: list[Compute] = []

    def record(compute: Compute) -> Compute:
        recorded.append(compute)
        return compute

    graphs = DecodeGraphs(model, layers, LONGEST, record)
    with torch.inference_mode():
        for step, times in ((0, 1), (1, 1), (2, 2)):
            graphs.forward(decodes(step, None, device))
            assert len(recorded) == times
        graphs.forget()
        graphs.forward(decodes(0, None, device))
    assert len(recorded) == 3


def test_only_plain_decodes_fit(device: torch.device) -> None:
    inputs = decodes(2, None, device)
    given = GivenEmbeddings(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 24))
    chunk = replace(inputs.attention, num_decodes=2)
    assert DecodeGraphs.fit(inputs)
    assert not DecodeGraphs.fit(replace(inputs, given=given))
    assert not DecodeGraphs.fit(replace(inputs, attention=chunk))
