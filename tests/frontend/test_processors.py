"""What a process may use, from files as the kernel writes them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych_frontend.processors import processors_in_common, quota, usable_processors


@pytest.mark.parametrize(
    ("own", "files", "processors"),
    [
        pytest.param("0::/\n", {}, math.inf, id="version 2, the root group"),
        pytest.param("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5, id="version 2, a container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, math.inf, id="version 2, no limit"),
        pytest.param(
            "0::/pod/engine\n",
            {"pod/cpu.max": "300000 100000\n", "pod/engine/cpu.max": "max 100000\n"},
            3.0,
            id="version 2, the pod's limit",
        ),
        pytest.param(
            "0::/pod\n",
            {"pod/cpu.max": "50000 100000\n", "cpu.max": "800000 100000\n"},
            0.5,
            id="version 2, the least counts",
        ),
        pytest.param(
            "4:memory:/m\n3:cpuset:/\n2:cpu,cpuacct:/docker/1\n0::/\n",
            {
                "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "400000\n",
                "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4.0,
            id="version 1",
        ),
        pytest.param(
            "1:cpu:/kubepods/pod1/2\n",
            {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "50000\n"},
            3.0,
            id="version 1, a container that sees its own group as the root",
        ),
        pytest.param("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n"}, math.inf, id="version 1, none"),
        pytest.param("2:memory:/a\n1:name=systemd:/a\n", {}, math.inf, id="no such controller"),
    ],
)
def test_the_quota_of_the_control_groups(
    own: str, files: dict[str, str], processors: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota(own, tmp_path) == processors


def test_whoever_is_bound_to_one_processor_has_one() -> None:
    program = (
        "import os; from diptych_frontend.processors import usable_processors as usable; "
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(usable())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert 0 < float(done.stdout) <= 1
    assert 0 < usable_processors() <= len(os.sched_getaffinity(0))


def test_processes_on_the_same_processors_have_a_number_in_common() -> None:
    program = (
        "import os, sys; from diptych_frontend.processors import processors_in_common as number; "
        "sys.argv[1:] and os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(number())"
    )
    same, bound = (
        int(subprocess.run([sys.executable, "-c", program, *more], capture_output=True).stdout)
        for more in ([], ["bound"])
    )
    assert same == processors_in_common() > 0
    if len(os.sched_getaffinity(0)) > 1:
        assert bound not in {0, same}
