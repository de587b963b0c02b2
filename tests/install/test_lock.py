"""Every extra comes from the public index alone, for each Python and machine that is promised.

uv reads metadata only, and sees no local wheels, no other index and no configuration.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import install
import pytest

ROOT = install.ROOT
UV = str(Path(sys.executable).parent / "uv")
PYTHONS = [f"3.{minor}" for minor in range(install.OLDEST[1], install.NEWEST[1] + 1)]
PLATFORMS = [f"{machine}-manylinux_2_31" for machine in install.MACHINES]
"""The glibc of Debian 11 and Ubuntu 20.04: the oldest that all wheels agree on."""


@pytest.fixture(scope="module", autouse=True)
def index() -> None:
    # What it says to a page that is not there is an answer, too.
    if not install.answers(f"{install.PYPI}/msgspec/", install.PROBE_S):
        pytest.skip("no index")


def run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=install.bare_environment(dict(os.environ)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("python", "platform"),
    [
        pytest.param(python, platform, marks=[] if python == PYTHONS[0] else pytest.mark.slow)
        for python in PYTHONS
        for platform in PLATFORMS
    ],
)
def test_all_extras_resolve_to_wheels_that_are_locked(
    tmp_path: Path, python: str, platform: str
) -> None:
    """With the lock as constraint, as `pip install --constraint requirements.lock` has it.

    What does for all extras at once does for each of them.
    """
    found = tmp_path / "found.txt"
    command = install.resolve_command(UV, found)
    command += ["--constraint", install.LOCK, "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", platform]
    run([*command, "--no-header", "--no-annotate"])
    locked = (ROOT / install.LOCK).read_text().splitlines()
    versions = {line.split("#")[0].split(";")[0].strip() for line in locked}
    assert set(found.read_text().split()) <= versions


def test_the_lock_is_that_of_the_project(tmp_path: Path) -> None:
    renewed = tmp_path / install.LOCK
    shutil.copy(ROOT / install.LOCK, renewed)
    run(install.lock_command(UV, renewed))
    assert renewed.read_text() == (ROOT / install.LOCK).read_text(), "run `make lock`"
