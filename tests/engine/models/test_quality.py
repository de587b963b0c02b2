"""Packed weights answer as float32 does: chat prompts, at every level, and under small changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_kernels.cpu_level import CpuLevel, forced

CHATS = Path(__file__).parents[3] / "benchmarks" / "data" / "chats.txt"
EACH = 25
"""One of so many chats is asked."""
MAX_TOKENS = 128
CLEAR = 0.3
"""Logits by which a choice leads that no rounding may turn, the matrix unit's bfloat16 included."""


@pytest.fixture(scope="module")
def source(smollm2: str) -> ModelSource:
    return resolve_model(smollm2)


@pytest.fixture(scope="module")
def chats(source: ModelSource) -> list[list[int]]:
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    return [
        tokenizer.encode(
            tokenizer.render_chat([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in CHATS.read_text().splitlines()[::EACH]
    ]


@pytest.fixture(scope="module")
def exact(
    source: ModelSource, chats: list[list[int]], lone_sequence: Callable[..., Any]
) -> list[Tensor]:
    """[tokens, vocabulary] logits of each chat in float32."""
    with forced(CpuLevel.NONE):
        sequence = lone_sequence(source, MAX_TOKENS)
        return [sequence.logits(chat) for chat in chats]


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def divergence(actual: Tensor, expected: Tensor) -> float:
    """The mean Kullback-Leibler divergence of logits [tokens, vocabulary]."""
    actual, expected = (logits.log_softmax(-1) for logits in (actual, expected))
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


@pytest.mark.parametrize(
    "last", [pytest.param(0, marks=pytest.mark.slow, id="prompt"), pytest.param(4, id="generated")]
)
def test_chats_keep_the_logits_of_float32(
    compiled_level: CpuLevel,
    source: ModelSource,
    chats: list[list[int]],
    exact: list[Tensor],
    lone_sequence: Callable[..., Any],
    last: int,
) -> None:
    """All rows do, and the last ones, from which the first tokens come; as a prompt, and with
    the last tokens computed as if they had been generated."""
    sequence = lone_sequence(source, MAX_TOKENS, packs=True)
    actual = [sequence.logits_in_chunks(chat, [len(chat) - last] + [1] * last) for chat in chats]
    ours, float32 = torch.cat(actual), torch.cat(exact)
    assert distance(ours, float32) < 0.02
    assert divergence(ours, float32) < 5e-4
    ours, float32 = (torch.stack([rows[-1] for rows in each]) for each in (actual, exact))
    assert distance(ours, float32) < 0.02
    assert divergence(ours, float32) < 5e-4
    margins = float32.topk(2).values
    clear = margins[:, 0] - margins[:, 1] > CLEAR
    assert clear.sum() >= len(chats) // 2
    assert torch.equal(ours.argmax(-1)[clear], float32.argmax(-1)[clear])


def test_activations_of_8_bits_cost_no_more_than_llama_cpps(
    compiled_level: CpuLevel,
    source: ModelSource,
    chats: list[list[int]],
    exact: list[Tensor],
    lone_sequence: Callable[..., Any],
) -> None:
    """The mean divergence of its own kernels from floats is 3e-3 to 6e-3."""
    if compiled_level < CpuLevel.VNNI:
        pytest.skip("no instruction of this level multiplies bytes")
    sequence = lone_sequence(source, MAX_TOKENS, packs=True)
    for packable in sequence.model.packables:
        packable.linear.input_bits = 8
    # Generated tokens: with a matrix unit, prompts are rounded as ever.
    ours = [sequence.logits_in_chunks(chat, [len(chat) - 4, 1, 1, 1, 1])[-4:] for chat in chats]
    assert 1e-4 < divergence(torch.cat(ours), torch.cat([rows[-4:] for rows in exact])) < 6e-3


def test_a_millionth_of_a_change_moves_no_choice(
    compiled_level: CpuLevel,
    source: ModelSource,
    chats: list[list[int]],
    lone_sequence: Callable[..., Any],
) -> None:
    """Rounding steps would make of it what they are large themselves: the margin between the two
    likeliest first tokens hardly moves."""
    sequence = lone_sequence(source, MAX_TOKENS, packs=True)
    [embedding] = [x for name, x in sequence.model.named_parameters() if name == "embedding"]
    kept = embedding.clone()
    generator = torch.Generator().manual_seed(0)
    margins = []
    for _ in range(4):
        noise = 1e-6 * torch.randn(kept.shape, generator=generator)
        with torch.inference_mode():
            embedding.copy_(kept * (1 + noise))
        first, second = sequence.logits(chats[0])[-1].topk(2).values
        margins.append(float(first - second))
    assert torch.tensor(margins).std() < 0.05
