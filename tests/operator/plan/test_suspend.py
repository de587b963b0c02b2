"""Whatever is wrong with a service, it can be stopped."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit.reconciling import Store, one_pass


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
    store.refuses_pods = refused
    store.spec = {"suspend": True, "decode": {"podTemplate": template}}
    await one_pass(store)
    assert {found["spec"]["replicas"] for found in store.deployments()} == {0}
    assert store.condition("Degraded")["reason"] == "PodTemplateRejected"
