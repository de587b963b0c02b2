"""The processors that this process may use: its binding, limited by its container's quota.

A control group's quota is no binding: a container with a limit of four processors on a node with 64
sees 64. More threads than the quota do not run more: all are stopped together once it is used up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
GROUPS_SEEN = Path("/proc/self/ns/cgroup")


def usable_processors() -> float:
    """Return the number of processors, which a quota can make a fraction."""
    bound = len(os.sched_getaffinity(0))
    try:
        own = OWN_GROUPS.read_text()
    except OSError:
        return bound  # a system without control groups
    return min(bound, quota(own, CONTROL_GROUPS))


def processors_in_common() -> int:
    """Return a number that processes on the same processors have in common, below 2**48; 0 if that
    is not known. Those with a quota share only it, with the others of their control group."""
    boot = text_if_there(BOOT_ID)
    if not boot:
        return 0
    names = [boot, *map(str, sorted(os.sched_getaffinity(0)))]
    own = text_if_there(OWN_GROUPS)
    if quota(own, CONTROL_GROUPS) < math.inf:
        # A container sees its own group as the root, so the name alone would be everybody's.
        names += [own, str(GROUPS_SEEN.stat().st_ino)]
    return int.from_bytes(blake2b("\n".join(names).encode(), digest_size=6).digest())


def quota(own: str, root: Path) -> float:
    """Return the processors that control groups allow; infinity without a limit.

    `own` is the text of /proc/self/cgroup, `root` where control groups are mounted, version 1 or 2.
    A limit applies to all groups below it, so the lowest one from the own group up counts.
    """
    folders = own_groups(own, root, "cpu")
    return min((min(_limit_of_v2(each), _limit_of_v1(each)) for each in folders), default=math.inf)


def own_groups(own: str, root: Path, controller: str) -> Iterator[Path]:
    """Return the folders of all groups whose limits apply to this process, from its own group up.

    `own` and `root` are as in `quota`; `controller` is version 1's name of the limited resource.
    Files of versions 1 and 2 have different names; a folder has those of one.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _up(root, path)
        elif controller in controllers.split(","):
            yield from _up(root / controllers, path)
            yield from _up(root / controller, path)


def _up(mount: Path, path: str) -> Iterator[Path]:
    """A group's folder and those above it; in a container some of them may not be seen."""
    folder = mount / path.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _limit_of_v2(folder: Path) -> float:
    limit, _, period = text_if_there(folder / "cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdecimal() else math.inf


def _limit_of_v1(folder: Path) -> float:
    limit, period = (
        text_if_there(folder / "cpu.cfs_quota_us"),
        text_if_there(folder / "cpu.cfs_period_us"),
    )
    return int(limit) / int(period) if limit.isdecimal() else math.inf


def text_if_there(file: Path) -> str:
    """Return a file's text without the space around it; empty if it is not there, as in the root
    group."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
