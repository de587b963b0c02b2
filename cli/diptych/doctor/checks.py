"""The checks of `diptych doctor`: each is a function from facts to one result, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from diptych.defaults import own_file
from diptych.doctor.facts import Facts, Package

GIB: Final = 1 << 30
ENOUGH_MEMORY: Final = 4 * GIB
"""Two engines with the default KV cache of 1 GiB each, and a small model's weights."""
LEAST_MEMORY: Final = 1 * GIB
"""Two engines of the smallest model, with almost no KV cache."""
ENOUGH_DISK: Final = 4 * GIB
"""A model of two billion parameters in 16 bits."""
LEAST_DISK: Final = GIB // 4
"""The example's model."""
INSTALL_PAGE: Final = own_file("docs/install.md")


class State(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Diptych works, but a part of it is slower or missing."""
    FAIL = "fail"
    """`diptych up` cannot work."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: State
    found: str
    """What was found, and what it means."""
    remedy: str = ""
    """What to do; empty if nothing has to be done."""


def check_system(facts: Facts) -> Check:
    found = f"{facts.system} on {facts.machine}, {facts.libc or 'no glibc'}"
    if facts.system == "Linux" and facts.machine in ("x86_64", "aarch64") and facts.libc:
        return Check("system", State.OK, found)
    remedy = f"use Linux with glibc on x86_64 or aarch64; {INSTALL_PAGE} says how on macOS, Windows"
    return Check("system", State.FAIL, found, remedy)


def check_packages(facts: Facts) -> Check:
    """Check the packages that `diptych up` needs. pip has checked Python's version."""
    needed = {package.name: package for own in facts.packages.values() for package in own}
    missing = [package.name for package in needed.values() if not package.found]
    others = [package for package in needed.values() if package.found and not package.fits]
    shown = [needed[name] for name in ("torch", "numba", "libucx-cu13") if name in needed]
    versions = ", ".join(f"{each.name} {each.found}" for each in shown if each.found)
    if missing:
        found = f"not installed: {', '.join(sorted(missing))}"
        return Check("packages", State.FAIL, found, _install(facts, missing))
    if others:
        found = f"not the versions that were tested: {', '.join(map(_differs, others))}"
        names = [package.name for package in others]
        return Check("packages", State.WARN, found, _install(facts, names))
    found = f"Python {facts.python}, {versions}; all {len(needed)} have the tested versions"
    return Check("packages", State.OK, found)


def _install(facts: Facts, names: Sequence[str]) -> str:
    return facts.installation.add(*_as_wanted(facts, names))


def _again(facts: Facts, name: str) -> str:
    """For a package that is there, and broken."""
    return facts.installation.add("--force-reinstall", *_as_wanted(facts, [name]), alone=True)


def _as_wanted(facts: Facts, names: Sequence[str]) -> list[str]:
    wanted = {package.name: package.wanted for own in facts.packages.values() for package in own}
    return [name + wanted.get(name, "") for name in names]


def _differs(package: Package) -> str:
    return f"{package.name} {package.found} (wants {package.wanted})"


def check_cpu(facts: Facts) -> Check:
    """Check the processor. Compiled kernels need no C compiler: LLVM comes with numba."""
    cpu = facts.cpu
    if cpu.problem:
        return Check("cpu", State.FAIL, cpu.problem, "unset DIPTYCH_CPU_LEVEL, or set it to auto")
    if cpu.level == "none":
        found = "no level of compiled kernels: torch computes everything, in float32"
        remedy = f"none for ARM; an x86-64 needs AVX2 ({own_file('docs/kernels.md')})"
        if cpu.highest != "none":
            remedy = f"unset DIPTYCH_CPU_LEVEL: this machine has {cpu.highest}"
        return Check("cpu", State.WARN, found, remedy)
    if cpu.level != cpu.highest:
        found = f"kernels use {cpu.level}, and this machine has {cpu.highest}"
        return Check("cpu", State.WARN, found, "unset DIPTYCH_CPU_LEVEL")
    return Check("cpu", State.OK, f"kernels use {cpu.level}, the highest level of this machine")


def check_cores(facts: Facts) -> Check:
    found = f"{facts.cpu.usable:g} may be used"
    if facts.cpu.usable >= 2:
        return Check("cores", State.OK, found)
    remedy = "use a machine, or a container's CPU limit, of 2 or more: two engines share these"
    return Check("cores", State.WARN, found, remedy)


def check_memory(facts: Facts) -> Check:
    memory = facts.memory
    found = f"{_gib(memory.available)} of {_gib(memory.total)} available"
    if memory.available < LEAST_MEMORY:
        remedy = f"free memory, or raise the container's limit: engines need {_gib(LEAST_MEMORY)}"
        return Check("memory", State.FAIL, found, remedy)
    if memory.available < ENOUGH_MEMORY:
        remedy = "use a small model, or set spec.engine.kvCacheMemory: each engine keeps 1 GiB KV"
        return Check("memory", State.WARN, found, remedy)
    return Check("memory", State.OK, found)


def check_ucx(facts: Facts) -> Check:
    """Check UCX. On a laptop, engines connect over TCP, and may then read each other's memory."""
    ucx = facts.ucx
    if ucx.problem:
        unset = f"unset {' '.join(ucx.limits)}" if ucx.limits else ""
        return Check("ucx", State.FAIL, ucx.problem, unset or _again(facts, "libucx-cu13"))
    if not ucx.transports:
        found = f"libucp {ucx.version} starts; its program ucx_info does not say what it finds"
        return Check("ucx", State.WARN, found, _again(facts, "libucx-cu13"))
    found = f"libucp {ucx.version} with {', '.join(ucx.transports)}"
    if "cma" not in ucx.transports or not ucx.reads_neighbours:
        found += "; KV goes over tcp, because engines may not read each other's memory"
        remedy = "sysctl kernel.yama.ptrace_scope=0; in a container, allow SYS_PTRACE"
        return Check("ucx", State.WARN, found, remedy)
    return Check("ucx", State.OK, found)


def check_ports(facts: Facts) -> Check:
    ports = facts.ports
    if ports.problem:
        remedy = "allow programs to listen on 127.0.0.1: each pod has some ports there"
        return Check("ports", State.FAIL, ports.problem, remedy)
    if ports.api_is_free:
        return Check("ports", State.OK, f"{ports.api} is free, and so are others on 127.0.0.1")
    who = f"the service {ports.taken_by}" if ports.taken_by else "another program"
    found, remedy = f"{ports.api} is taken by {who}", "diptych up --port ANOTHER"
    return Check("ports", State.WARN, found, remedy)


def check_gpu(facts: Facts) -> Check:
    gpu = facts.gpu
    if not gpu.signs:
        return Check("gpu", State.OK, "no NVIDIA GPU: engines compute on the processor")
    found = "; ".join(gpu.devices) or "signs of a GPU, but nvidia-smi lists none"
    if not gpu.devices:
        return Check("gpu", State.WARN, found, "install NVIDIA's driver, or give the container it")
    if not gpu.torch_sees:
        found += f"; torch does not use it: {gpu.torch_problem}"
        remedy = f"install torch with CUDA: {INSTALL_PAGE}, On one machine"
        return Check("gpu", State.WARN, found, remedy)
    if not gpu.triton or not gpu.compiler:
        missing = "a C compiler" if gpu.triton else "triton"
        remedy = "install gcc" if gpu.triton else facts.installation.add_extras("gpu")
        return Check("gpu", State.WARN, f"{found}; Diptych's kernels need {missing}", remedy)
    found += f"; triton {gpu.triton}. {own_file('docs/gpu.md')} says what was tried"
    return Check("gpu", State.OK, found)


def check_vllm(facts: Facts) -> Check:
    vllm = facts.vllm
    if vllm.problem:
        page = own_file("docs/vllm.md")
        remedy = f"{page} says which versions were tested, and DIPTYCH_VLLM which one is used"
        return Check("vllm", State.WARN, vllm.problem, remedy)
    if not vllm.program:
        return Check("vllm", State.OK, "not installed; only services with runtime: vllm need it")
    return Check("vllm", State.OK, f"{vllm.version} at {vllm.program}")


def check_disk(facts: Facts) -> Check:
    disk = facts.disk
    found = f"{_gib(disk.free_bytes)} free for models in {disk.folder}"
    if disk.problem:
        return Check("disk", State.WARN, disk.problem, f"make {disk.folder} writable")
    if disk.free_bytes < LEAST_DISK:
        return Check("disk", State.FAIL, found, "free some space: a model needs 0.1 GiB or more")
    if disk.free_bytes < ENOUGH_DISK:
        return Check("disk", State.WARN, found, "free some space, or serve small models")
    return Check("disk", State.OK, found)


def check_run_directory(facts: Facts) -> Check:
    if facts.run_directory_problem:
        remedy = "set XDG_RUNTIME_DIR or TMPDIR to a folder that you may write to"
        return Check("state", State.FAIL, facts.run_directory_problem, remedy)
    return Check("state", State.OK, "`diptych up` can keep its keys and logs")


CHECKS: Final[tuple[Callable[[Facts], Check], ...]] = (
    check_system,
    check_packages,
    check_cpu,
    check_cores,
    check_memory,
    check_ucx,
    check_ports,
    check_gpu,
    check_vllm,
    check_disk,
    check_run_directory,
)


def examine(facts: Facts) -> list[Check]:
    return [check(facts) for check in CHECKS]


def verdict(checks: Sequence[Check]) -> str:
    """Say in a sentence what will work."""
    failed = [check.name for check in checks if check.state is State.FAIL]
    if failed:
        return f"`diptych up` will not work here, because of: {', '.join(failed)}"
    warned = [check.name for check in checks if check.state is State.WARN]
    return "`diptych up` will work here" + (f", but see: {', '.join(warned)}" if warned else "")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
