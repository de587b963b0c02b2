"""How long a prompt's beginning takes from disk (`kv_disk_bytes`), beside computing it.

`python -m benchmarks.kv_disk [--tokens 1024 4096] [--rounds 5]`. An engine computes prompts and
ends; the next one answers each, whose files the kernel has dropped from its memory, and in turn a
new prompt of the same length. The figure is the median of the ratios of each turn, until the first
token.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.machine import machine
from benchmarks.servers import MODEL

from diptych_engine import LLM
from diptych_protocol import SamplingParams, TokensPrompt

ROOM: Final = 16 << 30
TOKENS: Final = (1024, 2048, 4096)
FIRST_TOKEN: Final = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def prompt(number: int, length: int) -> list[int]:
    """Return tokens that no other prompt begins with."""
    rng = random.Random(f"{number} {length}")
    return [rng.randrange(100, 40_000) for _ in range(length)]


def seconds(llm: LLM, tokens: list[int]) -> float:
    """Return how long the first token takes."""
    started = time.perf_counter()
    llm.generate(TokensPrompt(prompt_token_ids=tokens), FIRST_TOKEN, use_tqdm=False)
    return time.perf_counter() - started


def drop_from_memory(folder: Path) -> None:
    """Have the next reader of these files wait for the disk."""
    for path in folder.rglob("*-*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def engine(most: int) -> LLM:
    return LLM(MODEL, kv_disk_bytes=ROOM, kv_cache_bytes=8 << 30, max_model_len=most + 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        first = engine(max(given.tokens))
        for length in given.tokens:
            for number in range(given.rounds):
                seconds(first, prompt(number, length))
        first.shutdown()
        again = engine(max(given.tokens))
        drop_from_memory(Path(folder) / "diptych" / "kv")
        print(machine())
        print("tokens  from disk s  computed s  ratio")
        for length in given.tokens:
            turns = [
                (seconds(again, prompt(n, length)), seconds(again, prompt(-1 - n, length)))
                for n in range(given.rounds)
            ]
            read, computed = (statistics.median(each) for each in zip(*turns, strict=True))
            ratio = statistics.median(own / other for own, other in turns)
            print(f"{length:6}  {read:11.3f}  {computed:10.3f}  {ratio:5.3f}")
        again.shutdown()


if __name__ == "__main__":
    main()
