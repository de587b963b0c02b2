"""The facts about this machine that `diptych doctor` judges, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diptych_frontend.installation import Installation


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement of Diptych, and the installed version."""

    name: str
    wanted: str
    """The versions that Diptych asks for, such as `==2.13.0`."""
    found: str
    """Empty if it is not installed."""
    fits: bool


@dataclass(frozen=True, slots=True)
class Cpu:
    level: str
    """The level of the kernels that engines will use; empty if there is a problem."""
    highest: str
    """The highest level of the machine."""
    problem: str = ""
    usable: float = 1.0
    """Processors that this process may use; a quota can make it a fraction."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes."""

    total: int
    """The machine's memory, or the control group's limit if that is lower."""
    available: int


@dataclass(frozen=True, slots=True)
class Ucx:
    version: str
    transports: tuple[str, ...] = ()
    """All transports that UCX finds on this machine."""
    problem: str = ""
    limits: tuple[str, ...] = ()
    """Names of the variables that may be why."""
    reads_neighbours: bool = True
    """Whether the kernel lets an engine read the memory of another one of the same user."""


@dataclass(frozen=True, slots=True)
class Ports:
    api: int
    """The default port of `diptych up`."""
    api_is_free: bool
    taken_by: str = ""
    """The service on this machine that uses it; empty: another program."""
    problem: str = ""
    """Why no other loopback port is available; empty if one is."""


@dataclass(frozen=True, slots=True)
class Gpu:
    signs: bool
    """Whether there is an NVIDIA device or driver."""
    devices: tuple[str, ...] = ()
    """Name, driver and memory of each, as nvidia-smi reports them."""
    torch_sees: bool = False
    torch_problem: str = ""
    triton: str = ""
    """Its version; empty if it is not installed."""
    compiler: str = ""
    """The C compiler that Triton would call; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Vllm:
    program: str = ""
    version: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk on which fetched models are stored."""

    folder: str
    free_bytes: int
    problem: str = ""
    """Why nothing can be written there."""


@dataclass(frozen=True, slots=True)
class Facts:
    system: str
    """As `platform.system()` returns it."""
    machine: str
    libc: str
    python: str
    packages: Mapping[str, tuple[Package, ...]]
    """By the extra that needs them: cli, engine, router."""
    cpu: Cpu
    memory: Memory
    ucx: Ucx
    ports: Ports
    gpu: Gpu
    vllm: Vllm
    disk: Disk
    installation: Installation
    run_directory_problem: str = ""
    """Why `diptych up` could not write its state."""
