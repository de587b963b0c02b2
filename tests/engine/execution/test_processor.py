"""Which pages of libraries a sleeping process gives back."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych_engine.execution.processor import MAPPING

TORCH = "/lib/torch/lib/libtorch_cpu.so"
MAPPED = """\
7f0000000000-7f0000002000 {access} 00000000 fe:00 26723                      {path}
Size:                  8 kB
Rss:                   4 kB
Anonymous:             {anonymous} kB
KSM:                   0 kB
AnonHugePages:         0 kB
Swap:                  {swap} kB
SwapPss:               {swap} kB
VmFlags: rd mr mw me
7f0000002000-7f0000003000 r--p 00000000 00:00 0
Size:                  4 kB
Anonymous:             0 kB
Swap:                  0 kB
"""


@pytest.mark.parametrize(
    ("access", "anonymous", "swap", "given_back"),
    [
        ("r-xp", 0, 0, True),
        ("r--p", 0, 0, True),
        ("r--p", 8, 0, False),
        ("r--p", 0, 8, False),
        ("rw-p", 0, 0, False),
    ],
)
def test_pages_that_a_linker_changed_stay_wherever_they_are(
    access: str, anonymous: int, swap: int, *, given_back: bool
) -> None:
    """Those that are swapped out are not counted as anonymous."""
    smaps = MAPPED.format(access=access, path=TORCH, anonymous=anonymous, swap=swap)
    expected = [("7f0000000000", "7f0000002000", TORCH)] if given_back else []
    assert MAPPING.findall(smaps) == expected


def test_the_kernel_writes_what_is_looked_for() -> None:
    assert MAPPING.findall(Path("/proc/self/smaps").read_text())
