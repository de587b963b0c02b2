"""What `spec.workload: DisaggregatedSet` becomes, and how it is read as the Deployments it is."""

from __future__ import annotations

from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from cluster_kit.crds import strict
from cluster_kit.reconciling import edited
from cluster_kit.set_kind import SET_SCHEMA

from diptych_operator.api.base import Object, SpecError
from diptych_operator.api.names import COMPONENT_LABEL, KEYS_LABEL, REVISION_LABEL, ROLE_LABEL
from diptych_operator.api.parse import parse
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.cluster import SET_KIND, Cluster
from diptych_operator.kube.watch import trimmed
from diptych_operator.kube.workloads import as_deployments, resized, sizes
from diptych_operator.render import KeySets, NoSetsError, render_revision
from diptych_operator.revision import revision
from diptych_operator.status.observed import deployment_view

QUEUE = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}


def service(**spec: Any) -> InferenceService:
    parts = {
        "model": {"uri": "dummy://"},
        "prefill": {},
        "decode": {},
        "workload": SET_KIND,
        **spec,
    }
    raw = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "models"},
        "spec": {name: part for name, part in parts.items() if part is not None},
    }
    return parse(yaml.safe_dump(raw))


def rendered(owner: InferenceService, *in_place: str, **cluster: bool) -> list[Object]:
    able = Cluster(**cluster)  # type: ignore[arg-type]
    return render_revision(owner, able, "r", KeySets("keys"), Counts(2, 3), in_place)


def the_set(owner: InferenceService, *in_place: str) -> Object:
    (made,) = (obj for obj in rendered(owner, *in_place) if obj["kind"] == SET_KIND)
    return made


def live(**status: Any) -> Object:
    """As a watch keeps it."""
    made = the_set(service()) | {"status": status}
    made["metadata"] |= {"uid": "u", "generation": 7}
    return dict(trimmed(made))


def test_it_is_the_very_pools_that_deployments_would_be() -> None:
    asked = the_set(service(prefill={"podTemplate": {"spec": {"nodeSelector": {"disk": "fast"}}}}))
    plain = service(
        prefill={"podTemplate": {"spec": {"nodeSelector": {"disk": "fast"}}}}, workload="Deployment"
    )
    pools = [obj for obj in rendered(plain) if obj["kind"] == "Deployment"]
    for stands_for, pool in zip(as_deployments(asked), pools, strict=True):
        assert stands_for["spec"]["template"] == pool["spec"]["template"]
        assert stands_for["spec"]["replicas"] == pool["spec"]["replicas"]
        assert stands_for["spec"]["strategy"] == pool["spec"]["strategy"]
        assert stands_for["metadata"]["labels"] == pool["metadata"]["labels"]
    assert {obj["kind"] for obj in rendered(service())} == {"ConfigMap", SET_KIND}
    labels = asked["metadata"]["labels"]
    assert (labels[REVISION_LABEL], labels[KEYS_LABEL]) == ("r", "keys")
    assert ROLE_LABEL not in labels
    assert asked["metadata"]["name"] == "svc-r"


@pytest.mark.parametrize("runtime", ["diptych", "vllm"])
def test_it_fits_the_schema_of_its_kind(runtime: str) -> None:
    vllm = {"model": {"uri": "pvc://m/l"}, "engine": {"runtime": "vllm", "image": "vllm:1"}}
    spec = vllm if runtime == "vllm" else {}
    made = the_set(service(**spec, decode={"podTemplate": {"metadata": QUEUE}}))
    jsonschema.validate(msgspec.to_builtins(made), strict(SET_SCHEMA))


def test_what_a_pod_template_asks_of_queues_the_groups_ask_too() -> None:
    prefill, decode = the_set(service(decode={"podTemplate": {"metadata": QUEUE}}))["spec"]["roles"]
    assert "metadata" not in prefill
    assert decode["metadata"] == QUEUE


def test_a_group_is_one_pod_that_is_replaced_as_a_deployment_replaces_it() -> None:
    owner = service(rollout={"maxSurge": 3, "maxUnavailable": 1})
    for role in the_set(owner)["spec"]["roles"]:
        assert role["spec"]["leaderWorkerTemplate"]["size"] == 1
        assert role["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"
        rolling = role["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert rolling == {"maxSurge": 3, "maxUnavailable": 1}


def test_a_pool_makes_room_in_place_alone() -> None:
    prefill, decode = map(deployment_view, as_deployments(the_set(service(), "decode")))
    assert (prefill.in_place, decode.in_place) == (False, True)


def test_another_workload_is_another_revision_and_names_of_old_ones_stay() -> None:
    names = {
        revision(service()),
        revision(service(workload="Deployment")),
        revision(service(workload=None)),
    }
    assert len(names) == 2


def test_a_cluster_without_the_kind_is_told_of_with_a_remedy() -> None:
    with pytest.raises(NoSetsError, match=r"install LeaderWorkerSet"):
        rendered(service(), has_sets=False)
    assert rendered(service(workload="Deployment"), has_sets=False)


def test_one_pool_has_no_two_roles() -> None:
    engine = {"runtime": "vllm", "image": "vllm:1"}
    with pytest.raises(SpecError, match=r"spec\.workload.*two roles"):
        service(model={"uri": "pvc://m/l"}, engine=engine, prefill=None)


def test_its_status_is_read_as_that_of_deployments() -> None:
    told = [
        {"name": "decode", "replicas": 4, "readyReplicas": 3, "updatedReplicas": 2},
        {"name": "prefill", "replicas": 2, "readyReplicas": 2, "updatedReplicas": 2},
    ]
    made = live(roleStatuses=told, observedGeneration=7)
    prefill, decode = map(deployment_view, as_deployments(made))
    assert (prefill.role, prefill.revision, prefill.wanted, prefill.ready) == ("prefill", "r", 2, 2)
    assert (decode.wanted, decode.ready, decode.updated) == (3, 3, 2)
    assert (prefill.settled, decode.settled) == (True, False)
    late, _ = map(deployment_view, as_deployments(live(roleStatuses=told, observedGeneration=6)))
    assert not late.settled


def test_one_that_no_controller_has_seen_has_no_pods() -> None:
    for view in map(deployment_view, as_deployments(live())):
        assert (view.ready, view.updated, view.settled) == (0, 0, False)


def test_both_sizes_change_at_once_and_nothing_else() -> None:
    made = live()
    assert sizes(made) == {"prefill": 2, "decode": 3}
    after = edited(made, resized(made, NOTHING))
    assert sizes(after) == {"prefill": 0, "decode": 0}
    for role in (*made["spec"]["roles"], *after["spec"]["roles"]):
        role["spec"]["replicas"] = 0
    assert after == made


def test_other_objects_stand_for_no_deployment() -> None:
    assert as_deployments({"kind": "ConfigMap"}) == []
    assert COMPONENT_LABEL in as_deployments(live())[0]["metadata"]["labels"]
