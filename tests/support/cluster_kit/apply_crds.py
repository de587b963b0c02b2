"""Gives the cluster of $KUBECONFIG the CRDs of this version, as the chart would.

They belong to the whole cluster, so the tests that need them do not bring their own. On the import
path of the tests, and a program for `make cluster`:

    PYTHONPATH=tests/support python -m cluster_kit.apply_crds
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from cluster_kit.kube_tools import Tool, find_tool

CHART = Path(__file__).parents[3] / "charts" / "diptych"
TIMEOUT_S = 60


def run(tool: Tool, *arguments: str, stdin: str = "") -> str:
    """What a tool prints. Raises `CalledProcessError`; it has said why on standard error."""
    done = subprocess.run(
        [find_tool(tool), *arguments],
        input=stdin, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.stdout


def apply_crds() -> str:
    """Bring the CRDs up to date, whoever brought them; what kubectl says of it."""
    # An old API server knows no rules in a schema: the chart leaves them out then.
    version = json.loads(run("kubectl", "version", "--output", "json"))["serverVersion"]
    crds = run(
        *("helm", "template", "crds", str(CHART), "--kube-version", version["gitVersion"]),
        *("--show-only", "templates/crd.yaml"),
    )
    options = ("--server-side", "--force-conflicts", "--filename", "-")
    said = run("kubectl", "apply", *options, stdin=crds)
    established = ("--for=condition=Established", f"--timeout={TIMEOUT_S // 2}s")
    run("kubectl", "wait", *established, "--filename", "-", stdin=crds)
    return said


if __name__ == "__main__":
    print(apply_crds(), end="")
