"""PoolScalers in a real cluster: kubectl and Kubernetes' own HPA controller size a pool.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs of this version. The operator is a real process with the rights that the chart gives it; the
images of its services do not exist, so no pod ever runs.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chaos_kit.namespaces import KUBECONFIG, Namespace, Object, until
from cluster_kit.crds import EXAMPLES
from cluster_kit.kube_tools import ToolUnavailable, find_tool
from cluster_kit.old_clusters import newest, without_rules
from cluster_kit.operators import NO_IMAGE, Identity, Operator, running
from waits import PATIENCE_S

from diptych_operator.api.crd import custom_resource_definition, scaler_definition

pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster with the CRDs"
)
HPA_S = 90.0
"""Kubernetes' controller looks every 15 s, and learns of new kinds every 30 s."""
QUIET_S = 5.0
"""Two passes and more of an operator whose service is not ready."""


class Cluster:
    """One namespace, with an operator that serves it."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._kubectl = find_tool("kubectl")

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """What a command prints. Fails the test with what it says if it fails."""
        where = ("--kubeconfig", str(KUBECONFIG), "-n", self.namespace.name)
        done = subprocess.run(
            [str(self._kubectl), *where, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def serve(self, name: str, prefill: Object, **spec: Any) -> None:
        images = {"engine": {"image": NO_IMAGE}, "router": {"image": NO_IMAGE}}
        self.namespace.serve(name, prefill=prefill, **images, **spec)

    def scaler(self, name: str) -> Object:
        return until(
            f"there is a PoolScaler {name}",
            lambda: self.namespace.get("PoolScaler", name),  # type: ignore[arg-type, return-value]
        )

    def scale(self, name: str, replicas: int) -> None:
        self.scaler(name)
        self.kubectl("scale", f"poolscaler/{name}", f"--replicas={replicas}")

    def counts(self, name: str, replicas: int) -> None:
        """Wait until so many pods are there."""
        until(
            f"{name} counts {replicas} pods",
            lambda: (self.scaler(name).get("status") or {}).get("replicas") == replicas,
        )

    def wanted(self, service: str, role: str) -> dict[str, int]:
        """Pods that the Deployments of a pool want, by revision."""
        selector = f"diptych.dev/service={service},diptych.dev/role={role}"
        return {
            item["metadata"]["labels"]["diptych.dev/revision"]: item["spec"]["replicas"]
            for item in self.namespace.list("Deployment", selector)
        }

    def has_pods_wanted(self, service: str, role: str, number: int, seconds: float = 20) -> None:
        """Wait until the newest revision's Deployment wants so many pods."""

        def wanted() -> bool:
            revision = self.namespace.status(service).get("updateRevision", "")
            found = self.namespace.get("Deployment", f"{service}-{role}-{revision}")
            return found is not None and found["spec"]["replicas"] == number

        until(f"{service} wants {number} {role} pods", wanted, seconds)


def external(least: int = 1, most: int = 4) -> Object:
    return {"autoscaling": {"by": "External", "minReplicas": least, "maxReplicas": most}}


@pytest.fixture(scope="module", autouse=True)
def crds_of_this_version() -> None:
    """CRDs belong to the whole cluster, so these tests do not bring their own."""
    try:
        kubectl = str(find_tool("kubectl"))
    except ToolUnavailable as exc:
        pytest.skip(str(exc))
    for wanted in (custom_resource_definition(), scaler_definition()):
        name = wanted["metadata"]["name"]
        command = [kubectl, "--kubeconfig", str(KUBECONFIG), "get", "crd", name, "-o", "json"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        schema = without_rules(wanted["spec"]["versions"][0]["schema"])
        installed = json.loads(found.stdout or "{}").get("spec", {}).get("versions", [{}])
        if without_rules(installed[0].get("schema")) != schema:
            pytest.skip(f"the cluster's CRD {name} is of another version: apply crds/ first")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("operator")
    with Namespace("scalers") as namespace:
        identity = Identity(namespace, folder)
        operator = Operator(folder / "log", identity.arguments, identity.kubeconfig)
        with running(operator):
            yield Cluster(namespace)


def test_kubectl_scale_sizes_a_pool_within_its_bounds(cluster: Cluster) -> None:
    cluster.serve("scaled", external(most=3), decode=external())
    made = cluster.scaler("scaled-prefill")
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == (
        "InferenceService",
        "scaled",
        True,
    )
    assert made["spec"] == {"replicas": 1}
    cluster.has_pods_wanted("scaled", "prefill", 1)

    cluster.scale("scaled-prefill", 3)
    cluster.has_pods_wanted("scaled", "prefill", 3)
    cluster.scale("scaled-prefill", 2)
    cluster.has_pods_wanted("scaled", "prefill", 2)
    cluster.scale("scaled-prefill", 900)
    cluster.has_pods_wanted("scaled", "prefill", 3)
    cluster.scale("scaled-prefill", 0)
    cluster.has_pods_wanted("scaled", "prefill", 1)
    cluster.has_pods_wanted("scaled", "decode", 1)


def test_a_scale_shows_the_pods_and_their_selector_and_columns_tell_whose_it_is(
    cluster: Cluster,
) -> None:
    cluster.serve("shown", external())
    cluster.counts("shown-prefill", 1)
    path = f"/apis/diptych.dev/v1alpha1/namespaces/{cluster.namespace.name}/poolscalers"
    scale = json.loads(cluster.kubectl("get", "--raw", f"{path}/shown-prefill/scale"))
    selector = "diptych.dev/role=prefill,diptych.dev/service=shown"
    assert (scale["spec"], scale["status"]) == (
        {"replicas": 1},
        {"replicas": 1, "selector": selector},
    )

    header, row = cluster.kubectl("get", "psc", "shown-prefill").splitlines()
    assert header.split() == ["NAME", "SERVICE", "POOL", "WANTED", "READY", "AGE"]
    assert row.split()[:-1] == ["shown-prefill", "shown", "prefill", "1", "0"]
    explained = " ".join(cluster.kubectl("explain", "poolscalers.spec.replicas").split())
    assert "Pods that the pool is to have." in explained


def test_what_others_asked_for_is_never_overwritten_nor_written_for_nothing(
    cluster: Cluster,
) -> None:
    cluster.serve("asked", external(most=2))
    until("there is a status", lambda: cluster.scaler("asked-prefill").get("status"))
    cluster.scale("asked-prefill", 700)
    cluster.counts("asked-prefill", 2)
    before = cluster.scaler("asked-prefill")
    time.sleep(QUIET_S)
    assert cluster.scaler("asked-prefill") == before
    assert before["spec"] == {"replicas": 700}


def test_a_switch_to_external_and_back_changes_no_pod(cluster: Cluster) -> None:
    cluster.serve("switched", {"replicas": 2})
    cluster.has_pods_wanted("switched", "prefill", 2)
    until(
        "the status knows", lambda: cluster.namespace.status("switched")["prefill"]["desired"] == 2
    )
    change = {"spec": {"prefill": {"replicas": None, **external()}}}
    cluster.namespace.merge("InferenceService", "switched", change)
    assert cluster.scaler("switched-prefill")["spec"] == {"replicas": 2}
    cluster.has_pods_wanted("switched", "prefill", 2)

    back = {"spec": {"prefill": {"replicas": 2, "autoscaling": None}}}
    cluster.namespace.merge("InferenceService", "switched", back)
    until("it is gone", lambda: cluster.namespace.get("PoolScaler", "switched-prefill") is None)
    cluster.has_pods_wanted("switched", "prefill", 2)


@pytest.mark.parametrize("loss", ["deleted", "unlabelled"])
def test_a_scaler_that_is_lost_comes_back_with_the_size_of_the_pool(
    cluster: Cluster, loss: str
) -> None:
    cluster.serve(loss, external())
    name = f"{loss}-prefill"
    before = cluster.scaler(name)
    cluster.scale(name, 3)
    cluster.has_pods_wanted(loss, "prefill", 3)
    until("the status knows", lambda: cluster.namespace.status(loss)["prefill"]["desired"] == 3)
    if loss == "deleted":
        cluster.namespace.delete("PoolScaler", name)
    else:
        cluster.kubectl("label", "poolscaler", name, "diptych.dev/service-")

    def another() -> bool:
        found = cluster.namespace.get("PoolScaler", name)
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    until("there is a new one", another)
    found = cluster.scaler(name)
    assert found["spec"] == {"replicas": 3}
    assert found["metadata"]["labels"] == before["metadata"]["labels"]
    cluster.has_pods_wanted(loss, "prefill", 3)


def test_a_rollout_takes_the_size_that_is_asked_for_in_the_middle_of_it(cluster: Cluster) -> None:
    """Without pods that run the rollout stays in its middle, once it knows that the old served."""
    cluster.serve("rolled", external(most=9))
    cluster.scale("rolled-prefill", 2)
    cluster.has_pods_wanted("rolled", "prefill", 2)
    old = cluster.namespace.status("rolled")["updateRevision"]
    served = {"status": {"currentRevision": old}}
    cluster.namespace.merge("InferenceService", "rolled", served, part="status")
    change = {"spec": {"engine": {"maxNumSeqs": 32}}}
    cluster.namespace.merge("InferenceService", "rolled", change)
    until("both are there", lambda: len(cluster.wanted("rolled", "prefill")) == 2)
    before = cluster.wanted("rolled", "prefill")
    cluster.scale("rolled-prefill", 6)
    surge = 1
    until(
        "both together want what is asked for",
        lambda: sum(cluster.wanted("rolled", "prefill").values()) == 6 + surge,
    )
    assert before[old] > 0
    assert cluster.wanted("rolled", "prefill")[old] > 0


def test_an_object_of_somebody_else_is_left_alone_and_reported(cluster: Cluster) -> None:
    foreign = {
        "kind": "PoolScaler",
        "metadata": {"name": "taken-prefill", "namespace": cluster.namespace.name},
        "spec": {"replicas": 4},
    }
    uid = cluster.namespace.create(foreign)["metadata"]["uid"]
    cluster.serve("taken", external())
    message = cluster.namespace.degraded("taken", "ObjectNotOurs")
    assert "PoolScaler taken-prefill exists" in message
    cluster.has_pods_wanted("taken", "prefill", 1)
    assert cluster.scaler("taken-prefill")["metadata"]["uid"] == uid


def test_kubernetes_own_autoscaler_reads_and_writes_a_scaler(cluster: Cluster) -> None:
    """There are no metrics, and it says so; but it keeps its minimum without any."""
    cluster.serve("hpa", external())
    cluster.scaler("hpa-prefill")
    (example,) = (path for path in EXAMPLES if path.name == "autoscaling-hpa.yaml")
    _, prefill, _ = yaml.safe_load_all(example.read_text())
    served = cluster.kubectl("api-versions").split()
    version = newest("autoscaling", served)
    spec = prefill["spec"] | {"minReplicas": 3}
    spec["scaleTargetRef"]["name"] = "hpa-prefill"
    body = prefill | {"apiVersion": version, "metadata": {"name": "hpa"}, "spec": spec}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    path = f"/apis/{version}/namespaces/{cluster.namespace.name}/horizontalpodautoscalers/hpa"

    def says(kind: str, status: str, reason: str) -> bool:
        found = json.loads(cluster.kubectl("get", "--raw", path)).get("status", {})
        wanted = {"type": kind, "status": status, "reason": reason}
        return any(c.items() >= wanted.items() for c in found.get("conditions") or [])

    until("it scales to its minimum", lambda: hpa_size(cluster) == 3, HPA_S)
    cluster.has_pods_wanted("hpa", "prefill", 3)
    until("it reads", lambda: says("AbleToScale", "True", "SucceededGetScale"), HPA_S)
    # Not InvalidSelector: it has found the pods, and only then asks for what they measure.
    until("it asks", lambda: says("ScalingActive", "False", "FailedGetPodsMetric"), HPA_S)


def hpa_size(cluster: Cluster) -> int:
    return int(cluster.scaler("hpa-prefill")["spec"]["replicas"])


def test_without_the_right_to_scalers_all_else_works_and_who_needs_them_is_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """An operator whose chart is older than it; a missing CRD looks to it just alike."""
    folder = tmp_path_factory.mktemp("older")
    with Namespace("no-scalers") as namespace:
        identity = Identity(namespace, folder)
        cluster = Cluster(namespace)
        role = json.loads(cluster.kubectl("get", "role", "-o", "json"))["items"]
        (granted,) = (r for r in role if not r["metadata"]["name"].endswith("-leader"))
        rules = [r for r in granted["rules"] if "poolscalers" not in r["resources"]]
        assert len(rules) < len(granted["rules"])
        patch = json.dumps({"rules": rules})
        cluster.kubectl("patch", "role", granted["metadata"]["name"], "--type=merge", "-p", patch)
        with running(Operator(folder / "log", identity.arguments, identity.kubeconfig)):
            cluster.serve("needs", external(least=2))
            cluster.serve("does-not", {"replicas": 1})
            message = namespace.degraded("needs", "PoolScalerUnavailable")
            assert "apply the chart" in message
            cluster.has_pods_wanted("needs", "prefill", 2)
            cluster.has_pods_wanted("does-not", "prefill", 1)
            until("the other has a status", lambda: namespace.condition("does-not", "Degraded"))
            told = namespace.condition("does-not", "Degraded")["message"]
            assert "PoolScaler" not in told
