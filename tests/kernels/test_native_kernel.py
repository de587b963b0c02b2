"""Compiled kernels: where they are kept, and what keeps an old one from being used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diptych_kernels.native import kernel
from diptych_kernels.native.kernel import Kernel

NAME = "decode_attention"


def test_what_was_compiled_once_is_loaded_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Kernel(NAME, 0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    Kernel(NAME, 0)


def test_another_source_has_another_fingerprint(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("STEP = 4")
    before = kernel._fingerprint(tmp_path)
    assert kernel._fingerprint(tmp_path) == before
    source.write_text("STEP = 8")
    assert kernel._fingerprint(tmp_path) != before


def test_a_file_is_left_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "new" / "a.o"
    kernel._leave(b"compiled", place)
    assert [path.name for path in place.parent.iterdir()] == ["a.o"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        kernel._leave(b"compiled", tmp_path / "file" / "a.o")


def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_module does not compile"):
        kernel._compile("no_such_module", 0)
