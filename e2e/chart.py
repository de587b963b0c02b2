"""The operator, installed as its users install it: with Helm."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from cluster_kit.apply_crds import apply_crds
from cluster_kit.kube_tools import find_tool
from cluster_kit.old_clusters import chart_for
from e2e.kubectl import Kubectl, Object

CRD = "inferenceservices.diptych.dev"
RELEASE = "diptych"
HELM_TIMEOUT_S = 240
OPERATOR_PODS = {"app.kubernetes.io/name": "diptych-operator"}


class Chart:
    """A release in a namespace of the tests' own."""

    def __init__(self, kubectl: Kubectl, registry: str, serves: str) -> None:
        """The images are those of the chart's version, in `registry`; empty: nodes have them.

        serves: the one namespace that the operator serves; empty: it serves the whole cluster.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._chart = chart_for(kubectl.run, Path(self._folder.name))
        self._kubectl = kubectl
        self._values = {
            # Both are named, whichever the chart's default is.
            "scope": "namespaced" if serves else "cluster",
            "images.registry": registry,
            # Models of some tests come from a folder of the node.
            "limits.allow.hostPaths": "{*}",
            "limits.allow.cacheHostPaths": "{*}",
        }
        if serves:
            self._values["namespaces"] = f"{{{serves}}}"

    def install(self, **values: str) -> None:
        """Install or upgrade the release, and wait until the operator is ready.

        `__` in the name of a value stands for a dot.
        """
        if "crds.install" not in self._values:
            self._values["crds.install"] = "false" if self._renew_crd() else "true"
        wanted = {**self._values, **{key.replace("__", "."): v for key, v in values.items()}}
        settings = [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]
        self._helm("upgrade", "--install", RELEASE, str(self._chart), *settings,
                   "--wait", f"--timeout={HELM_TIMEOUT_S}s")  # fmt: skip

    def _renew_crd(self) -> bool:
        """Bring a CRD that is there already up to date; returns whether there is one.

        It belongs to the whole cluster and outlives the release that brought it, so it can be an
        earlier run's or another release's, from which Helm would not take it.
        """
        if self._kubectl.get("crd", CRD) is None:
            return False
        apply_crds()
        return True

    def test(self) -> None:
        """The chart's own tests."""
        self._helm("test", RELEASE, f"--timeout={HELM_TIMEOUT_S}s")

    def uninstall(self) -> None:
        """The last that is done with it."""
        self._helm("uninstall", RELEASE, "--wait", f"--timeout={HELM_TIMEOUT_S}s")
        self._folder.cleanup()

    def pods(self) -> list[Object]:
        return self._kubectl.list("pods", OPERATOR_PODS)

    def ready(self, timeout_s: float) -> None:
        """Wait until every operator pod that is wanted is ready."""
        options = ("--selector", "app.kubernetes.io/name=diptych-operator")
        self._kubectl.run(
            *("rollout", "status", "deployment", *options, f"--timeout={timeout_s:g}s"),
            timeout_s=timeout_s + 10,
        )

    def _helm(self, *arguments: str) -> str:
        command = [str(find_tool("helm")), "--namespace", self._kubectl.namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HELM_TIMEOUT_S + 30)
        assert done.returncode == 0, f"helm {arguments[0]}: {done.stderr}"
        return done.stdout
