"""A service whose pods come from DisaggregatedSets: rolled, sized and told of as any other."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit.reconciling import KEY, Store, operating, passes

from diptych_operator.api.names import REVISION_LABEL
from diptych_operator.kube.cluster import SET_KIND, Cluster
from diptych_operator.kube.watch import settings
from diptych_operator.kube.workloads import sizes

SPEC: dict[str, Any] = {
    "workload": SET_KIND,
    "transfer": {"verify": "Off"},
    "engine": {"image": "one"},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3},
}


def sets(store: Store) -> dict[str, dict[str, int]]:
    """Pods that each is to have, by revision."""
    return {
        made["metadata"]["labels"][REVISION_LABEL]: sizes(made)
        for made in store.children(KEY)
        if made["kind"] == SET_KIND
    }


def asking(**spec: Any) -> Store:
    store = Store()
    store.spec = SPEC | spec
    return store


async def settled(store: Store, reconciler: Any) -> str:
    await passes(store, reconciler)
    revision: str = store.service(KEY)["status"]["currentRevision"]
    return revision


async def test_one_set_holds_both_pools_and_the_routers_stay_a_deployment() -> None:
    store = asking()
    async with operating(store) as reconciler:
        revision = await settled(store, reconciler)
        assert sets(store) == {revision: {"prefill": 2, "decode": 3}}
        assert [d["metadata"]["name"] for d in store.deployments()] == ["svc-router"]
        for condition in ("PrefillReady", "DecodeReady", "RouterReady"):
            assert store.condition(condition)["status"] == "True"
        assert store.condition("Progressing")["reason"] == "Idle"


async def test_a_new_revision_is_another_set_that_grows_as_the_old_one_shrinks() -> None:
    store = asking()
    async with operating(store) as reconciler:
        old = await settled(store, reconciler)
        store.spec = {**store.spec, "engine": {"image": "two"}}
        seen: list[dict[str, dict[str, int]]] = []
        for _ in range(12):
            await passes(store, reconciler, 1)
            seen.append(sets(store))
        (new,) = seen[-1]
        assert new != old
        assert seen[-1] == {new: {"prefill": 2, "decode": 3}}
        between = [step for step in seen if len(step) == 2]
        assert between, "no pass had both"
        for step in between:
            for role, wanted in {"prefill": 2, "decode": 3}.items():
                assert wanted <= step[old][role] + step[new][role] <= wanted + 1
            for counts in step.values():
                assert all(counts.values()) or not any(counts.values())


async def test_changing_the_workload_is_a_rollout() -> None:
    store = asking(workload="Deployment")
    async with operating(store) as reconciler:
        old = await settled(store, reconciler)
        assert not sets(store)
        store.spec = {**store.spec, "workload": SET_KIND}
        await passes(store, reconciler, 1)
        assert sets(store)
        assert any(d["metadata"]["labels"].get(REVISION_LABEL) == old for d in store.deployments())
        await passes(store, reconciler, 12)
        assert [d["metadata"]["name"] for d in store.deployments()] == ["svc-router"]


async def test_a_service_that_is_suspended_has_no_pod_in_either_role() -> None:
    store = asking()
    async with operating(store) as reconciler:
        revision = await settled(store, reconciler)
        store.spec = {**store.spec, "suspend": True}
        await reconciler.reconcile(KEY)
        assert sets(store) == {revision: {"prefill": 0, "decode": 0}}


async def test_a_set_of_this_revision_by_another_name_is_not_counted() -> None:
    store = asking()
    async with operating(store) as reconciler:
        revision = await settled(store, reconciler)
        path, made = next((p, o) for p, o in store.objects.items() if o["kind"] == SET_KIND)
        copy = made | {"metadata": made["metadata"] | {"name": "copy"}}
        store.objects[path.replace(made["metadata"]["name"], "copy")] = copy
        await reconciler.reconcile(KEY)
        assert store.condition("PrefillReady")["message"].startswith("2 ready, 2 wanted")
        assert copy in store.children(KEY)
        assert sets(store).keys() == {revision}


@pytest.mark.parametrize("rollout", ["PairedRolling", "Recreate"])
async def test_without_the_kind_nothing_goes_and_a_remedy_is_told(rollout: str) -> None:
    store = asking(workload="Deployment", rollout={"type": rollout})
    cluster = Cluster(has_sets=False)
    async with operating(store, cluster=cluster) as reconciler:
        await settled(store, reconciler)
        before = {d["metadata"]["name"]: d["spec"]["replicas"] for d in store.deployments()}
        store.spec = {**store.spec, "workload": SET_KIND}
        await passes(store, reconciler)
        told = store.condition("Degraded")
        assert told["reason"] == "DisaggregatedSetUnavailable"
        assert "install LeaderWorkerSet" in told["message"]
        assert store.condition("Stalled")["status"] == "True"
        after = {d["metadata"]["name"]: d["spec"].get("replicas") for d in store.deployments()}
        assert after == before
        assert not sets(store)


async def test_pods_that_the_api_server_refuses_are_told_of_before_the_set_changes() -> None:
    """The set's own CRD takes any pod."""
    store = asking()
    async with operating(store) as reconciler:
        revision = await settled(store, reconciler)
        store.spec = {
            **store.spec,
            "engine": {"image": "two"},
            "decode": {"replicas": 3, "podTemplate": {"spec": {"hostNetworking": True}}},
        }
        store.refuses_pods = (422, "no such field")
        await reconciler.reconcile(KEY)
        told = store.condition("Degraded")
        assert told["reason"] == "PodTemplateRejected"
        assert "no such field" in told["message"]
        assert sets(store) == {revision: {"prefill": 2, "decode": 3}}


@pytest.mark.parametrize("there", [True, False])
def test_sets_are_watched_where_they_can_be(there: bool) -> None:
    selectors = settings(Cluster(has_sets=there)).watching.label_selectors
    assert selectors.get("disaggregatedsets") == (selectors["deployments"] if there else None)
