"""Compiled kernels: where they are kept, what keeps an old one from being used, how they wait."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from waits import PATIENCE_S

from diptych_kernels.call_table import rows_of, run_all
from diptych_kernels.cpu_level import CpuLevel, forced, machine_level
from diptych_kernels.native import object_files
from diptych_kernels.native.arguments import (
    ChunkAttention,
    DecodeAttention,
    RopeKvWrite,
    places_of,
)
from diptych_kernels.native.kernel import Kernel, load
from diptych_kernels.native.object_files import OF_LEVEL, target_of
from diptych_kernels.rms_norm import cpu as rms_norm

LEVEL = machine_level()
TARGET = OF_LEVEL[CpuLevel.AVX2]
pytestmark = pytest.mark.skipif(LEVEL is CpuLevel.NONE, reason="nothing is compiled here")
LOAD = """
import logging
import sys
from pathlib import Path
from diptych_kernels.cpu_level import machine_level
from diptych_kernels.native import object_files
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
folder, *names = sys.argv[1:]
object_files._places = lambda names, level: {name: [Path(folder) / name] for name in names}
print(*map(len, object_files.object_files(names, machine_level())))
"""


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What each compiler that is started compiles. Nothing has been compiled before."""
    started: list[list[str]] = []
    compile_now = object_files._compile

    def compile_and_note(names: list[str], level: CpuLevel) -> dict[str, bytes]:
        started.append(names)
        return compile_now(names, level)

    def places(names: list[str], level: CpuLevel) -> dict[str, list[Path]]:
        return {name: [tmp_path / name] for name in names}

    monkeypatch.setattr(object_files, "_compile", compile_and_note)
    monkeypatch.setattr(object_files, "_places", places)
    return started


def test_what_is_missing_is_compiled_together_and_once(compilers: list[list[str]]) -> None:
    numbers = 3, 4, 5
    load([Kernel("run_calls", 3, LEVEL)])
    kernels = [Kernel("run_calls", number, LEVEL) for number in numbers]
    load(kernels)
    assert compilers == [["run_calls-3"], ["run_calls-4", "run_calls-5"]]
    before = [kernel.address for kernel in kernels]
    load(kernels)  # where the code is may stand in tables by now
    assert [kernel.address for kernel in kernels] == before
    assert all(Kernel("run_calls", number, LEVEL).address for number in numbers)
    assert len(compilers) == 2


def test_of_processes_that_start_at_once_one_compiles(tmp_path: Path) -> None:
    names = ["run_calls-3", "run_calls-4"]
    command = [sys.executable, "-c", LOAD, str(tmp_path), *names]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [start.communicate(timeout=PATIENCE_S)[0].splitlines() for start in starts]
    assert [start.returncode for start in starts] == [0] * 3
    sizes = [(tmp_path / name).stat().st_size - object_files.DIGEST_BYTES for name in names]
    assert {lines[-1] for lines in said} == {" ".join(map(str, sizes))}
    assert sum(line.startswith("compiled") for lines in said for line in lines) == len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_nobody_waits_for_ever_for_another_that_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(object_files, "COMPILE_TIMEOUT_S", 0.05)
    with (tmp_path / "run_calls-3.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with object_files._the_only_one({"run_calls-3": [tmp_path / "run_calls-3"]}):
            assert "too long" in caplog.messages[-1]


def test_another_source_has_another_fingerprint(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("STEP = 4")
    before = object_files._fingerprint(tmp_path, TARGET)
    assert object_files._fingerprint(tmp_path, TARGET) == before
    source.write_text("STEP = 8")
    assert object_files._fingerprint(tmp_path, TARGET) != before


def test_a_kernel_is_kept_for_its_target_and_not_for_its_machine() -> None:
    """So that an image holds what any machine needs, and none gets what it cannot run."""
    names = ["rms_norm-0", "packed_product-4", "bf16_decode_attention-64"]
    files = {level: object_files._places(names, level) for level in OF_LEVEL}
    every = [place.name for places in files.values() for [place, _] in places.values()]
    assert len(set(every)) == len(every)
    assert target_of("bf16_decode_attention", CpuLevel.VNNI).features.endswith("+avx512bf16")
    assert "avx512bf16" not in target_of("packed_product", CpuLevel.VNNI).features
    # No name of a processor that somebody has: those of the levels.
    assert {target.cpu for target in OF_LEVEL.values()} == {"x86-64-v3", "x86-64-v4"}


def test_a_file_is_left_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "new" / "a.o"
    object_files._leave(b"compiled", place)
    assert [path.name for path in place.parent.iterdir()] == ["a.o"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        object_files._leave(b"compiled", tmp_path / "file" / "a.o")


@pytest.mark.parametrize("kept", [slice(0, 0), slice(0, -1), slice(1, None)], ids=str)
def test_a_damaged_file_is_not_taken(tmp_path: Path, kept: slice) -> None:
    damaged, other = tmp_path / "damaged.o", tmp_path / "other.o"
    object_files._leave(b"compiled", damaged)
    assert object_files._find([damaged, other]) == b"compiled"
    damaged.write_bytes(damaged.read_bytes()[kept])
    assert object_files._find([damaged, other]) == b""
    object_files._leave(b"compiled", other)
    assert object_files._find([damaged, other]) == b"compiled"


def test_what_does_not_compile_says_which_and_why() -> None:
    with pytest.raises(RuntimeError, match=r"no_such-0 does not compile: [^$]*ModuleNotFoundError"):
        object_files._compile(["run_calls-3", "no_such-0", "run_calls-4"], LEVEL)


def test_the_log_says_how_far_the_compiler_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "diptych_kernels")
    object_files._compile(["run_calls-3", "run_calls-4"], LEVEL)
    assert caplog.messages == [
        f"compiling 2 kernels for {LEVEL.word}: run_calls-3, run_calls-4",
        f"compiled 1 of 2 kernels for {LEVEL.word}: run_calls-3",
        f"compiled 2 of 2 kernels for {LEVEL.word}: run_calls-4",
    ]


def test_a_compiler_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match=r"run_calls-3 does not compile: .*exit code -9"):
        object_files._compile(["run_calls-3"], LEVEL)


def _seconds_of_processor(num_calls: int, seconds: list[float]) -> None:
    """What so many small kernels cost two threads that share a processor."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread and those it starts
    x, weight, out = torch.randn(2, 64), torch.ones(64), torch.empty(2, 64)
    table = np.repeat(rows_of([rms_norm.call(x, weight, 1e-6, out)]), num_calls, 0)
    run_all(table[:1], threads=2)
    started = time.process_time()
    run_all(table, threads=2)
    seconds.append(time.process_time() - started)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux binds threads")
def test_threads_on_one_processor_do_not_wait_for_the_end_of_time_slices() -> None:
    """As the scheduler puts them where other work wants processors. 0.02 s; GNU's barrier: 2 s."""
    seconds: list[float] = []
    alone = threading.Thread(target=_seconds_of_processor, args=(600, seconds))
    with forced(LEVEL):
        alone.start()
        alone.join()
    assert seconds[0] < 0.5


def test_tables_change_the_same_argument_of_rotations_and_attention() -> None:
    """A step writes the address of each layer's cache into all of them at once."""
    places = {places_of(kind, "cache") for kind in (RopeKvWrite, DecodeAttention, ChunkAttention)}
    assert len(places) == 1


DOTS = """
declare <16 x i32> @llvm.x86.avx512.vpdpwssd.512(<16 x i32>, <16 x i32>, <16 x i32>)
define <16 x i32> @dots(<16 x i32> %a, <16 x i32> %b) {
  %x = call <16 x i32> @llvm.x86.avx512.vpdpwssd.512(<16 x i32> %a, <16 x i32> %a, <16 x i32> %b)
  %y = call <16 x i32> @llvm.x86.avx512.vpdpwssd.512(<16 x i32> %x, <16 x i32> %b, <16 x i32> %b)
  ret <16 x i32> %y
}
"""


@pytest.mark.parametrize("level", [CpuLevel.VNNI, CpuLevel.AMX])
def test_a_product_of_words_stays_one_instruction(level: CpuLevel) -> None:
    """LLVM would make two of it, which take 1.4 times as long."""
    target = OF_LEVEL[level]
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=target.cpu, features=target.features, opt=3
    )
    code = machine.emit_assembly(llvm.parse_assembly(DOTS))
    assert (code.count("vpdpwssd"), code.count("vpmaddwd")) == (2, 0)
