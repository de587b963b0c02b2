"""Triton's interpreter takes much that its compiler does not; the compiler needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from waits import PATIENCE_S

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on a Hopper multiprocessor."""


def test_every_kernel_compiles_for_hopper_and_uses_its_units() -> None:
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert all(kernel["shared"] <= SHARED_MEMORY for kernel in compiled)
    products = [kernel["has"] for kernel in compiled if kernel["kernel"] == "product_kernel"]
    assert len(products) == 4
    assert all("cp.async" in has for has in products)
    assert {"wgmma", "mma.sync"} & set(products[-1]), "of several rows"
    attention = [kernel["has"] for kernel in compiled if kernel["kernel"] == "attention_kernel"]
    assert len(attention) == 6
    decodes, prefills = attention[0:4:2], attention[1:4:2]
    assert all({"mma.sync", "cp.async"} <= set(has) for has in decodes)
    assert all({"wgmma", "cp.async"} <= set(has) for has in prefills)
