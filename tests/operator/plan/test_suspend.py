"""Whatever is wrong with a service, it can be stopped."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from cluster_kit.reconciling import Store, one_pass

from diptych_operator.kube.client import ApiError


@pytest.mark.parametrize(
    ("refused", "template"),
    [(True, {"spec": {"nodeSelector": {"a": "b"}}}), (False, {"spec": {"containers": "none"}})],
    ids=["refused by the API server", "does not even render"],
)
async def test_a_service_stops_though_its_pod_template_is_wrong(
    refused: bool, template: dict[str, Any]
) -> None:
    store = Store()
    await one_pass(store)
    store.start_pods()
    assert {found["spec"]["replicas"] for found in store.deployments()} == {1}
    store.refuses_pods = (422, "not so") if refused else None
    store.spec = {"suspend": True, "decode": {"podTemplate": template}}
    await one_pass(store)
    assert {found["spec"]["replicas"] for found in store.deployments()} == {0}
    assert store.condition("Degraded")["reason"] == "PodTemplateRejected"


@pytest.mark.parametrize("kind", ["secrets", "deployments"])
async def test_a_service_stops_though_it_may_not_adopt_what_was_left(kind: str) -> None:
    store = Store()
    await one_pass(store)
    for obj in store.objects.values():
        obj["metadata"].pop("ownerReferences", None)
    store.uid, store.spec, store.refuses_owners_of = "u2", {"suspend": True}, kind
    with contextlib.suppress(ApiError):  # the queue would try again
        await one_pass(store)
    assert {found["spec"]["replicas"] for found in store.deployments()} == {0}
    degraded = store.condition("Degraded")
    assert degraded["reason"] == "OperatorProblem"
    assert degraded["message"].endswith("not you.")


async def test_a_service_stops_though_its_spec_cannot_be_read() -> None:
    store = Store()
    await one_pass(store)
    store.spec = {"suspend": True, "decode": {"replicas": "many"}}
    await one_pass(store)
    assert {found["spec"]["replicas"] for found in store.deployments()} == {0}
    assert store.condition("Degraded")["reason"] == "SpecInvalid"
