"""`spec.workload: DisaggregatedSet` on a real API server, with the kind's CRD and the rights that
the chart gives. No controller of LeaderWorkerSet is there: the tests write the status of one.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs of this version, and that of DisaggregatedSets (`cluster_kit.apply_crds`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chaos_kit.namespaces import KUBECONFIG, Namespace, NoLongerThere, Object, until
from cluster_kit.operators import NO_IMAGE, Home, Identity, Operator, running, without_rights

from diptych_operator.api.names import REVISION_LABEL
from diptych_operator.kube.cluster import SET_KIND
from diptych_operator.kube.workloads import sizes

pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster with the CRDs"
)
T = TypeVar("T")
SPEC: dict[str, Any] = {
    "workload": SET_KIND,
    "transfer": {"verify": "Off"},
    "engine": {"image": NO_IMAGE},
    "router": {"image": NO_IMAGE},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3},
}


def sets(home: Home, service: str) -> dict[str, Object]:
    """By revision."""
    found = home.namespace.list(SET_KIND, f"diptych.dev/service={service}")
    return {raw["metadata"]["labels"][REVISION_LABEL]: raw | {"kind": SET_KIND} for raw in found}


def controlled(home: Home, service: str, what: str, look: Callable[[dict[str, Object]], T]) -> T:
    """The first true result of `look`, while every pod that is wanted is said to be ready."""

    def once() -> T:
        found = sets(home, service)
        for raw in found.values():
            generation = raw["metadata"]["generation"]
            if (raw.get("status") or {}).get("observedGeneration") != generation:
                tell(home, raw)
        return look(found)

    return until(what, once)


def tell(home: Home, raw: Object) -> None:
    counts = ("replicas", "readyReplicas", "updatedReplicas")
    roles = [{"name": role, **dict.fromkeys(counts, many)} for role, many in sizes(raw).items()]
    status = {"observedGeneration": raw["metadata"]["generation"], "roleStatuses": roles}
    try:
        home.namespace.merge(SET_KIND, raw["metadata"]["name"], {"status": status}, "status")
    except NoLongerThere:
        return


def change(home: Home, service: str, spec: Object) -> None:
    home.namespace.merge("InferenceService", service, {"spec": spec})


def test_a_service_lives_in_sets(home: Home) -> None:
    namespace = home.namespace
    namespace.serve("svc", **SPEC)

    def ready(_: object) -> bool:
        return namespace.condition("svc", "Progressing").get("reason") == "Idle"

    controlled(home, "svc", "the pools are ready", ready)
    ((first, made),) = sets(home, "svc").items()
    assert made["metadata"]["name"] == f"svc-{first}"
    assert sizes(made) == {"prefill": 2, "decode": 3}
    assert [o["name"] for o in made["metadata"]["ownerReferences"]] == ["svc"]
    pools = [d for d in namespace.list("Deployment") if "-router" not in d["metadata"]["name"]]
    assert not pools

    change(home, "svc", {"decode": {"replicas": 4}})
    controlled(home, "svc", "decode grows", lambda now: sizes(now[first])["decode"] == 4)

    change(home, "svc", {"engine": {"image": f"{NO_IMAGE}-2"}})
    seen: list[dict[str, dict[str, int]]] = []

    def replaced(now: dict[str, Object]) -> bool:
        seen.append({name: sizes(raw) for name, raw in now.items()})
        return first not in now and bool(now)

    controlled(home, "svc", "another set takes its place", replaced)
    assert any(0 < step[first]["decode"] < 4 for step in seen if first in step)
    ((second, _),) = sets(home, "svc").items()

    change(home, "svc", {"suspend": True})
    none = {"prefill": 0, "decode": 0}
    controlled(home, "svc", "nobody is wanted", lambda now: sizes(now[second]) == none)


def test_pods_that_cannot_be_are_told_of_though_the_sets_crd_takes_them(home: Home) -> None:
    volume = {"name": "x", "emptyDir": {}, "configMap": {"name": "x"}}
    wrong = {"podTemplate": {"spec": {"volumes": [volume]}}}
    home.namespace.serve("wrong", **SPEC | {"decode": wrong})
    message = home.namespace.degraded("wrong", "PodTemplateRejected")
    assert "spec.decode.podTemplate" in message
    assert not sets(home, "wrong")


def test_an_operator_that_may_not_watch_them_says_what_to_do(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart
    namespace.serve("denied", **SPEC)
    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with without_rights(namespace, "disaggregatedsets"), running(operator):
        message = namespace.degraded("denied", "DisaggregatedSetUnavailable")
        assert "install LeaderWorkerSet" in message
