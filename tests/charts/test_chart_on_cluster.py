"""The chart in a real cluster: installed, upgraded, removed, and its rights as the API sees them.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig. Each test works in
namespaces of its own. CRDs belong to the whole cluster: they are touched only if none is there.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_kit.apply_crds import run
from cluster_kit.charts import Helm
from cluster_kit.kube_tools import ToolUnavailable, find_tool
from cluster_kit.old_clusters import chart_for
from waits import PATIENCE_S, Deadline

from diptych_operator.kube.leader import leases_of

KUBECONFIG = os.environ.get("DIPTYCH_TEST_KUBECONFIG")
pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster to install the chart into"
)
CRD = "inferenceservices.diptych.dev"
CRDS = (CRD, "modelroutes.diptych.dev", "poolscalers.diptych.dev")
ACCOUNT = "diptych-operator"
# What is tested is the objects, not the program in the pods. It must not even start: an operator
# for the whole cluster would reconcile the services of tests that run beside these.
QUIET = {"images": {"registry": "no-such-registry", "pullPolicy": "Never"}, "replicas": 2}
NO_CRD = QUIET | {"crds": {"install": False}}


@dataclass(frozen=True)
class Cluster:
    """kubectl and helm against one cluster, and three namespaces of this test's own."""

    kubectl_path: Path
    helm: Helm
    chart: Path
    system: str
    team_a: str
    team_b: str

    def kubectl(self, *arguments: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.kubectl_path), "--kubeconfig", str(KUBECONFIG), *arguments],
            input=None if stdin is None else json.dumps(stdin),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def read(self, *arguments: str, stdin: Any = None) -> Any:
        """The answer as JSON. Fails the test if there is none."""
        done = self.kubectl(*arguments, "-o", "json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def exists(self, kind: str, name: str, namespace: str | None = None) -> bool:
        where = ("-n", namespace) if namespace else ()
        return bool(self.kubectl("get", kind, name, *where, "--ignore-not-found").stdout)

    def release(self, verb: str, *arguments: str, values: Any = None) -> str:
        """`helm VERB` on the release of this test. Fails the test if helm does."""
        done = self.helm(
            *(*verb.split(), "diptych", *arguments, "-n", self.system),
            *("--kubeconfig", str(KUBECONFIG)),
            values=values,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def allows(self, user: str, verb: str, what: str, namespace: str = "", name: str = "") -> bool:
        """Whether the API server would let a user do this; `what` is `resource[/sub][.group]`."""
        resource, _, group = what.partition(".")
        resource, _, subresource = resource.partition("/")
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user,
                "resourceAttributes": {
                    "verb": verb, "group": group, "resource": resource, "name": name,
                    "subresource": subresource, "namespace": namespace,
                },
            },
        }  # fmt: skip
        return bool(self.read("create", "-f", "-", stdin=review)["status"]["allowed"])


@pytest.fixture
def cluster(helm: Helm, tmp_path: Path) -> Iterator[Cluster]:
    try:
        kubectl = find_tool("kubectl")
    except ToolUnavailable as exc:
        pytest.skip(str(exc))
    mark = f"chart-{secrets.token_hex(3)}"
    chart = chart_for(
        partial(run, "kubectl", "--kubeconfig", str(KUBECONFIG)), tmp_path / "fitting"
    )
    found = Cluster(kubectl, helm, chart, f"{mark}-system", f"{mark}-team-a", f"{mark}-team-b")
    namespaces = (found.system, found.team_a, found.team_b)
    try:
        for namespace in namespaces:
            assert found.kubectl("create", "namespace", namespace).returncode == 0
        yield found
    finally:
        uninstall = ("uninstall", "diptych", "-n", found.system, "--ignore-not-found")
        found.helm(*uninstall, "--kubeconfig", str(KUBECONFIG))
        found.kubectl("delete", "namespace", *namespaces, "--wait=false")


def operator(cluster: Cluster) -> str:
    return f"system:serviceaccount:{cluster.system}:{ACCOUNT}"


def test_install_upgrade_and_uninstall_leave_nothing_behind(cluster: Cluster) -> None:
    cluster.release("install", str(cluster.chart), values=NO_CRD)
    budget = cluster.read("get", "poddisruptionbudget", ACCOUNT, "-n", cluster.system)
    assert budget["spec"]["minAvailable"] == 1
    before = cluster.read("get", "deployment", ACCOUNT, "-n", cluster.system)

    cluster.release(
        "upgrade", str(cluster.chart), values=NO_CRD | {"logLevel": "debug", "replicas": 1}
    )
    after = cluster.read("get", "deployment", ACCOUNT, "-n", cluster.system)
    assert before["metadata"]["uid"] == after["metadata"]["uid"]
    (container,) = after["spec"]["template"]["spec"]["containers"]
    assert "--log-level=debug" in container["args"]
    assert not cluster.exists("poddisruptionbudget", ACCOUNT, cluster.system)

    manifest = cluster.release("get manifest")
    installed = [o for o in yaml.safe_load_all(manifest) if o]
    assert len(installed) > 5
    cluster.release("uninstall", "--wait", "--timeout", "50s")
    for item in installed:
        metadata = item["metadata"]
        assert not cluster.exists(item["kind"], metadata["name"], metadata.get("namespace"))


def test_a_cluster_wide_operator_may_do_its_work_and_no_more(cluster: Cluster) -> None:
    cluster.release("install", str(cluster.chart), values=NO_CRD)
    user = operator(cluster)
    for namespace in (cluster.team_a, ""):
        for verb, what in (
            ("watch", "inferenceservices.diptych.dev"),
            ("patch", "inferenceservices/status.diptych.dev"),
            ("create", "poolscalers.diptych.dev"),
            ("patch", "poolscalers/status.diptych.dev"),
            ("create", "deployments.apps"),
            ("patch", "networkpolicies.networking.k8s.io"),
            ("delete", "poddisruptionbudgets.policy"),
            ("get", "secrets"),
            ("patch", "pods"),
            ("create", "events"),
        ):
            assert cluster.allows(user, verb, what, namespace), (verb, what, namespace)
        for verb, what in (
            ("patch", "inferenceservices.diptych.dev"),
            ("delete", "inferenceservices.diptych.dev"),
            ("patch", "poolscalers.diptych.dev"),
            ("patch", "poolscalers/scale.diptych.dev"),
            ("list", "secrets"),
            ("watch", "secrets"),
            ("delete", "pods"),
            ("create", "pods/exec"),
            ("create", "roles.rbac.authorization.k8s.io"),
            ("create", "serviceaccounts/token"),
            ("get", "leases.coordination.k8s.io"),
            ("get", "nodes"),
        ):
            assert not cluster.allows(user, verb, what, namespace), (verb, what, namespace)


@pytest.mark.parametrize("scope", ["cluster", "namespaced"])
def test_the_operator_may_hold_its_own_lease_only(cluster: Cluster, scope: str) -> None:
    namespaces = [cluster.team_a] if scope == "namespaced" else []
    values = NO_CRD | {"scope": scope, "namespaces": namespaces}
    cluster.release("install", str(cluster.chart), values=values)
    user, lease = operator(cluster), "leases.coordination.k8s.io"
    [(place, name)] = leases_of(namespaces)
    assert cluster.allows(user, "create", lease, place)
    assert cluster.allows(user, "update", lease, place, name)
    assert not cluster.allows(user, "update", lease, place, "another")
    assert not cluster.allows(user, "create", lease, cluster.team_b)


def test_a_namespaced_operator_sees_its_namespaces_only(cluster: Cluster) -> None:
    values = NO_CRD | {"scope": "namespaced", "namespaces": [cluster.team_a]}
    cluster.release("install", str(cluster.chart), values=values)
    user = operator(cluster)
    for verb, what in (("watch", "inferenceservices.diptych.dev"), ("create", "deployments.apps")):
        assert cluster.allows(user, verb, what, cluster.team_a)
        assert not cluster.allows(user, verb, what, cluster.team_b)
        assert not cluster.allows(user, verb, what)

    # Told to serve another, it gives up the first.
    cluster.release("upgrade", str(cluster.chart), values=values | {"namespaces": [cluster.team_b]})
    assert cluster.allows(user, "create", "deployments.apps", cluster.team_b)
    assert not cluster.allows(user, "create", "deployments.apps", cluster.team_a)


def test_the_built_in_roles_reach_inference_services(cluster: Cluster) -> None:
    cluster.release("install", str(cluster.chart), values=NO_CRD)
    what = "inferenceservices.diptych.dev"
    for role in ("view", "edit"):
        bind = ("create", "rolebinding", role, "--clusterrole", role, "--user", f"a-{role}er")
        assert cluster.kubectl(*bind, "-n", cluster.team_a).returncode == 0
    deadline = Deadline("Kubernetes aggregates the roles")
    while not cluster.allows("a-editer", "create", what, cluster.team_a):
        deadline.check()
        time.sleep(0.2)
    assert cluster.allows("a-viewer", "watch", what, cluster.team_a)
    assert not cluster.allows("a-viewer", "create", what, cluster.team_a)
    scale = "poolscalers/scale.diptych.dev"
    assert cluster.allows("a-editer", "patch", scale, cluster.team_a)
    assert not cluster.allows("a-viewer", "patch", scale, cluster.team_a)
    assert not cluster.allows("a-editer", "create", what, cluster.team_b)


def older_chart(chart: Path, folder: Path) -> Path:
    """The chart as it was when it had one CRD, and that one printer column less."""
    copy = Path(shutil.copytree(chart, folder / "diptych"))
    crd, *later = sorted((copy / "files" / "crds").iterdir())
    for each in later:
        each.unlink()
    definition = yaml.safe_load(crd.read_text())
    definition["spec"]["versions"][0]["additionalPrinterColumns"].pop()
    crd.write_text(yaml.safe_dump(definition))
    return copy


def test_the_crds_are_upgraded_and_outlive_the_release(cluster: Cluster, tmp_path: Path) -> None:
    if any(cluster.exists("crd", crd) for crd in CRDS):
        pytest.skip("the cluster has CRDs of ours already, so they are somebody else's")

    def columns() -> list[str]:
        (version,) = cluster.read("get", "crd", CRD)["spec"]["versions"]
        return [column["name"] for column in version["additionalPrinterColumns"]]

    try:
        cluster.release("install", str(older_chart(cluster.chart, tmp_path)), values=QUIET)
        assert "Age" not in columns()
        assert not cluster.exists("crd", CRDS[1])
        cluster.release("upgrade", str(cluster.chart), values=QUIET)
        assert "Age" in columns()
        assert cluster.exists("crd", CRDS[1])
        cluster.release("uninstall")
        assert all(cluster.exists("crd", crd) for crd in CRDS)
        cluster.release("install", str(cluster.chart), values=QUIET)  # finds its own CRDs again
    finally:
        for crd in CRDS:
            if cluster.exists("crd", crd) and not cluster.read("get", crd, "-A")["items"]:
                cluster.kubectl("delete", "crd", crd, "--timeout=60s")
