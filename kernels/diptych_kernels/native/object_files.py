"""Where compiled kernels are kept, and how those that are missing come there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 600.0
"""Of all that one process compiles: some half a minute on the machines that we know."""


def object_files(names: Sequence[str]) -> list[bytes]:
    """Of the kernels "MODULE-NUMBER", as an earlier process left them beside the sources or in the
    user's cache directory; one process compiles the others, and they are left there.

    Raises `RuntimeError` if the compiler fails.
    """
    found = {name: _find(places) for name, places in _places(names).items()}
    missing = [name for name, compiled in found.items() if not compiled]
    if missing:
        new = _compile(missing)
        for name, places in _places(missing).items():
            _leave_anywhere(new[name], places)
        found |= new
    return [found[name] for name in names]


def _places(names: Sequence[str]) -> dict[str, list[Path]]:
    sources = Path(__file__).parent
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = sources / "__pycache__", user_cache / "diptych" / "kernels"
    fingerprint = _fingerprint(sources)
    return {name: [folder / f"{name}-{fingerprint}.o" for folder in folders] for name in names}


def _find(places: Sequence[Path]) -> bytes:
    for place in places:
        with contextlib.suppress(OSError):
            return place.read_bytes()
    return b""


def _compile(names: Sequence[str]) -> dict[str, bytes]:
    """Together: what they share, Numba above all, is loaded once."""
    log.info("compiling %s for %s", ", ".join(names), llvm.get_host_cpu_name())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "diptych_kernels.native.compile", folder, *names]
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        files = [Path(folder) / name for name in names]
        if done.returncode != 0:
            failed = next((file.name for file in files if not file.exists()), names[-1])
            raise RuntimeError(f"{failed} does not compile: {done.stderr.decode(errors='replace')}")
        return {file.name: file.read_bytes() for file in files}


def _leave_anywhere(compiled: bytes, places: Sequence[Path]) -> None:
    for place in places:
        with contextlib.suppress(OSError):
            _leave(compiled, place)
            return
    log.warning("it is compiled by every process: none of %s can be written", places)


def _leave(compiled: bytes, place: Path) -> None:
    """Write a file whole or not at all: other processes may look for it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=place.parent)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)  # an image is built by one user and used by another
        file.write(compiled)
    Path(temporary).rename(place)


def _fingerprint(sources: Path) -> str:
    """Of all that a compiled kernel depends on: the sources, the compiler, the processor."""
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    features = llvm.get_host_cpu_features().flatten()
    digest.update(f"{version('numba')} {llvm.get_host_cpu_name()} {features}".encode())
    return digest.hexdigest()[:16]
