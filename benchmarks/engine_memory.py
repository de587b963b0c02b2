"""Memory of a program that makes and drops one LLMEngine after the other.

`python -m benchmarks.engine_memory [--engines 20] [--model URI]` prints the resident memory in MiB
after each of them; it should stand still from the second one on.
"""

from __future__ import annotations

import argparse
import logging

import psutil

from diptych_engine import EngineArgs, LLMEngine
from diptych_protocol import SamplingParams

MODEL = "dummy://?num_hidden_layers=4&hidden_size=512&intermediate_size=2048"


def use_one(model: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model, num_blocks=256))
    engine.add_request("r", [1] * 64, SamplingParams(max_tokens=16, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=20)
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    logging.disable()
    for number in range(1, args.engines + 1):
        use_one(args.model)
        print(number, psutil.Process().memory_info().rss >> 20, flush=True)


if __name__ == "__main__":
    main()
