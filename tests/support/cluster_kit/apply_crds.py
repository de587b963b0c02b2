"""Gives the cluster of $KUBECONFIG the CRDs of this version, as the chart would.

They belong to the whole cluster, so the tests that need them do not bring their own. On the import
path of the tests, and a program for `make cluster`:

    PYTHONPATH=tests/support python -m cluster_kit.apply_crds
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import yaml
from cluster_kit.gateway_kinds import gateway_kinds
from cluster_kit.kube_tools import Tool, find_tool
from cluster_kit.old_clusters import Kubectl, chart_for, has_rules, without_rules
from cluster_kit.set_kind import set_definition
from waits import wait_until

TIMEOUT_S = 60


def run(tool: Tool, *arguments: str, stdin: str = "") -> str:
    """What a tool prints. Raises `CalledProcessError`; it has said why on standard error."""
    done = subprocess.run(
        [find_tool(tool), *arguments],
        input=stdin, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.stdout


def apply_crds() -> str:
    """Bring the CRDs up to date, whoever brought them, and other projects' if there are none; what
    kubectl says of it."""
    kubectl = partial(run, "kubectl")
    with tempfile.TemporaryDirectory() as folder:
        chart = str(chart_for(kubectl, Path(folder)))
        crds = run("helm", "template", "crds", chart, "--show-only", "templates/crd.yaml")
    options = ("--server-side", "--force-conflicts", "--filename", "-")
    said = kubectl("apply", *options, stdin=crds)
    there = kubectl("get", "crd", "--output", "name")
    others = [*gateway_kinds().values(), set_definition()]
    lacking = {crd["metadata"]["name"]: crd for crd in others}
    lacking = {name: crd for name, crd in lacking.items() if name not in there}
    for crd in lacking.values():
        fit = crd if has_rules(kubectl) else without_rules(crd)
        said += kubectl("apply", "--filename", "-", stdin=json.dumps(fit))
    for name in (*(crd["metadata"]["name"] for crd in yaml.safe_load_all(crds)), *lacking):
        wait_until_established(kubectl, name)
    return said


def wait_until_established(kubectl: Kubectl, crd: str) -> None:
    """Wait until the cluster serves a CRD.

    Not `kubectl wait`, which is an error as long as the CRD has no condition at all.
    """
    conditions = "{range .status.conditions[*]}{.type}={.status} {end}"
    look = ("get", "crd", crd, "--output", f"jsonpath={conditions}")
    wait_until(lambda: "Established=True" in kubectl(*look).split(), f"{crd} is established")


if __name__ == "__main__":
    print(apply_crds(), end="")
