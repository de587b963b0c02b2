"""What a process leaves in its log when it ends as no program should."""

from __future__ import annotations

import signal
import subprocess
import sys

from waits import PATIENCE_S

CRASH = """
import os, signal
from diptych_frontend.program import run_program

async def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

run_program("router", crash())
"""


def test_a_crash_of_native_code_says_where_python_was() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr
    assert "in crash" in ended.stderr
