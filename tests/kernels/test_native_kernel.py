"""Compiled kernels: where they are kept, what keeps an old one from being used, how they wait."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych_kernels.call_table import rows_of, run_all
from diptych_kernels.native import kernel
from diptych_kernels.native.kernel import Kernel
from diptych_kernels.rms_norm import cpu as rms_norm

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
    alone.start()
    alone.join()
    assert seconds[0] < 0.5
