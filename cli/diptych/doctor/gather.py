"""Gathers the facts for `diptych doctor`. It changes nothing and leaves no process running."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil
from packaging.requirements import Requirement

from diptych.doctor.facts import Cpu, Disk, Facts, Gpu, Memory, Package, Ports, Ucx, Vllm
from diptych.errors import BadInputError
from diptych.laptop import rundir
from diptych.laptop.ports import free_ports, is_free
from diptych.laptop.programs import vllm_program
from diptych_frontend.installation import this_installation
from diptych_frontend.processors import (
    CONTROL_GROUPS,
    OWN_GROUPS,
    own_groups,
    text_if_there,
    usable_processors,
)
from diptych_protocol import InvalidRequestError

EXTRAS: Final = ("cli", "engine", "router")
PROGRAM_TIMEOUT_S: Final = 20.0
GPU_SIGNS: Final = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia"))
UCX_PACKAGE: Final = "libucx-cu13"
CAP_SYS_PTRACE: Final = 19
MEMORY_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
MEMORY_USES: Final = ("memory.current", "memory.usage_in_bytes")
CACHE_FIELD: Final = "inactive_file"
"""A line of memory.stat: file pages, which the kernel frees when memory is needed."""


def gather(api_port: int, models: Path) -> Facts:
    """Gather all facts. `models`: the folder of fetched models, which need not exist."""
    installation = this_installation()
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        libc=" ".join(filter(None, platform.libc_ver())),
        python=platform.python_version(),
        packages={extra: tuple(packages_of(installation.extras[extra])) for extra in EXTRAS},
        cpu=_cpu(),
        memory=memory(),
        ucx=_ucx(),
        ports=_ports(api_port),
        gpu=_gpu(),
        vllm=_vllm(),
        disk=_disk(models),
        installation=installation,
        run_directory_problem=_unwritable(rundir.base_directory()),
    )


def packages_of(requirements: Iterable[str]) -> Iterator[Package]:
    """Return what is here of these requirements."""
    for wanted in map(Requirement, requirements):
        found = _version(wanted.name)
        fits = bool(found) and wanted.specifier.contains(found, prereleases=True)
        yield Package(wanted.name, str(wanted.specifier), found, fits)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> Cpu:
    usable = usable_processors()
    try:
        from diptych_kernels.cpu_level import CpuLevelError, machine_level, use_level
    except ImportError as exc:
        return Cpu("", "", f"the kernels cannot be loaded: {exc}", usable)
    highest = machine_level().word
    try:
        return Cpu(use_level().word, highest, usable=usable)
    except CpuLevelError as exc:
        return Cpu("", highest, str(exc), usable)


def memory() -> Memory:
    """Return what this process may use, by its control groups."""
    found = psutil.virtual_memory()
    try:
        own = OWN_GROUPS.read_text()
    except OSError:
        return Memory(found.total, found.available)
    limit, left = memory_limit(own, CONTROL_GROUPS)
    return Memory(int(min(found.total, limit)), int(min(found.available, left)))


def memory_limit(own: str, root: Path) -> tuple[float, float]:
    """Return the bytes that control groups allow, and those left; infinity without a limit."""
    limit = left = math.inf
    for folder in own_groups(own, root, "memory"):
        allowed, used = _first_number(folder, MEMORY_LIMITS), _first_number(folder, MEMORY_USES)
        if allowed is not None:
            limit = min(limit, allowed)
            left = min(left, max(0, allowed - (used or 0) + _cached(folder)))
    return limit, left


def _first_number(folder: Path, names: tuple[str, ...]) -> int | None:
    texts = (text_if_there(folder / name) for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _cached(folder: Path) -> int:
    pairs = (line.split() for line in text_if_there(folder / "memory.stat").splitlines())
    return next((int(pair[1]) for pair in pairs if pair[0] == CACHE_FIELD), 0)


def _ucx() -> Ucx:
    version = _version(UCX_PACKAGE)
    try:
        from diptych_kv_transfer.signing.references import PUBLIC_KEY
        from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport
        from diptych_kv_transfer.transports.ucx.worker import LIMITS
    except (ImportError, OSError, AttributeError) as exc:
        return Ucx(version, problem=f"libucp cannot be loaded: {exc}")
    limits = tuple(name for name in LIMITS if name in os.environ)
    try:
        transport = UcxTransport("127.0.0.1", 0, PUBLIC_KEY)
    except OSError as exc:
        return Ucx(version, problem=str(exc), limits=limits)
    transport.close()
    if transport.unreachable:
        problem = f"engines could not connect to each other: {transport.unreachable}"
        return Ucx(version, problem=problem, limits=limits)
    return Ucx(version, _transports(), reads_neighbours=_reads_neighbours())


def _transports() -> tuple[str, ...]:
    """What `ucx_info` lists, which comes with libucp."""
    import libucx

    folder = Path(libucx.__file__).parent
    libraries = {"LD_LIBRARY_PATH": str(folder / "lib")}  # the program does not know where it is
    return transports_in(_output([str(folder / "bin" / "ucx_info"), "-d"], libraries))


def transports_in(listed: str) -> tuple[str, ...]:
    """Return the names in the output of `ucx_info -d`, each once."""
    pairs = (line.lstrip("# ").partition(":") for line in listed.splitlines())
    names = (value.strip() for field, _, value in pairs if field.strip() == "Transport")
    return tuple(dict.fromkeys(names))


def _reads_neighbours() -> bool:
    status = text_if_there(Path("/proc/self/status")).splitlines()
    fields = (line.partition(":") for line in status)
    effective = next((int(value, 16) for name, _, value in fields if name == "CapEff"), 0)
    return may_read_neighbours(text_if_there(Path("/proc/sys/kernel/yama/ptrace_scope")), effective)


def may_read_neighbours(scope: str, capabilities: int) -> bool:
    """Whether Yama lets a process read another one of its user that it did not start.

    scope: `kernel.yama.ptrace_scope`, empty without Yama. capabilities: the effective ones.
    """
    if scope in ("", "0"):
        return True
    return scope in ("1", "2") and bool(capabilities >> CAP_SYS_PTRACE & 1)


def _ports(api: int) -> Ports:
    try:
        free_ports([2])
    except OSError as exc:
        return Ports(api, False, problem=f"no port of 127.0.0.1 can be had: {exc}")
    holders = (state.service for state in rundir.running() if f":{api}/" in state.url)
    return Ports(api, is_free(api), next(holders, ""))


def _gpu() -> Gpu:
    program = shutil.which("nvidia-smi")
    if program is None and not any(sign.exists() for sign in GPU_SIGNS):
        return Gpu(signs=False)
    fields = "--query-gpu=name,driver_version,memory.total"
    listed = _output([program, fields, "--format=csv,noheader"]) if program else ""
    devices = tuple(line.strip() for line in listed.splitlines() if line.strip())
    sees, problem = _torch_on_gpu()
    compiler = os.environ.get("CC") or "cc"
    found = shutil.which(compiler) or shutil.which("gcc") or shutil.which("clang") or ""
    return Gpu(True, devices, sees, problem, _version("triton"), found)


def _torch_on_gpu() -> tuple[bool, str]:
    try:
        import torch
    except (ImportError, OSError) as exc:
        return False, str(exc)
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} is a build for CPUs"
    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no device"
    return True, ""


def _vllm() -> Vllm:
    from diptych_vllm.versions import series_of

    try:
        program = vllm_program()
    except BadInputError as exc:
        return Vllm(problem=str(exc))
    if program is None:
        return Vllm()
    code = "from importlib.metadata import version; print(version('vllm'))"
    version = _output([str(Path(program).parent / "python"), "-c", code]).strip()
    if not version:
        return Vllm(program, problem=f"the Python beside {program} knows no vLLM")
    try:
        series_of(version)
    except InvalidRequestError as exc:
        return Vllm(program, version, str(exc))
    return Vllm(program, version)


def _disk(models: Path) -> Disk:
    folder = models.expanduser()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return Disk(str(folder), shutil.disk_usage(there).free, _unwritable(there))


def _unwritable(folder: Path) -> str:
    """Why no file can be made in a folder; empty if one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as exc:
        return f"{folder} cannot be written to: {exc.strerror or exc}"


def _output(command: list[str], variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a program prints; empty if it cannot be run, fails, or does not end in time."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
