"""The time of day by a clock that nobody sets: requests are ordered by it, and spans are measured.

It is the system's at the moment that this process began, and goes on evenly from there. The
system's own may be set back or forth by hours, and then who came last would be served first, or who
waits already would have missed a deadline.
"""

from __future__ import annotations

import time
from typing import Final

_BEGAN_AT: Final = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970, as far as this process knows."""
    return time_of_day(time.monotonic())


def time_of_day(monotonic_s: float) -> float:
    """Seconds since 1970 at a time of `time.monotonic()`."""
    return _BEGAN_AT + monotonic_s
