"""What packed weights save: one step of the model, with and without, in turn.

`python -m benchmarks.packing [--model URI] [--repetitions 15]` prints medians of milliseconds of
processor time, on one thread, and of the ratio within a repetition. No scheduler, no sampling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Final

import numpy as np
import torch
from benchmarks.quality import MODEL

from diptych_engine.execution.runner import ModelRunner
from diptych_engine.models import StepInputs
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_protocol import EngineConfig

BLOCK_SIZE: Final = 16
CONTEXT: Final = 128
"""Tokens in the cache of each decode."""
CASES: Final = ((1, 0), (4, 0), (16, 0), (32, 0), (64, 0), (128, 0), (0, 128), (4, 128), (0, 512))
"""Decodes, and tokens of a prompt in the same step."""


def inputs_of(decodes: int, prompt: int) -> StepInputs:
    """Each sequence has blocks of its own."""
    counts = np.array([1] * decodes + [prompt] * (prompt > 0))
    lengths = np.array([CONTEXT] * decodes + [prompt] * (prompt > 0))
    query_starts = np.concatenate(([0], counts.cumsum()))
    blocks_each = -(-int(lengths.max()) // BLOCK_SIZE)
    tables = np.arange(len(counts) * blocks_each).reshape(len(counts), blocks_each)
    positions = np.concatenate(
        [np.arange(length)[-n:] for n, length in zip(counts, lengths, strict=True)]
    )
    of_token = np.repeat(np.arange(len(counts)), counts)
    return StepInputs(
        token_ids=torch.from_numpy(positions % 1000),
        positions=torch.from_numpy(positions),
        slot_blocks=torch.from_numpy(tables[of_token, positions // BLOCK_SIZE]),
        slot_offsets=torch.from_numpy(positions % BLOCK_SIZE),
        attention=AttentionMetadata(query_starts, lengths, tables, decodes, BLOCK_SIZE),
    )


@torch.inference_mode()
def step_ms(runner: ModelRunner, decodes: int, prompt: int) -> float:
    inputs = inputs_of(decodes, prompt)
    started = time.thread_time()
    hidden = runner.forward(inputs, [])
    runner.model.logits(hidden[: decodes + (prompt > 0)])
    return (time.thread_time() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    runners = [
        ModelRunner(
            EngineConfig(model=args.model, num_blocks=2048, num_threads=1, weight_packing=packing),
            resolve_model(args.model),
        )
        for packing in ("auto", "none")
    ]
    print("| decodes | prompt tokens | packed ms | float32 ms | ratio |")
    print("|---|---|---|---|---|")
    for decodes, prompt in CASES:
        pairs = [
            [step_ms(runner, decodes, prompt) for runner in runners]
            for _ in range(args.repetitions)
        ]
        packed, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"| {decodes} | {prompt} | {packed:.1f} | {plain:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
