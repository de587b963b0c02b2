"""Stores compiled kernels as object files, one for each target, and compiles missing ones."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from diptych_kernels.cpu_level import CpuLevel
from diptych_kernels.made_once import locked, user_folder, whole

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A target in LLVM's terms."""

    cpu: str
    features: str


WIDE: Final = "-prefer-256-bit"
"""Permits vectors of 512 bits: LLVM avoids them for x86-64-v4, whose first processors slow down for
them."""
VNNI: Final = f"{WIDE},+avx512vnni,+fast-dpwssd"
"""LLVM replaces a product of words by two slower instructions unless it is told that it is fast."""
DOTS: Final = "+avx512bf16"
OF_LEVEL: Final = {
    CpuLevel.AVX2: Target("x86-64-v3", ""),
    CpuLevel.VNNI: Target("x86-64-v4", VNNI),
    CpuLevel.AMX: Target("x86-64-v4", f"{VNNI},{DOTS},+amx-tile,+amx-bf16"),
}
LOWEST_LEVEL: Final = {"bf16_": CpuLevel.VNNI, "byte_": CpuLevel.VNNI, "amx_": CpuLevel.AMX}
"""The lowest level of kernels, by the beginnings of their names. Others exist from AVX2 on."""


def needs_bfloat16_dots(name: str) -> bool:
    """Whether a kernel multiplies pairs of bfloat16, which not all processors of level VNNI can."""
    return name.startswith("bf16_")


def lowest_level(name: str) -> CpuLevel:
    """Return the lowest level with such a kernel."""
    found = (level for beginning, level in LOWEST_LEVEL.items() if name.startswith(beginning))
    return next(found, CpuLevel.AVX2)


def target_of(name: str, level: CpuLevel) -> Target:
    """Return the target of a kernel, for use at a level that has it."""
    target = OF_LEVEL[level]
    if level is not CpuLevel.VNNI or not needs_bfloat16_dots(name):
        return target
    return Target(target.cpu, f"{target.features},{DOTS}")


COMPILE_TIMEOUT_S = 600.0
"""Time limit, in seconds, for all kernels that one process compiles, which takes about half a
minute. Nobody waits longer for another process that compiles."""
DIGEST_BYTES = hashlib.sha256().digest_size
"""The size of the digest before an object file's content."""


def object_files(names: Sequence[str], level: CpuLevel) -> list[bytes]:
    """Return the kernels "MODULE-NUMBER" for a level, as an earlier process left them beside the
    sources or in the user's cache directory. Missing ones are compiled and stored there. If several
    processes of a machine miss a kernel at once, one compiles it and the others wait.

    Raises `RuntimeError` if the compiler fails.
    """
    places = _places(names, level)
    found = {name: _find(places[name]) for name in places}
    missing = [name for name, compiled in found.items() if not compiled]
    if missing:
        with _the_only_one({name: places[name] for name in missing}):
            found |= {name: _find(places[name]) for name in missing}
            if missing := [name for name in missing if not found[name]]:
                new = _compile(missing, level)
                for name in missing:
                    _leave_anywhere(new[name], places[name])
                found |= new
    return [found[name] for name in names]


@contextlib.contextmanager
def _the_only_one(places: Mapping[str, Sequence[Path]]) -> Iterator[None]:
    """Hold the locks of these kernels, as far as locks can be had here, and before a deadline."""
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    with contextlib.ExitStack() as locks:
        # In one order, so that no two processes wait for each other.
        for name in sorted(places):
            for place in places[name]:
                with contextlib.suppress(OSError):
                    locks.enter_context(locked(place.with_name(f"{place.name}.lock"), deadline))
                    break
        yield


def _places(names: Sequence[str], level: CpuLevel) -> dict[str, list[Path]]:
    sources = Path(__file__).parent
    folders = sources / "__pycache__", user_folder("kernels")
    targets = {name: target_of(name, level) for name in names}
    digests = {target: _fingerprint(sources, target) for target in set(targets.values())}
    return {
        name: [folder / f"{name}-{level.word}-{digests[target]}.o" for folder in folders]
        for name, target in targets.items()
    }


def _find(places: Sequence[Path]) -> bytes:
    """The compiled kernel from the first place that has it undamaged; empty if none has. LLVM ends
    a process that gives it a damaged file."""
    for place in places:
        with contextlib.suppress(OSError):
            found = place.read_bytes()
            digest, compiled = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
            if hashlib.sha256(compiled).digest() == digest:
                return compiled
            log.warning("%s is damaged", place)
    return b""


def _compile(names: Sequence[str], level: CpuLevel) -> dict[str, bytes]:
    """Compile kernels, in one process for each target, because Numba knows only one target at a
    time. The log says how far it is: users wait for this at their first start."""
    log.info("compiling %d kernels for %s: %s", len(names), level.word, ", ".join(names))
    done = itertools.count(1)

    def tell(name: str) -> None:
        log.info("compiled %d of %d kernels for %s: %s", next(done), len(names), level.word, name)

    compiled: dict[str, bytes] = {}
    for target in dict.fromkeys(target_of(name, level) for name in names):
        own = [name for name in names if target_of(name, level) == target]
        compiled |= _compile_for(target, own, tell)
    return compiled


def _compile_for(
    target: Target, names: Sequence[str], tell: Callable[[str], None]
) -> dict[str, bytes]:
    """Compile all of these kernels in one process, so that what they share, Numba above all, is
    loaded once. `tell` hears the name of each when it is done."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "NUMBA_CPU_NAME": target.cpu,
        "NUMBA_CPU_FEATURES": target.features,
    }
    with tempfile.TemporaryDirectory() as folder:
        # -P: not from the folder where the user happens to be, either.
        compiler = (sys.executable, "-P", "-m", "diptych_kernels.native.compile")
        command = [*compiler, folder, *names]
        fault = _run(command, environment, tell)
        files = [Path(folder) / name for name in names]
        if fault:
            failed = next((file.name for file in files if not file.exists()), names[-1])
            raise RuntimeError(f"{failed} does not compile: {fault}")
        return {file.name: file.read_bytes() for file in files}


def _run(command: list[str], environment: Mapping[str, str], tell: Callable[[str], None]) -> str:
    """Run a compiler to its end and `tell` each line that it prints. What it said of its failure;
    empty if it did not fail."""
    with tempfile.TemporaryFile() as errors:
        compiler = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        limit = threading.Timer(COMPILE_TIMEOUT_S, compiler.kill)
        limit.start()
        try:
            with compiler:
                for line in compiler.stdout or ():
                    tell(line.strip())
        finally:
            limit.cancel()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    return said + f" (exit code {compiler.returncode})" if compiler.returncode else ""


def _leave_anywhere(compiled: bytes, places: Sequence[Path]) -> None:
    for place in places:
        with contextlib.suppress(OSError):
            _leave(compiled, place)
            return
    log.warning("it is compiled by every process: none of %s can be written", places)


def _leave(compiled: bytes, place: Path) -> None:
    with whole(place, 0o644) as file:  # an image is built by one user and used by another
        file.write(hashlib.sha256(compiled).digest() + compiled)


def _fingerprint(sources: Path, target: Target) -> str:
    """A hash of all that a compiled kernel depends on: sources, compiler, and target."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update(f"{version('numba')} {version('llvmlite')} {target}".encode())
    return digest.hexdigest()[:16]
