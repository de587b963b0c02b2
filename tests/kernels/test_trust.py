"""Kernels are tried before they are used; what is wrong is put aside, and the model still answers.

The faults are real ones: kernels that are compiled from changed sources, and a compiler that fails.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.control import Owner
from engine_kit.core import core_request, generate, make_core, run
from model_kit.checkpoints import save_model
from model_kit.gguf import SIZES, random_tensors

import diptych_kernels
from diptych_engine.models.layer_calls import have_kernels
from diptych_kernels import packed_product, trust
from diptych_kernels.cpu_kernels import CASES, KERNELS
from diptych_kernels.cpu_level import CpuLevel, cpu_level, forget
from diptych_kernels.native import kernel, object_files
from diptych_kernels.native.object_files import target_of
from diptych_kernels.silu_mul import cpu as silu_mul

pytestmark = pytest.mark.usefixtures("compiled_level")
Plant = Callable[[dict[str, bytes | Exception]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Have object files be others, or their compiler fail; nothing was loaded or tried before."""
    known = object_files.object_files

    def plant_now(faults: dict[str, bytes | Exception]) -> None:
        def planted(names: Sequence[str], level: CpuLevel) -> list[bytes]:
            found = []
            for name in names:
                fault = faults.get(name)
                if isinstance(fault, Exception):
                    raise fault
                found.append(fault or known([name], level)[0])
            return found

        monkeypatch.setattr(kernel, "object_files", planted)
        monkeypatch.setattr(kernel, "_kernel", cache(kernel.Kernel))
        forget()

    yield plant_now
    monkeypatch.undo()
    forget()


def compiled_with(change: tuple[str, str], source: str, name: str, folder: Path) -> bytes:
    """The object file of a kernel, had its source been another one."""
    package = folder / "diptych_kernels"
    shutil.copytree(Path(diptych_kernels.__file__).parent, package)
    file = package / "native" / "compiled" / source
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    target = target_of(name, cpu_level())
    subprocess.run(
        [sys.executable, "-m", "diptych_kernels.native.compile", str(folder), name],
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "NUMBA_CPU_NAME": target.cpu,
            "NUMBA_CPU_FEATURES": target.features,
        },
        timeout=120,
        check=True,
    )
    return (folder / name).read_bytes()


def test_every_kernel_is_right_in_its_case(compiled_level: CpuLevel) -> None:
    there = [each for each in KERNELS if trust.is_there(each[0])]
    assert {name for name, _ in there} <= set(CASES)
    assert [each for each in there if not trust.is_trusted(CASES[each[0]], each[1])] == []
    assert not trust.set_aside()
    assert ("amx_product", 4) not in there or compiled_level is CpuLevel.AMX


def test_a_wrong_kernel_is_put_aside_for_torch(
    plant: Plant, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = compiled_with(("/ (ONE", "/ (ONE + ONE"), "silu_mul.py", "silu_mul-0", tmp_path)
    plant({"silu_mul-0": wrong})
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING):
        assert not silu_mul.fits(x)
    assert list(trust.set_aside()) == ["silu_mul-0"]
    assert f"silu_mul-0 for {cpu_level().word} is put aside" in caplog.text
    assert "of a known result it differs by" in caplog.text
    assert not have_kernels(64)
    assert trust.is_trusted(CASES["rms_norm"], 0)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (RuntimeError("silu_mul-0 does not compile: Numba is not there"), "Numba is not there"),
        (OSError("no room"), "no room"),
    ],
)
def test_what_cannot_be_loaded_is_put_aside(plant: Plant, fault: Exception, why: str) -> None:
    plant({"silu_mul-0": fault})
    assert not trust.is_trusted(CASES["silu_mul"], 0)
    assert why in trust.set_aside()["silu_mul-0"]


def test_without_a_right_product_nothing_is_packed_and_the_engine_answers(
    plant: Plant, tmp_path: Path, smollm2: str
) -> None:
    wrong = compiled_with(
        ("FLOAT32(1 / most)", "FLOAT32(2 / most)"),
        "rounded_group.py", "packed_product-4", tmp_path,
    )  # fmt: skip
    plant({"packed_product-4": wrong})
    core = make_core(smollm2, weight_packing="auto", max_model_len=64)
    try:
        assert not packed_product.is_available()
        assert core.description.compat["dtype"] == "bfloat16"  # it exchanges KV with others still
        stats = core.stats()
        assert (stats.cpu_level, stats.cpu_kernels_set_aside) == (cpu_level().word, 1)
        [output] = run(core, core_request("a", [504, 3575, 282, 4649, 314], max_tokens=1))["a"]
        assert output.new_token_ids == [7042]
    finally:
        core.close()


def kinds(owner: Owner) -> set[torch.dtype | None]:
    runner: Any = owner.core.runner
    packed = [each.linear.packed for each in runner.model.packables]
    return {None if own is None else own.tiles.dtype for own in packed}


def test_matrices_that_others_packed_wait_for_a_right_product(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one nothing is packed for others, and what they packed is not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors().items()}
    uri = save_model(tmp_path / "model", tensors, **SIZES)
    answer = generate(Owner(model=uri, weight_packing="none").core, [1, 2, 3])
    fault: dict[str, bytes | Exception] = {"float_product-16": OSError("no room")}
    for faults, found in ((fault, None), ({}, torch.bfloat16), (fault, None)):
        plant(faults)
        owner = Owner(model=uri, weight_packing="auto")
        assert kinds(owner) == {found}
        assert generate(owner.core, [1, 2, 3]) == answer
