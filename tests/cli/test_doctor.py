"""`diptych doctor`: each check judges facts that the test gives, and one run is of this machine."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import each
from click.testing import CliRunner

from diptych.doctor import command, gather
from diptych.doctor.checks import CHECKS, GIB, State, examine, verdict
from diptych.doctor.facts import Cpu, Disk, Facts, Gpu, Memory, Package, Ports, Ucx, Vllm
from diptych.doctor.gather import may_read_neighbours, memory_limit, packages_of, transports_in
from diptych.main import main
from diptych_frontend.installation import Installation

TORCH = Package("torch", "==2.13.0", "2.13.0+cpu", True)
GPU = "NVIDIA H100, 580.1, 80 GiB"
GOOD = Facts(
    system="Linux",
    machine="x86_64",
    libc="glibc 2.36",
    python="3.11.7",
    packages={"engine": (TORCH,)},
    cpu=Cpu("vnni", "vnni", usable=2.0),
    memory=Memory(8 * GIB, 6 * GIB),
    ucx=Ucx("1.21.0", ("tcp", "posix", "cma")),
    ports=Ports(8080, True),
    gpu=Gpu(signs=False),
    vllm=Vllm(),
    disk=Disk("/models", 100 * GIB),
    installation=Installation("/venv/bin/python"),
)
ON_GPU = Gpu(True, (GPU,), torch_sees=True, triton="3.7.1", compiler="/usr/bin/cc")


def test_a_good_machine_is_well_in_every_respect() -> None:
    checks = examine(GOOD)
    assert {check.state for check in checks} == {State.OK}
    assert [check.remedy for check in checks] == [""] * len(CHECKS)
    assert verdict(checks) == "`diptych up` will work here"


def test_of_a_gpu_that_works_it_names_the_page_of_what_was_tried() -> None:
    [gpu] = [x for x in examine(dataclasses.replace(GOOD, gpu=ON_GPU)) if x.name == "gpu"]
    assert gpu.state is State.OK
    [page] = [Path(word) for word in gpu.found.split() if word.endswith("docs/gpu.md")]
    assert page.is_file()


@each(
    ("name", "other", "state", "said"),
    [
        ("system", {"system": "Darwin"}, State.FAIL, "Darwin on x86_64"),
        ("system", {"libc": ""}, State.FAIL, "no glibc"),
        (
            "packages",
            {"packages": {"engine": (dataclasses.replace(TORCH, found="", fits=False),)}},
            State.FAIL,
            "not installed: torch",
        ),
        (
            "packages",
            {"packages": {"engine": (dataclasses.replace(TORCH, found="2.9", fits=False),)}},
            State.WARN,
            "torch 2.9 (wants ==2.13.0)",
        ),
        ("cpu", {"cpu": Cpu("", "avx2", "no such level", 2.0)}, State.FAIL, "no such level"),
        ("cpu", {"cpu": Cpu("none", "none", usable=2.0)}, State.WARN, "torch computes everything"),
        ("cpu", {"cpu": Cpu("avx2", "amx", usable=2.0)}, State.WARN, "kernels use avx2"),
        ("cores", {"cpu": Cpu("amx", "amx", usable=1.5)}, State.WARN, "1.5 may be used"),
        ("memory", {"memory": Memory(8 * GIB, 3 * GIB)}, State.WARN, "3.0 GiB of 8.0 GiB"),
        ("memory", {"memory": Memory(GIB, GIB // 2)}, State.FAIL, "0.5 GiB of 1.0 GiB"),
        ("ucx", {"ucx": Ucx("", problem="no libucp.so.0")}, State.FAIL, "no libucp.so.0"),
        ("ucx", {"ucx": Ucx("1.21.0")}, State.WARN, "does not say what it finds"),
        ("ucx", {"ucx": Ucx("1.21.0", ("tcp",))}, State.WARN, "KV goes over tcp"),
        (
            "ucx",
            {"ucx": Ucx("1.21.0", ("tcp", "cma"), reads_neighbours=False)},
            State.WARN,
            "KV goes over tcp",
        ),
        ("ports", {"ports": Ports(8080, False)}, State.WARN, "taken by another program"),
        ("ports", {"ports": Ports(8080, False, "a")}, State.WARN, "taken by the service a"),
        ("ports", {"ports": Ports(8080, True, problem="denied")}, State.FAIL, "denied"),
        ("gpu", {"gpu": Gpu(True)}, State.WARN, "nvidia-smi lists none"),
        ("gpu", {"gpu": dataclasses.replace(ON_GPU, triton="")}, State.WARN, "need triton"),
        ("gpu", {"gpu": dataclasses.replace(ON_GPU, compiler="")}, State.WARN, "a C compiler"),
        (
            "gpu",
            {"gpu": dataclasses.replace(ON_GPU, torch_sees=False, torch_problem="for CPUs")},
            State.WARN,
            "torch does not use it: for CPUs",
        ),
        ("vllm", {"vllm": Vllm(problem="vLLM 0.1 was not tested")}, State.WARN, "0.1"),
        ("disk", {"disk": Disk("/m", GIB // 10)}, State.FAIL, "0.1 GiB free"),
        ("disk", {"disk": Disk("/m", 2 * GIB)}, State.WARN, "2.0 GiB free"),
        ("disk", {"disk": Disk("/m", 9 * GIB, "read-only")}, State.WARN, "read-only"),
        ("state", {"run_directory_problem": "/tmp is full"}, State.FAIL, "/tmp is full"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    name: str, other: dict[str, Any], state: State, said: str
) -> None:
    checks = examine(dataclasses.replace(GOOD, **other))
    [found] = [check for check in checks if check.state is not State.OK]
    assert (found.name, found.state) == (name, state)
    assert said in found.found
    assert found.remedy
    assert name in verdict(checks)


def test_a_broken_ucx_is_replaced_by_the_version_that_was_tested() -> None:
    packages = {"engine": (Package("libucx-cu13", "==1.21.0", "1.21.0", True),)}
    broken = dataclasses.replace(GOOD, packages=packages, ucx=Ucx("", problem="no libucp.so.0"))
    [found] = [check for check in examine(broken) if check.name == "ucx"]
    assert found.remedy.endswith(" --no-deps --force-reinstall libucx-cu13==1.21.0")


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("gpu", {"gpu": ON_GPU}, GPU),
        ("vllm", {"vllm": Vllm("/v/bin/vllm", "0.32.1")}, "0.32.1 at /v/bin/vllm"),
    ],
)
def test_what_is_there_and_works_is_named(name: str, other: dict[str, Any], said: str) -> None:
    checks = examine(dataclasses.replace(GOOD, **other))
    [found] = [check for check in checks if check.name == name]
    assert (found.state, said in found.found) == (State.OK, True)


@pytest.mark.parametrize(
    ("own", "files", "limit", "left"),
    [
        pytest.param("0::/\n", {}, math.inf, math.inf, id="no limit"),
        pytest.param(
            "0::/pod\n",
            {"pod/memory.max": "max\n", "memory.max": "1000\n", "memory.current": "400\n"},
            1000,
            600,
            id="version 2, the limit of the group above",
        ),
        pytest.param(
            "0::/\n",
            {
                "memory.max": "1000\n",
                "memory.current": "900\n",
                "memory.stat": "anon 1\ninactive_file 300\n",
            },
            1000,
            400,
            id="version 2, pages of files can be had",
        ),
        pytest.param(
            "4:memory:/m\n",
            {
                "memory/m/memory.limit_in_bytes": "5000\n",
                "memory/m/memory.usage_in_bytes": "1000\n",
            },
            5000,
            4000,
            id="version 1",
        ),
    ],
)
def test_the_memory_that_control_groups_leave(
    own: str, files: dict[str, str], limit: float, left: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(own, tmp_path) == (limit, left)


@pytest.mark.parametrize(
    ("scope", "capabilities", "may"),
    [
        ("", 0, True), ("0", 0, True), ("1", 0, False), ("1", 1 << 19, True),
        ("2", 1 << 19, True), ("3", 1 << 19, False),
    ],
)  # fmt: skip
def test_yama_decides_who_reads_the_memory_of_a_neighbour(
    scope: str, capabilities: int, may: bool
) -> None:
    assert may_read_neighbours(scope, capabilities) is may


def test_transports_are_those_that_ucx_info_lists() -> None:
    listed = "#      Transport: self\n#         Device: lo\n#      Transport: tcp\n"
    assert transports_in(listed) == ("self", "tcp")


def test_the_remedy_installs_what_is_missing_and_no_more() -> None:
    gone = dataclasses.replace(TORCH, found="", fits=False)
    ours = Package("numba", "==0.68.1", "0.68.1", True)
    facts = dataclasses.replace(GOOD, packages={"engine": (gone, ours)})
    (check,) = [check for check in examine(facts) if check.name == "packages"]
    assert check.remedy == "/venv/bin/python -m pip install torch==2.13.0"


def test_a_requirement_is_compared_with_what_is_installed() -> None:
    fits, older, gone = packages_of(["msgspec>=0.1", "msgspec==0.0.1", "no-such-package==1"])
    assert (fits.fits, older.fits, gone.fits) == (True, False, False)
    assert (older.wanted, gone.found) == ("==0.0.1", "")


def test_this_machine_runs_the_tests_and_so_can_run_a_service() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    checks = {check["name"]: check for check in msgspec.json.decode(result.stdout)}
    assert len(checks) == len(CHECKS)
    for name in ("system", "packages", "cpu", "state"):
        assert checks[name]["state"] != "fail", checks[name]
    assert "tcp" in checks["ucx"]["found"]
    failed = any(check["state"] == "fail" for check in checks.values())
    assert result.exit_code == (1 if failed else 0)


@pytest.mark.parametrize(("usable", "code"), [(True, 0), (False, 1)])
def test_the_table_ends_with_what_will_work(
    usable: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = GOOD if usable else dataclasses.replace(GOOD, system="Darwin")
    monkeypatch.setattr(gather, "gather", lambda *_: facts)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == code
    last = result.stdout.splitlines()[-1]
    assert last.startswith("`diptych up` will " + ("work" if usable else "not work"))
    assert command.table(examine(facts))
