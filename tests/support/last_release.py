"""The last release beside this version: its programs, its operator, and its custom resources.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from waits import PATIENCE_S

LAST_RELEASE: Final = "3c3b01cc2d5cf3577527c69b86b94796c0992b4c"
"""A commit of main of two days before, until there is a tag to name here. It runs on this
version's dependencies."""
ROOT: Final = Path(__file__).parents[2]
QUESTIONS: Final = Path(__file__).parent / "asked_of_version.py"
PACKAGES: Final = (
    "protocol", "frontend", "router", "engine", "kv_transfer", "kernels", "operator", "cli",
    "vllm_connector",
)  # fmt: skip


@dataclass(frozen=True)
class Version:
    """A tree of the repository whose programs run."""

    name: str
    root: Path

    @property
    def crd_schema(self) -> dict[str, Any]:
        text = (self.root / "crds" / "diptych.dev_inferenceservices.yaml").read_text()
        version = yaml.safe_load(text)["spec"]["versions"][0]
        schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
        return schema

    def ask(self, question: str, *given: object) -> Any:
        """What this version answers to a question of `asked_of_version.py`."""
        done = subprocess.run(
            [sys.executable, "-P", QUESTIONS, question],
            input=json.dumps(given),
            env=self._variables({}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {done.stderr}"
        return json.loads(done.stdout)

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start `python -m ...` of this version, or another program, whose path of packages is
        among the variables."""
        program, *arguments = command
        # With -P no server of the tests takes the start, which has this version loaded.
        programs = [sys.executable, "-P"] if program == "python" else [program]
        with log.open("wb") as file:
            return subprocess.Popen(
                [*programs, *arguments],
                env=self._variables(variables),
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join(str(self.root / package) for package in PACKAGES)
        return {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", **more}


THIS: Final = Version("this", ROOT)


def last_release(folder: Path) -> Version:
    """The last release, unpacked into a folder. Skips the test where this clone lacks it."""
    git = ["git", "-C", str(ROOT)]
    wanted = [*PACKAGES, "crds", "examples"]
    done = subprocess.run(
        [*git, "archive", LAST_RELEASE, *wanted], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this clone lacks {LAST_RELEASE:.8}: `git fetch --unshallow` brings it")
    # tarfile has no filters before Python 3.11.4, which Debian 12 has not.
    subprocess.run(["tar", "-x", "-C", str(folder)], input=done.stdout, check=True)
    return Version("last", folder)
