"""Whole batches through `LLM.generate`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import Record
from benchmarks.load import Load, prompts
from benchmarks.peers import servers as peers
from benchmarks.scenario import Column, Options, Reporter, Scenario, seed_of
from benchmarks.servers import KV_GIB, MODEL

SCRIPT = Path(__file__).parent.parent / "offline_batch.py"
LOADS = {
    "64 x 128": Load(64, 128),
    "16 x 512": Load(16, 512),
}
QUICK = ("64 x 128",)
WARM_UP = Load(2, 32, 4)


class Batches:
    """A process with an `LLM`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds(self, load: Load, seed: int) -> float:
        """Seconds that one batch takes."""
        task = {"prompts": prompts(load, seed), "output_tokens": load.output_tokens}
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return float(json.loads(self.line())["seconds"])

    def line(self) -> str:
        """The next line of the process's output. Raises `RuntimeError` when the process has
        ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise RuntimeError("the process of an offline engine has ended")


@contextlib.contextmanager
def batches(command: list[str], environment: dict[str, str]) -> Iterator[Batches]:
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, env=os.environ | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        ) as process,
    ):  # fmt: skip
        engine = Batches(process)
        try:
            engine.line()
        except RuntimeError:
            log.seek(0)
            sys.stderr.buffer.write(log.read()[-2000:])
            raise
        engine.seconds(WARM_UP, seed=1)
        yield engine


def commands(options: Options) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each system; peers without such a class are not there."""
    own: dict[str, Any] = {"kv_cache_bytes": KV_GIB << 30, "max_model_len": 2048}
    own_command = [sys.executable, str(SCRIPT), "diptych", MODEL, json.dumps(own)]
    found: dict[str, tuple[list[str], dict[str, str]]] = {"diptych": (own_command, {})}
    if python := options.peers.get("vllm"):
        settings = {
            "dtype": peers.vllm_dtype(), "enforce_eager": True,
            "max_model_len": 2048, "max_num_seqs": 64,
        }  # fmt: skip
        model = str(peers.vllm_model())
        command = [python, str(SCRIPT), "vllm", model, json.dumps(settings)]
        found[peers.VLLM] = (command, peers.vllm_environment(python))
    return found


def run(options: Options, reporter: Reporter) -> list[Record]:
    loads = {case: LOADS[case] for case in QUICK} if options.quick else LOADS
    loads = {case: load for case, load in loads.items() if options.wants(case)}
    systems = commands(options)
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(batches(command, environment))
            for name, (command, environment) in systems.items()
        }
        with reporter.counting("measuring", len(loads) * options.times * len(engines)):
            for case, load in loads.items():
                for repetition in range(options.times):
                    for name, engine in engines.items():
                        seconds = engine.seconds(load, seed_of(case, repetition))
                        tokens = load.concurrency * load.output_tokens
                        figures = {"tokens_per_s": tokens / seconds}
                        record = Record(case, name, repetition, figures)
                        records.append(record)
                        reporter.done(record, ("tokens_per_s",))
    return records


SCENARIO = Scenario(
    "offline",
    "Offline: batches of prompts",
    "`prompts x tokens of each`, 64 output tokens, through `LLM.generate`; output tokens "
    "over the time of the whole batch.",
    (Column("tokens_per_s", "output tokens/s"),),
    run,
    versus=("tokens_per_s",),
)
