"""A clock of the time of day that never jumps, by which requests are ordered and spans measured.

It starts at the system's time when this process begins, and then advances evenly. The system's
clock may be set back or forth by hours. Then the newest request would be served first, or waiting
requests would miss their deadlines.
"""

from __future__ import annotations

import time
from typing import Final

_BEGAN_AT: Final = time.time() - time.monotonic()


def steady_time() -> float:
    """Return seconds since 1970 by this clock."""
    return _BEGAN_AT + time.monotonic()


def time_of_day(monotonic_s: float) -> float:
    """Return seconds since 1970 for a time of `time.monotonic()`."""
    return _BEGAN_AT + monotonic_s
