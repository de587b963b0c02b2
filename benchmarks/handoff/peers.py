"""Others that move blocks between two processes: UCX's own ucx_perftest, and NIXL's Python API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import libucx
from benchmarks.handoff.shapes import BLOCK_KIB, KIB

PERFTEST_PORT = 13400
PERFTEST_WAYS = {"cma": ("ucp_get", "posix,cma,self"), "tcp": ("tag_bw", "tcp,self")}
"""Test and UCX_TLS."""
TIMEOUT_S = 60.0
NIXL_SCRIPT = Path(__file__).with_name("nixl_peer.py")


def ucx_perftest() -> list[dict[str, Any]]:
    """GB/s of one buffer again and again, which stays in the caches; empty if it cannot run."""
    home = Path(libucx.__file__).parent
    libraries = [home / "lib", *home.parent.glob("libucx_cu*.libs")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # The wheel's copy may not be executable.
        program = shutil.copy(home / "bin" / "ucx_perftest", folder)
        os.chmod(program, 0o755)
        for at, kib in enumerate(BLOCK_KIB):
            row: dict[str, Any] = {"block_kib": kib}
            for offset, (way, (test, tls)) in enumerate(PERFTEST_WAYS.items()):
                environment = {"LD_LIBRARY_PATH": ":".join(map(str, libraries)), "UCX_TLS": tls}
                port = PERFTEST_PORT + 2 * at + offset
                row[way] = one_perftest(str(program), test, kib * KIB, port, environment)
            rows.append(row)
    return rows


def one_perftest(
    program: str, test: str, size: int, port: int, environment: dict[str, str]
) -> float | None:
    """GB/s, None if it did not run."""
    repetitions = max(20, (512 << 20) // size)
    arguments = ["-t", test, "-s", str(size), "-n", str(repetitions), "-w", "5", "-f"]
    server = subprocess.Popen(
        [program, "-p", str(port)], env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        time.sleep(0.5)  # it does not say when it listens
        done = subprocess.run(
            [program, "127.0.0.1", "-p", str(port), *arguments],
            env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    finally:
        server.kill()
        server.wait()
    lines = [line.split() for line in done.stdout.splitlines()]
    finals = [line for line in lines if line and line[0].isdigit()]
    # Iterations, three latencies, two bandwidths in MB/s (of 2^20), two message rates.
    return float(finals[-1][5]) * (1 << 20) / 1e9 if finals else None


def nixl(python: str) -> list[dict[str, Any]]:
    """GB/s of NIXL's reads, by an interpreter that has it; empty if it has not."""
    try:
        done = subprocess.run(
            [python, str(NIXL_SCRIPT)], capture_output=True, text=True, timeout=4 * TIMEOUT_S,
            check=False, env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"block_kib"')]
    return [json.loads(line) for line in lines]
