"""Which level of instructions is used, where."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_kernels.cpu_level import (
    NEEDED,
    VARIABLE,
    CpuLevel,
    CpuLevelError,
    chosen_level,
    level_of,
    machine_level,
)
from diptych_kernels.native.object_files import OF_LEVEL, lowest_level

NONE, AVX2, VNNI, AMX = CpuLevel
HASWELL = NEEDED[AVX2] | {"sse4.2", "cx16"}
SKYLAKE = HASWELL | NEEDED[VNNI] - {"avx512vnni"}
CASCADE_LAKE = SKYLAKE | {"avx512vnni"}
SAPPHIRE_RAPIDS = CASCADE_LAKE | NEEDED[AMX] | {"amx-int8"}


@each(
    ("machine", "features", "may_use_tiles", "wanted"),
    [
        ("x86_64", {"sse4.2", "cx16"}, False, NONE),
        ("x86_64", {"avx", "avx2"}, False, NONE),  # as hypervisors may mask them
        ("x86_64", HASWELL, False, AVX2),
        ("x86_64", SKYLAKE, False, AVX2),
        ("x86_64", CASCADE_LAKE, True, VNNI),
        ("x86_64", SAPPHIRE_RAPIDS, True, AMX),
        ("x86_64", SAPPHIRE_RAPIDS, False, VNNI),  # Linux refuses
        ("x86_64", SAPPHIRE_RAPIDS - {"fma"}, True, NONE),
        ("AMD64", HASWELL, False, AVX2),
        ("aarch64", {"neon", "fp-armv8", "dotprod"}, False, NONE),
        ("arm64", {"neon", "dotprod"}, False, NONE),
        ("aarch64", SAPPHIRE_RAPIDS, True, NONE),
    ],
)
def test_a_level_is_there_when_all_that_it_may_use_is_there(
    machine: str, features: set[str], may_use_tiles: bool, wanted: CpuLevel
) -> None:
    known = dict.fromkeys(features, True)
    assert level_of(machine, known, may_use_tiles=may_use_tiles) is wanted


@given(st.sets(st.sampled_from(sorted(SAPPHIRE_RAPIDS))))
def test_no_level_is_there_without_those_before_it(features: set[str]) -> None:
    found = level_of("x86_64", dict.fromkeys(features, True), may_use_tiles=True)
    for level, needed in NEEDED.items():
        assert (level <= found) <= (needed <= features)


@pytest.mark.parametrize(
    ("word", "has", "message"),
    [
        ("sse", AMX, "X must be auto, none, avx2, vnni or amx, not 'sse'"),
        ("AVX2", AMX, "X must be auto"),
        ("amx", AVX2, "X is amx, but this machine has only avx2: leave it auto"),
        ("avx2", NONE, "X is avx2, but this machine has no level but none"),
    ],
)
def test_a_word_that_cannot_be_followed_says_why(word: str, has: CpuLevel, message: str) -> None:
    with pytest.raises(CpuLevelError, match=message):
        chosen_level(word, "X", has)


def test_a_lower_level_may_be_asked_for() -> None:
    assert chosen_level("auto", "X", VNNI) is VNNI
    assert [chosen_level(level.word, "X", AMX) for level in CpuLevel] == list(CpuLevel)


@pytest.mark.parametrize("word", ["none", machine_level().word, "", "amd"])
def test_a_process_uses_what_its_environment_says(word: str) -> None:
    program = "from diptych_kernels.cpu_level import cpu_level; print(cpu_level().word)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={VARIABLE: word}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if word == "amd":
        assert f"{VARIABLE} must be auto, none, avx2, vnni or amx, not 'amd'" in done.stderr
    else:
        assert done.stdout.strip() == (word or machine_level().word)


def test_kernels_of_higher_levels_are_not_compiled_for_lower_ones() -> None:
    assert lowest_level("rms_norm") is AVX2
    assert lowest_level("bf16_decode_attention") is VNNI
    assert lowest_level("amx_product") is AMX
    assert "amx" not in OF_LEVEL[VNNI].features
    assert "vnni" not in OF_LEVEL[AVX2].features
