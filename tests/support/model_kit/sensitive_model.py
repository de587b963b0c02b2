"""A tiny model whose greedy answer depends on the KV of every cached position.

With the small random weights of `dummy://` an answer depends on little but the last token, so
foreign or damaged KV goes unnoticed. Here the first layer's attention is nearly even, so that all
positions count, with large values, so that they count more than the token itself; the second
layer's is sharp, so that a small change in the first sends it to other positions.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from engine_kit.core import core_request, make_core, run, tokens
from safetensors.torch import save_file
from torch import Tensor

from diptych_protocol import LogprobsLists

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, MLP = 1024, 128, 8, 16, 128
SHARPNESS = (0.3, 4.0)
"""Scale of each layer's queries and keys."""
VALUE_SCALE, OUTPUT_SCALE, HEAD_SCALE = 10.0, 30.0, 4.0
ANSWER_TOKENS = 24
MIN_MARGIN = 0.02
"""How much likelier, in nats, the chosen token must be than any other: rounding differs between
batches, by about 1e-5, and must not change an answer."""
BATCH = 32


Matrix = Callable[[int, int, float], Tensor]
"""`matrix(rows, columns, scale)` turns a vector of unit elements into one whose elements are about
`scale`."""


def save_sensitive_model(
    folder: Path, seed: int = 1, *, heads: int = HEADS, sharpness: Sequence[float] = SHARPNESS
) -> str:
    """A Llama checkpoint without a tokenizer; returns its path. Fewer heads are larger ones.

    sharpness: the scale of each layer's queries and keys.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": len(sharpness),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEADS * HEAD_DIM // heads,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(sensitive_tensors(seed, sharpness), folder / "model.safetensors")
    return str(folder)


def llama_attention(matrix: Matrix, sharpness: float) -> dict[str, Tensor]:
    """One layer's projections, by their names."""
    width = HEADS * HEAD_DIM
    return {
        "q_proj": matrix(width, HIDDEN, sharpness),
        "k_proj": matrix(width, HIDDEN, sharpness),
        "v_proj": matrix(width, HIDDEN, VALUE_SCALE),
        "o_proj": matrix(HIDDEN, width, OUTPUT_SCALE),
    }


def sensitive_tensors(
    seed: int,
    sharpness: Sequence[float],
    attention: Callable[[Matrix, float], dict[str, Tensor]] = llama_attention,
) -> dict[str, Tensor]:
    """All tensors of a checkpoint with so many layers."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        factor: float = scale / columns**0.5
        return factor * torch.randn(rows, columns, generator=generator)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, HEAD_SCALE),
    }
    for layer, scale in enumerate(sharpness):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.{name}.weight": tensor
            for name, tensor in attention(matrix, scale).items()
        }
        tensors |= {
            f"{prefix}mlp.gate_proj.weight": matrix(MLP, HIDDEN, 1.0),
            f"{prefix}mlp.up_proj.weight": matrix(MLP, HIDDEN, 1.0),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, MLP, 1.0),
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return tensors


@dataclass(frozen=True)
class Question:
    """A prompt and the one right answer to it."""

    prompt: list[int]
    answer: list[int]


def questions(
    model: str, count: int, *, shortest: int = 24, longest: int = 128, seed: int = 1
) -> list[Question]:
    """Random prompts that end in the same token, with what an undisturbed engine answers.

    Prompts whose answer hangs on rounding are left out. The core runs in this process.
    """
    rng = random.Random(seed)
    core = make_core(model, num_blocks=1024, max_num_seqs=BATCH, max_num_batched_tokens=4096)
    found: list[Question] = []
    try:
        while len(found) < count:
            prompts = [
                [*(rng.randrange(VOCABULARY) for _ in range(rng.randint(shortest, longest))), 7]
                for _ in range(BATCH)
            ]
            requests = [
                core_request(
                    str(index), prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=2
                )
                for index, prompt in enumerate(prompts)
            ]
            for name, outputs in run(core, *requests).items():
                margins = [m for output in outputs for m in _margins(output.new_logprobs)]
                if min(margins) >= MIN_MARGIN:
                    found.append(Question(prompts[int(name)], tokens(outputs)))
    finally:
        core.close()
    return found[:count]


def _margins(logprobs: LogprobsLists | None) -> Iterator[float]:
    """How far each chosen token is ahead of the next best one."""
    if logprobs is None:
        raise ValueError("no log-probabilities were asked for")
    for token_ids, values in zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True):
        others = [v for t, v in zip(token_ids[1:], values[1:], strict=True) if t != token_ids[0]]
        yield values[0] - max(others)
