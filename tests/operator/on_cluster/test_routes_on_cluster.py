"""A ModelRoute in a real cluster, by an operator with the rights that the chart gives.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs of this version. The images do not exist, so no pod ever runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_kit.namespaces import KUBECONFIG, Namespace, until
from cluster_kit.operators import NO_IMAGE, Identity, Operator, metric_change, running

pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster to run the operator against"
)
SPEC = {
    "image": NO_IMAGE,
    "models": [{"name": "m", "services": [{"name": "absent"}]}],
    "podTemplate": {"spec": {"nodeSelector": {"no": "such-node"}}},
}
KINDS = ("ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment")


def test_a_route_is_made_mended_and_removed_with_its_objects(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart

    def said() -> str:
        status = namespace.there("ModelRoute", "front").get("status") or {}
        return next((f"{c['reason']}: {c['message']}" for c in status.get("conditions", ())), "")

    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with running(operator):
        namespace.create({"kind": "ModelRoute", "metadata": {"name": "front"}, "spec": SPEC})
        until("its status says that no pod runs", lambda: said().startswith("PodsNotReady"))
        until("and why", lambda: "fits no node" in said())
        uids = {kind: namespace.there(kind, "front-route")["metadata"]["uid"] for kind in KINDS}
        namespace.delete("Service", "front-route")
        until(
            "the Service is made anew",
            lambda: (
                (namespace.get("Service", "front-route") or {"metadata": {"uid": ""}})["metadata"][
                    "uid"
                ]
                not in ("", uids["Service"])
            ),
        )
        change, renewals = metric_change(operator, namespace, identity.lease, 20.0)
        assert change["diptych_operator_api_requests"] == renewals  # at rest nothing is asked
        namespace.merge("ModelRoute", "front", {"spec": {"replicas": 3}})
        until(
            "the Deployment grows",
            lambda: namespace.there("Deployment", "front-route")["spec"]["replicas"] == 3,
        )
        namespace.delete("ModelRoute", "front")
        until("they go with it", lambda: namespace.get("Deployment", "front-route") is None)
