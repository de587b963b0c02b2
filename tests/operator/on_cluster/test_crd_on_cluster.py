"""The CRD in a real cluster, seen through kubectl.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig. The CRD is installed in a
group of the test's own and removed with it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from cluster_kit.apply_crds import wait_until_established
from cluster_kit.crds import SCHEMA, definition_in, inference_service, with_defaults
from cluster_kit.kube_tools import ToolUnavailable, find_tool
from cluster_kit.old_clusters import has_rules
from waits import wait_until

from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_operator.api.status import PoolStatus, Status

KUBECONFIG = os.environ.get("DIPTYCH_TEST_KUBECONFIG")
pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster to install the CRD into"
)
COMMAND_TIMEOUT_S = 120


class Cluster:
    """A cluster with the CRD in a group, and a namespace, of this test run's own."""

    def __init__(self) -> None:
        try:
            self._kubectl = find_tool("kubectl")
        except ToolUnavailable as exc:
            pytest.skip(str(exc))
        run = f"t{secrets.token_hex(4)}"
        self.group = f"{run}.diptych.dev"
        self.resource = f"inferenceservices.{self.group}"
        self.namespace = f"crd-{run}"

    def kubectl(self, *arguments: str, stdin: dict[str, Any] | None = None) -> str:
        """What a command prints. Fails the test with what it says if it fails."""
        done = self._run(arguments, stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def refused(self, service: dict[str, Any]) -> str:
        """What the API server says when it does not admit an object."""
        command = ("create", "--dry-run=server", "--validate=false", "-f", "-")
        done = self._run(command, self.mine(service))
        assert done.returncode != 0, "it was admitted"
        return done.stderr

    def apply(self, service: dict[str, Any]) -> dict[str, Any]:
        """The object as it is after a server-side apply."""
        command = ("apply", "--server-side", "--force-conflicts", "-o", "json", "-f", "-")
        return dict(json.loads(self.kubectl(*command, stdin=self.mine(service))))

    def mine(self, service: dict[str, Any]) -> dict[str, Any]:
        """An InferenceService in this run's group."""
        return service | {"apiVersion": f"{self.group}/v1alpha1"}

    def _run(
        self, arguments: Any, stdin: dict[str, Any] | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self._kubectl), "--kubeconfig", str(KUBECONFIG), "-n", self.namespace, *arguments],
            input=json.dumps(stdin) if stdin else None,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    definition = definition_in(cluster.group, rules=has_rules(cluster.kubectl))
    try:
        cluster.kubectl("create", "namespace", cluster.namespace)
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=definition)
        wait_until_established(cluster.kubectl, definition["metadata"]["name"])
        _wait_until_explained(cluster)
        yield cluster
    finally:
        cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=false")
        cluster.kubectl("delete", "crd", definition["metadata"]["name"], "--ignore-not-found")


def _wait_until_explained(cluster: Cluster) -> None:
    """API servers publish the schema of a new CRD a moment after they serve it."""
    wait_until(lambda: "pools" in explain(cluster, "", must=False), "the schema is published")


def explain(cluster: Cluster, path: str, *flags: str, must: bool = True) -> str:
    version = f"--api-version={cluster.group}/v1alpha1"
    command = ("explain", f"inferenceservices{path}", version, *flags)
    return cluster.kubectl(*command) if must else cluster._run(command, None).stdout


def test_the_schema_is_structural(cluster: Cluster) -> None:
    crd = json.loads(cluster.kubectl("get", "crd", cluster.resource, "-o", "json"))
    conditions = {item["type"]: item["status"] for item in crd["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


def test_the_smallest_service_gets_every_default(cluster: Cluster) -> None:
    smallest = inference_service({}, name="smallest")
    live = cluster.apply(smallest)
    assert live["spec"] == with_defaults(smallest["spec"], SCHEMA["properties"]["spec"])
    assert "status" not in live
    read = parse_object(live | {"apiVersion": "diptych.dev/v1alpha1"}, Images())
    assert read.spec == parse_object(smallest, Images()).spec
    assert (read.metadata.namespace, read.metadata.generation) == (cluster.namespace, 1)


def test_the_status_is_written_apart_and_shown_in_columns(cluster: Cluster) -> None:
    generation = cluster.apply(
        inference_service({}, name="shown") | {"status": {"url": "http://spec-writer"}}
    )["metadata"]["generation"]
    conditions = [
        {
            "type": kind,
            "status": status,
            "reason": f"{kind}Reason",
            "message": "said by a test",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for kind, status in (("Available", "True"), ("KVTransferVerified", "Unknown"))
    ]
    status = {
        "url": "http://shown-router",
        "currentRevision": "6f9c1d20",
        "prefill": {"summary": "1/1"},
        "decode": {"summary": "0/2"},
        "conditions": conditions,
    }
    patch = json.dumps({"status": status, "spec": {"suspend": True}})
    command = ("patch", cluster.resource, "shown", "--subresource=status", "--type=merge")
    live = json.loads(cluster.kubectl(*command, "-p", patch, "-o", "json"))
    assert live["status"] == status
    assert live["spec"]["suspend"] is False
    assert live["metadata"]["generation"] == generation
    header, row = cluster.kubectl("get", cluster.resource, "shown").splitlines()
    assert header.split() == [
        "NAME", "MODEL", "PREFILL", "DECODE", "KV", "AVAILABLE", "REVISION", "AGE",
    ]  # fmt: skip
    assert row.split()[:-1] == ["shown", "dummy://", "1/1", "0/2", "Unknown", "True", "6f9c1d20"]
    wide = cluster.kubectl("get", cluster.resource, "shown", "-o", "wide")
    assert "http://shown-router" in wide
    assert "AvailableReason" in wide


def test_kubectl_explains_every_field(cluster: Cluster) -> None:
    for pool in ("prefill", "decode"):
        listed = explain(cluster, f".spec.{pool}", "--recursive").split()
        for name in SCHEMA["properties"]["spec"]["properties"][pool]["properties"]:
            assert name in listed
    text = " ".join(explain(cluster, ".spec.decode.autoscaling.kvUtilization").split())
    assert "Percent of KV blocks that are to be in use, on average." in text
    text = " ".join(explain(cluster, ".status.transfer.blocks").split())
    assert "KV blocks that the last canary moved." in text


def test_a_status_of_the_operator_is_accepted_however_empty(cluster: Cluster) -> None:
    cluster.apply(inference_service({}, name="written"))
    status = Status(url="http://written-router", prefill=PoolStatus(desired=1), conditions=[])
    written = cluster.mine(inference_service({}, name="written")) | {
        "status": msgspec.to_builtins(status)
    }
    del written["spec"]
    command = ("apply", "--server-side", "--subresource=status", "--validate=false")
    live = json.loads(cluster.kubectl(*command, "-o", "json", "-f", "-", stdin=written))
    assert parse_object(live | {"apiVersion": "diptych.dev/v1alpha1"}, Images()).status == status


def test_a_pod_template_is_kept_as_written(cluster: Cluster) -> None:
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "runtimeClassName": "gvisor",
            "nodeSelector": None,
            "containers": [
                {"name": "engine", "env": [{"name": "A", "value": "1"}], "livenessProbe": None}
            ],
        },
        "unheardOf": {"x": [1, None]},
    }
    live = cluster.apply(inference_service({"decode": {"podTemplate": template}}, name="template"))
    assert live["spec"]["decode"]["podTemplate"] == template


def test_quantities_stay_numbers_or_texts(cluster: Cluster) -> None:
    limits = {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": "1", "example.org/x": 0}
    spec = {"prefill": {"resources": {"limits": limits}}}
    live = cluster.apply(inference_service(spec, name="quantities"))
    assert live["spec"]["prefill"]["resources"] == {"limits": limits, "requests": {}}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"engine": {"blockSize": 3}}, "spec.engine.blockSize"),
        ({"prefill": {"replicas": 0}}, "spec.prefill.replicas"),
        ({"decode": {"autoscaling": {}}}, "spec.decode.autoscaling.maxReplicas"),
        ({"model": {"uri": "ftp://host/a"}}, "spec.model.uri"),
        ({"prefill": {"resources": {"limits": {"cpu": "4 cores"}}}}, "spec.prefill.resources"),
        ({"transfer": {"leaseSeconds": 0.5}}, "spec.transfer.leaseSeconds"),
        ({"rollout": {"type": "Rolling"}}, "spec.rollout.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_refused_by_name(
    cluster: Cluster, spec: dict[str, Any], field: str
) -> None:
    assert field in cluster.refused(inference_service(spec))


@pytest.mark.parametrize("name", ["a" * 41, "1a", "a.b"])
def test_a_name_that_children_could_not_bear_is_refused(cluster: Cluster, name: str) -> None:
    assert "metadata.name" in cluster.refused(inference_service({}, name=name))
