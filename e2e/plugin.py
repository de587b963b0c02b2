"""The kubectl plugin, run as kubectl runs it: as the program `kubectl-diptych`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from e2e.kubectl import CALL_TIMEOUT_S

NOT_WELL = 1
"""Exit code of `why` for a service that wants attention."""


@dataclass(frozen=True)
class Answer:
    code: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Plugin:
    """Questions about the services of one namespace, by way of whatever $KUBECONFIG says."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def ask(self, question: str, *arguments: str) -> Answer:
        """Run the plugin of this checkout, whatever `kubectl-diptych` is on PATH. Raises
        `AssertionError` if the plugin fails."""
        command = [sys.executable, "-m", "diptych.kubectl.main", question, *arguments]
        done = subprocess.run(
            [*command, "--namespace", self._namespace],
            capture_output=True,
            text=True,
            timeout=CALL_TIMEOUT_S,
        )
        assert done.returncode in (0, NOT_WELL), f"kubectl diptych {question}: {done.stderr}"
        return Answer(done.returncode, done.stdout)
