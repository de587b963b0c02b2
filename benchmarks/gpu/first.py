"""What the machine is, whether everything is there, and what it can do at best."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.place import Place
from benchmarks.machine import machine

SCRIPT = Path(__file__).parents[2] / "tests" / "kernels" / "compile_for_gpu.py"
ALL_LAUNCHES = 32
MODULES = (
    "diptych_engine.serving.build_core", "diptych_frontend.openai.server", "diptych_kv_transfer",
    "benchmarks.gpu.kernel_stages", "benchmarks.gpu.engine_stages", "benchmarks.gpu.service_stage",
    "pytest", "pytest_asyncio",
    "libucx",
)  # fmt: skip


def imports_and_compiles(place: Place) -> None:
    """Which of the modules are missing, and a process for each kernel's launch."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"cuda": str(torch.version.cuda), "triton": metadata.version("triton")}
    if not place.dry:
        memory = torch.cuda.get_device_properties(place.device).total_memory
        found |= {"device": torch.cuda.get_device_name(), "memory": f"{memory / 1e9:.1f} GB"}
    place.tell("machine", **found, processor=machine())
    for name in MODULES:
        started = time.perf_counter()
        try:
            importlib.import_module(name)
        except ImportError as exc:
            place.tell(f"import {name}", error=str(exc))
        else:
            place.tell(f"import {name}", seconds=time.perf_counter() - started)
    started = time.perf_counter()
    num_parts, parts = place.either((ALL_LAUNCHES, range(ALL_LAUNCHES)), (ALL_LAUNCHES, [0]))
    processes = [start_compiler(part, num_parts) for part in parts]
    compiled = [line for process in processes for line in lines_of(process, place)]
    place.tell("compiles", seconds=time.perf_counter() - started, launches=len(compiled))
    for line in compiled:
        place.tell(f"compiled {line['kernel']}", shared=line["shared"], has=" ".join(line["has"]))


def start_compiler(part: int, num_parts: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, SCRIPT, str(part), str(num_parts)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def lines_of(process: subprocess.Popen[str], place: Place) -> list[dict[str, Any]]:
    out, errors = process.communicate()
    if process.returncode:
        place.tell("compile", error=errors.strip().splitlines()[-1])
    return [json.loads(line) for line in out.splitlines()]


@torch.inference_mode()
def ceilings_of_the_machine(place: Place) -> None:
    """Memory, products, a launch, and the bus both ways."""
    limits = place.limits()
    place.tell("device memory", bytes_per_s=limits["bandwidth"])
    place.tell("products in bf16", flop_per_s=limits["rate"])
    small = torch.zeros(1, device=place.device)
    count = place.either(2000, 2)
    place.wait()
    started = time.perf_counter()
    for _ in range(count):
        small.add_(1)
    launched = time.perf_counter() - started
    place.wait()
    done = time.perf_counter() - started
    place.tell("a launch", host_us=launched / count * 1e6, done_us=done / count * 1e6)
    size = place.either(256 << 20, 1 << 10)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=place.device)
    for name, target, source in (("to the host", host, there), ("to the device", there, host)):
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        place.wait()
        place.tell(f"pinned {name}", bytes_per_s=4 * size / (time.perf_counter() - started))
