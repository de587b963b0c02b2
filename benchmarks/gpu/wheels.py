"""What a machine with torch, Triton and no network lacks: gathered here, installed there.

`python -m benchmarks.gpu.wheels` downloads wheels into build/gpu-wheels. Versions are those of
pyproject.toml. torch, Triton, NumPy and the like are that machine's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-wheels"
LACKING = (
    "msgspec", "pyzmq", "gguf", "llguidance", "multipart", "starlette", "uvicorn", "httptools",
    "pytest-asyncio",
)  # fmt: skip
THERE = (
    "torch", "triton", "numpy", "numba", "llvmlite", "safetensors", "tokenizers", "jinja2",
    "markupsafe", "pillow", "pyyaml", "tqdm", "typing-extensions", "click", "uvloop",
    "prometheus-client", "setuptools", "pytest", "pluggy", "iniconfig", "pygments", "hypothesis",
    "aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "idna", "multidict",
    "propcache", "yarl",
)  # fmt: skip
"""What a machine must have beside a driver: images for work with torch do."""
UCX = "libucx-cu13"
"""42 MB, and only the last stage uses it: in a run of its own."""
PYTHON = "3.12"
PLATFORMS = ("2_17", "2_24", "2_27", "2_28", "2_31", "2_34")
"""Versions of manylinux; pip takes each of them by its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ucx", action="store_true", help=f"{UCX} too, for the last stage")
    names = [*LACKING, UCX] if parser.parse_args().ucx else list(LACKING)
    pins = pinned((ROOT / "pyproject.toml").read_text(), names)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    platforms = [f"--platform=manylinux_{each}_x86_64" for each in PLATFORMS]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        f"--python-version={PYTHON}", "--implementation=cp", *platforms,
        "--platform=manylinux2014_x86_64", "--dest", str(FOLDER), *pins,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    size = sum(wheel.stat().st_size for wheel in FOLDER.glob("*.whl"))
    print(f"{len(pins)} wheels in {FOLDER.relative_to(ROOT)}, {size / 1e6:.1f} MB")


def pinned(project: str, names: Iterable[str]) -> list[str]:
    """`name==version` of each name. Raises `KeyError` for one that the project does not pin."""
    table = tomllib.loads(project)["project"]
    extras = table["optional-dependencies"].values()
    pins = [*table["dependencies"], *(pin for extra in extras for pin in extra)]
    found = {re.split(r"[=;\[<> ]", pin)[0]: pin for pin in pins if "==" in pin}
    return [found[name] for name in names]


def install_wheels(site: Path) -> bool:
    """Install what is in the folder, and nothing else, into another one; False if there is
    nothing."""
    wheels = sorted(map(str, FOLDER.glob("*.whl")))
    if not wheels:
        return False
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
        "--no-cache-dir", "--upgrade", "--target", str(site), *wheels,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return True


if __name__ == "__main__":
    main()
