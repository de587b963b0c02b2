"""The environment that has vLLM's CPU build, and what makes its servers cheap to start and run
beside others.

`make vllm` makes it, with all that our connector needs beside vLLM. `DIPTYCH_VLLM` names another.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VENV = Path(os.environ.get("DIPTYCH_VLLM") or ROOT / ".vllm").absolute()
START_S = 900.0
"""A busy machine may need minutes to import vLLM."""
needs_vllm = (
    pytest.mark.vllm,
    pytest.mark.skipif(
        not (VENV / "bin" / "vllm").exists(),
        reason="vLLM is not installed: `make vllm` installs it, or DIPTYCH_VLLM names the virtual "
        "environment that has it",
    ),
)
"""Marks of a test that starts vLLM: `make test-vllm` runs it, and nothing where vLLM is not."""
needs_nixl = (
    *needs_vllm,
    pytest.mark.skipif(
        not any(VENV.glob("lib/python*/site-packages/nixl")),
        reason="NIXL is not installed beside vLLM: `make vllm` installs both, or DIPTYCH_VLLM "
        "names the virtual environment that has them",
    ),
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM binds the threads of every server to the same cores, where they wait for each other
    # without letting go: a step of a tiny model then takes a minute.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
FOLDERS = ("protocol", "frontend", "kv_transfer", "vllm_connector")
"""What of ours vLLM imports."""
PYTHONPATH = ":".join(str(ROOT / folder) for folder in FOLDERS)
WIRE = ("--middleware", "diptych_vllm.serve.middleware.Wire")
"""vLLM's options for speaking to routers."""
SERVE = (str(VENV / "bin" / "vllm"), "serve")
OPTIONS = ("--host", "127.0.0.1", "--dtype", "float32", "--max-num-seqs", "16", "--enforce-eager")
"""For a model that takes no time."""
