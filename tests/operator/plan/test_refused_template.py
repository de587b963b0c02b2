"""A podTemplate that is refused in the middle of something: what serves is looked after."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cluster_kit.promised_pool import router_report
from cluster_kit.reconciling import KEY, Store, operating, passes

from diptych_protocol.admin import RouterReport, TrialReport

OURS = {"podTemplate": {"metadata": {"labels": {"diptych.dev/role": "other"}}}}
"""The operator itself refuses it."""
THEIRS = {"podTemplate": {"spec": {"hostNetworking": True}}}
"""The API server does; see `Store.refuses_pods`."""
SPEC: dict[str, Any] = {"transfer": {"verify": "Off"}, "engine": {"image": "one"}}


def telling(*revisions: str, trial: TrialReport | None = None) -> RouterReport:
    """A router that serves these."""
    report = router_report([], trial=trial)
    return msgspec.structs.replace(report, serving_revisions=sorted(revisions))


def sizes(store: Store) -> dict[str, int]:
    return {d["metadata"]["name"]: d["spec"]["replicas"] for d in store.deployments()}


def serving(store: Store) -> list[str]:
    (told,) = (o for p, o in store.objects.items() if p.endswith("/configmaps/svc-serving"))
    revisions: list[str] = msgspec.json.decode(told["data"]["serving.json"])["revisions"]
    return revisions


async def settled(store: Store, reconciler: Any) -> str:
    """The revision that serves."""
    await passes(store, reconciler)
    revision: str = store.service(KEY)["status"]["currentRevision"]
    assert revision
    return revision


def refuse(store: Store, change: dict[str, Any]) -> None:
    store.spec = {**store.spec, "decode": {**store.spec.get("decode", {}), **change}}
    store.refuses_pods = (422, "no such field") if change is THEIRS else None


@pytest.mark.parametrize("change", [OURS, THEIRS], ids=["by us", "by the API server"])
async def test_recreate_lets_nothing_go_for_pods_that_cannot_come(change: dict[str, Any]) -> None:
    store = Store()
    store.spec = {**SPEC, "rollout": {"type": "Recreate"}}
    async with operating(store) as reconciler:
        await settled(store, reconciler)
        before = sizes(store)
        store.spec = {**store.spec, "engine": {"image": "two"}}
        refuse(store, change)
        await reconciler.reconcile(KEY)
        assert store.condition("Degraded")["reason"] == "PodTemplateRejected"
        assert sizes(store) == before


@pytest.mark.parametrize("change", [OURS, THEIRS], ids=["by us", "by the API server"])
async def test_a_canary_that_fails_gets_no_more_requests_and_pools_grow(
    change: dict[str, Any],
) -> None:
    store = Store()
    canary = {"steps": [{"weight": 10, "pauseSeconds": 600}]}
    store.spec = {**SPEC, "rollout": {"type": "Canary", "canary": canary}}
    async with operating(store) as reconciler:
        old = await settled(store, reconciler)
        store.reports = [telling(old)]
        store.spec = {**store.spec, "engine": {"image": "two"}}
        await passes(store, reconciler)
        new = store.service(KEY)["status"]["updateRevision"]
        assert serving(store) == sorted((old, new))
        refuse(store, change)
        store.spec["decode"]["replicas"] = 2
        seen = TrialReport(revision=new, weight=10, requests=9, failed=9)
        store.reports = [telling(old, new, trial=seen)]
        await reconciler.reconcile(KEY)
        assert store.condition("Degraded")["reason"] == "PodTemplateRejected"
        assert serving(store) == [old]
        assert sizes(store)[f"svc-decode-{old}"] == 2
