"""What `diptych doctor` judges: facts of this machine, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement of Diptych, and what is installed."""

    name: str
    wanted: str
    """The versions that Diptych asks for, such as `==2.13.0`."""
    found: str
    """Empty: it is not installed."""
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
    """In bytes."""

    total: int
    """What the machine has, or the control group where that has less."""
    available: int


@dataclass(frozen=True, slots=True)
class Ucx:
    version: str
    transports: tuple[str, ...] = ()
    """All that UCX finds on this machine."""
    problem: str = ""
    reads_neighbours: bool = True
    """Whether the kernel lets an engine read the memory of another one of the same user."""


@dataclass(frozen=True, slots=True)
class Ports:
    api: int
    """The port that `diptych up` takes unless told otherwise."""
    api_is_free: bool
    taken_by: str = ""
    """The service of this machine that has it; empty: another program."""
    problem: str = ""
    """Why no other port of loopback could be had; empty if some can."""


@dataclass(frozen=True, slots=True)
class Gpu:
    signs: bool
    """Whether there is a device or a driver of NVIDIA."""
    devices: tuple[str, ...] = ()
    """Name, driver and memory of each, as nvidia-smi has them."""
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
    """Where fetched models are kept."""

    folder: str
    free_bytes: int
    problem: str = ""
    """Why nothing can be written there."""


@dataclass(frozen=True, slots=True)
class Facts:
    system: str
    """As `platform.system()` has it."""
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
    run_directory_problem: str = ""
    """Why `diptych up` could not write its state."""
