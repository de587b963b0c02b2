"""How long an engine that was killed takes to go on with its streams, with and without `kv_keep`.

`python -m benchmarks.kv_keep [--streams 16] [--prompt 512] [--rounds 3]`. A process computes
prompts and 64 tokens of each answer, and is killed. The next one is started and computes the next
token of each, as after a router's call. Both ways take turns. Seconds of processors do not depend
on what else the machine does.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any, Final

from benchmarks.machine import machine
from benchmarks.servers import MODEL

TOLD: Final = 64
NAMES: Final = ("computes", "starts", "goes on", "starts, s", "goes on, s", "cached")


def engine(pipe: Connection[Any, Any], folder: str, prompts: list[list[int]], count: int) -> None:
    """A process that computes the next tokens, tells what they took, and waits to be killed."""
    began = time.perf_counter()
    from diptych_engine import LLM  # torch is loaded here, and nowhere else
    from diptych_protocol import SamplingParams, TokensPrompt

    llm = LLM(MODEL, kv_keep=folder, kv_cache_bytes=1 << 30, max_num_seqs=len(prompts))
    started, processors = time.perf_counter(), time.process_time()
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
        use_tqdm=False,
    )
    after, ended = time.process_time(), time.perf_counter()
    took = after - processors, processors, started - began, ended - started
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    pipe.send((took, cached, [list(output.outputs[0].token_ids) for output in outputs]))
    signal.pause()


def killed(folder: str, prompts: list[list[int]], count: int) -> Any:
    """Return what such a process told."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=engine, args=(theirs, folder, prompts, count))
    process.start()
    told = ours.recv()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(machine())
    rows: dict[str, list[tuple[float, ...]]] = {"": [], "kv_keep": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for number in range(given.rounds):
            rng = random.Random(number)
            prompts = [
                rng.choices(range(100, 40_000), k=given.prompt) for _ in range(given.streams)
            ]
            for way, found in rows.items():
                folder = way and memory
                (computes, *_), _, answers = killed(folder, prompts, TOLD)
                longer = [p + answer for p, answer in zip(prompts, answers, strict=True)]
                (on, starts, start_s, on_s), cached, _ = killed(folder, longer, 1)
                found.append((computes, starts, on, start_s, on_s, cached))
                print(way or "none", *(f"{x:.2f}" for x in found[-1]), flush=True)
    print("medians:", *NAMES, sep="  ")
    for way, found in rows.items():
        print(way or "none", *(f"{statistics.median(x):.2f}" for x in zip(*found, strict=True)))


if __name__ == "__main__":
    main()
