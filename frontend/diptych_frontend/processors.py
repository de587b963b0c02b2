"""How many processors this process may use: what it is bound to, and what its container may take.

A control group's quota is no binding: with a limit of four processors a container on a node with 64
sees 64. Threads beyond the quota do not run more; they are all stopped together once it is used up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_processors() -> float:
    """Whole processors or, where a quota is what counts, a fraction of one too."""
    bound = len(os.sched_getaffinity(0))
    try:
        own = OWN_GROUPS.read_text()
    except OSError:
        return bound  # a system without control groups
    return min(bound, quota(own, CONTROL_GROUPS))


def quota(own: str, root: Path) -> float:
    """Processors that control groups allow, infinity without a limit.

    `own` is the text of /proc/self/cgroup, `root` where control groups are mounted, version 1 or 2.
    A limit holds for all groups below, so the least of all from the own group up is the one.
    """
    limits = [math.inf]
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += (_limit_of_v2(folder) for folder in _up(root, path))
        elif "cpu" in controllers.split(","):
            limits += (_limit_of_v1(folder) for folder in _up(root / controllers, path))
            limits += (_limit_of_v1(folder) for folder in _up(root / "cpu", path))
    return min(limits)


def _up(mount: Path, path: str) -> Iterator[Path]:
    """A group's folder and those above it; in a container some of them may not be seen."""
    folder = mount / path.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _limit_of_v2(folder: Path) -> float:
    limit, _, period = _text(folder / "cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdecimal() else math.inf


def _limit_of_v1(folder: Path) -> float:
    limit, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return int(limit) / int(period) if limit.isdecimal() else math.inf


def _text(file: Path) -> str:
    """Empty if the file is not there, as in the root group."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
