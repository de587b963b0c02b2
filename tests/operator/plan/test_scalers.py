"""Pools that are sized from outside: what is asked for, what holds, and what the examples need."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import yaml
from cluster_kit.crds import EXAMPLES, SCHEMA, inference_service, service_of, with_defaults
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from diptych_frontend.observability.metrics import ServerMetrics
from diptych_operator.api.images import Images
from diptych_operator.api.names import metadata, selector
from diptych_operator.api.parse import parse_object
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import PoolStatus, Status
from diptych_operator.kube.children import ChildId, child_id, with_owner
from diptych_operator.kube.cluster import Cluster
from diptych_operator.kube.watch import settings
from diptych_operator.render import KeySets, fixed_counts
from diptych_operator.scalers import (
    scaled_from_outside,
    scaler,
    scaler_ids,
    scaler_status,
    size,
    with_sizes_from_outside,
)
from diptych_operator.service_snapshot import ServiceSnapshot
from diptych_operator.status.observed import Observed, PodView
from diptych_protocol import KVTransferStats, SchedulerStats

EXTERNAL = {"autoscaling": {"by": "External", "minReplicas": 2, "maxReplicas": 5}}
(HPA_EXAMPLE,) = (path for path in EXAMPLES if path.name == "autoscaling-hpa.yaml")


def service(**spec: Any) -> InferenceService:
    found = parse_object(inference_service(spec), Images())
    return msgspec.structs.replace(
        found, metadata=msgspec.structs.replace(found.metadata, uid="uid-1")
    )


def live(owner: InferenceService, **asked: int) -> dict[ChildId, Any]:
    """PoolScalers of a service, with the sizes that somebody asks for."""
    made = [with_owner(scaler(owner, role, n), owner) for role, n in asked.items()]  # type: ignore[arg-type]
    return {child_id(item): item for item in made}


def aim(owner: InferenceService) -> Counts:
    return ServiceSnapshot(owner, "rev", KeySets("keys"), {}, [], Observed()).aim


def sizes(owner: InferenceService, **asked: int) -> Counts:
    return fixed_counts(with_sizes_from_outside(owner, live(owner, **asked), aim(owner)))


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 2), (1, 2), (2, 2), (3, 3), (5, 5), (6, 5), (1000, 5)]
)
def test_what_is_asked_for_holds_within_the_bounds(asked: int, given: int) -> None:
    owner = service(prefill=EXTERNAL, decode={"replicas": 7})
    assert sizes(owner, prefill=asked) == Counts(given, 7)


@given(least=st.integers(1, 9), more=st.integers(0, 9), asked=st.integers(0, 1000))
def test_no_size_leaves_the_bounds_and_none_within_them_is_changed(
    least: int, more: int, asked: int
) -> None:
    bounds = {"by": "External", "minReplicas": least, "maxReplicas": least + more}
    found = size(service(decode={"autoscaling": bounds}), "decode", asked)
    assert least <= found <= least + more
    assert found == asked or not least <= asked <= least + more


def test_each_pool_has_its_own_say() -> None:
    owner = service(prefill=EXTERNAL, decode=EXTERNAL)
    assert scaled_from_outside(owner) == ("prefill", "decode")
    assert sizes(owner, prefill=3, decode=4) == Counts(3, 4)
    assert [name for _, _, name in sorted(scaler_ids(owner))] == ["svc-decode", "svc-prefill"]


@pytest.mark.parametrize("by", [{}, {"by": "Operator"}])
def test_pools_that_the_operator_scales_have_no_scaler(by: dict[str, str]) -> None:
    owner = service(prefill={"autoscaling": {"maxReplicas": 4, **by}})
    assert scaler_ids(owner) == set()
    left_over = live(owner, prefill=4, decode=4)
    assert with_sizes_from_outside(owner, left_over, Counts(1, 1)) == owner


@pytest.mark.parametrize(("desired", "seed"), [(0, 2), (1, 2), (4, 4), (9, 5)])
def test_a_pool_without_its_scaler_keeps_its_size(desired: int, seed: int) -> None:
    """So it is while the operator creates the object, and where it cannot."""
    status = Status(
        update_revision="rev", prefill=PoolStatus(desired=desired), decode=PoolStatus(desired=1)
    )
    owner = msgspec.structs.replace(service(prefill=EXTERNAL), status=status)
    assert sizes(owner) == Counts(seed, 1)
    assert size(owner, "prefill", aim(owner).prefill) == seed


def test_a_new_service_begins_at_the_minimum() -> None:
    assert sizes(service(prefill=EXTERNAL)) == Counts(2, 1)


def test_a_suspended_service_has_no_pods_and_seeds_the_size_it_will_come_back_with() -> None:
    owner = msgspec.structs.replace(
        service(prefill=EXTERNAL, suspend=True), status=Status(update_revision="rev")
    )
    assert sizes(owner, prefill=4) == Counts(0, 0)
    assert size(owner, "prefill", aim(owner).prefill) == 2


def test_a_scaler_that_an_earlier_service_left_says_nothing() -> None:
    owner = service(prefill=EXTERNAL)
    earlier = msgspec.structs.replace(
        owner, metadata=msgspec.structs.replace(owner.metadata, uid="uid-0")
    )
    left = live(earlier, prefill=5)
    assert fixed_counts(with_sizes_from_outside(owner, left, aim(owner))) == Counts(2, 1)


def test_the_status_has_the_selector_of_the_pools_pods_as_text() -> None:
    owner = service(prefill=EXTERNAL)
    text = "diptych.dev/role=prefill,diptych.dev/service=svc"
    status = {"replicas": 0, "readyReplicas": 0, "selector": text}
    assert scaler_status(owner, "prefill", Observed()) == status
    assert dict(part.split("=") for part in text.split(",")) == selector(owner, "prefill")


def test_the_status_counts_pods_that_load_and_not_those_that_leave() -> None:
    """By what is ready alone, an HPA would take away the pods that it has just asked for."""

    def pod(
        name: str, ready: bool = False, phase: str = "Running", leaves: bool = False
    ) -> PodView:
        return PodView(name, "prefill", "rev", phase, ready, terminating=leaves)

    pods = (
        pod("serves", ready=True),
        pod("loads"),
        pod("waits", phase="Pending"),
        pod("leaves", ready=True, leaves=True),
        pod("was-evicted", phase="Failed"),
        PodView("other", "decode", "rev", "Running", ready=True, terminating=False),
    )
    status = scaler_status(service(prefill=EXTERNAL), "prefill", Observed(pods=pods))
    assert (status["replicas"], status["readyReplicas"]) == (3, 1)


# --- the watches ------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
def test_only_scalers_with_our_labels_are_watched_and_only_where_they_can_be(there: bool) -> None:
    selectors = settings(Cluster(has_pool_scalers=there)).watching.label_selectors
    assert selectors.get("poolscalers") == (selectors["deployments"] if there else None)


# --- the example ------------------------------------------------------------------------------


def autoscalers() -> list[dict[str, Any]]:
    objects = yaml.safe_load_all(HPA_EXAMPLE.read_text())
    return [item for item in objects if item["kind"] == "HorizontalPodAutoscaler"]


def test_each_autoscaler_of_the_example_finds_its_scaler_and_has_its_bounds() -> None:
    owner = parse_object(service_of(HPA_EXAMPLE), Images())
    by_name = {metadata(owner, role, role)["name"]: role for role in scaled_from_outside(owner)}
    targets = [item["spec"]["scaleTargetRef"] for item in autoscalers()]
    assert {target["name"] for target in targets} == set(by_name)
    for item, target in zip(autoscalers(), targets, strict=True):
        made = scaler(owner, by_name[target["name"]], 1)
        assert (target["apiVersion"], target["kind"]) == (made["apiVersion"], made["kind"])
        assert item["spec"]["minReplicas"] == size(owner, by_name[target["name"]], 0)
        assert item["spec"]["maxReplicas"] == size(owner, by_name[target["name"]], 1000)


def test_the_example_and_the_page_ask_for_metrics_that_engines_export() -> None:
    stats = SchedulerStats(kv_transfer=KVTransferStats())
    server = ServerMetrics("m", lambda: {"engine": stats})
    exported = set(re.findall(r"^diptych:\w+", generate_latest(server.registry).decode(), re.M))
    asked = re.findall(r"name: diptych_(\w+)", HPA_EXAMPLE.read_text())
    page = (HPA_EXAMPLE.parents[1] / "docs" / "autoscaling.md").read_text()
    named = re.findall(r"diptych:(\w+)", page)
    assert len(asked) == 3
    assert {f"diptych:{name}" for name in (*asked, *named)} <= exported
    (series,) = re.findall(r"diptych:\(([\w|]+)\)", page)
    assert set(series.split("|")) == set(asked), "the adapter's rule brings what the example needs"


def test_the_services_on_the_page_can_be_had() -> None:
    page = (HPA_EXAMPLE.parents[1] / "docs" / "autoscaling.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    specs = [block for block in blocks if block.keys() <= {"prefill", "decode"}]
    assert len(specs) == 2
    for spec in specs:
        written = inference_service(spec)
        parse_object(with_defaults(written, SCHEMA), Images())
