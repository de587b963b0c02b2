"""A changed podTemplate, which Kubernetes rolls out within a revision, where no place is free."""

from __future__ import annotations

import pytest
from cluster_kit.reconciling import Store, one_pass

LONG_AGO = "2020-01-01T00:00:00Z"
SURGE, IN_PLACE = (
    {"maxSurge": 1, "maxUnavailable": 0},
    {"maxSurge": 0, "maxUnavailable": 1},
)


async def rolling(replicas: int, when_full: str) -> Store:
    """Decode has a new template, whose first pod no node takes."""
    store = Store()
    pool = {"replicas": replicas}
    store.spec = {"prefill": pool, "decode": pool, "rollout": {"whenFull": when_full}}
    await one_pass(store)
    store.settle()
    template = {"metadata": {"annotations": {"a": "b"}}}
    store.spec |= {"decode": {**pool, "podTemplate": template}}
    await one_pass(store)
    (decode,) = (d for d in store.deployments() if "-decode-" in d["metadata"]["name"])
    decode["status"] |= {"updatedReplicas": 1, "replicas": replicas + 1}
    old = next(p for p in store.pods_here if "-decode-" in p["metadata"]["name"])
    away = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient cpu.", "lastTransitionTime": LONG_AGO,
    }  # fmt: skip
    meta = old["metadata"] | {"name": "svc-decode-new"}
    status = {"phase": "Pending", "conditions": [away]}
    store.pods_here.append(old | {"metadata": meta, "status": status})
    return store


def strategies(store: Store) -> dict[str, dict[str, int]]:
    return {
        d["metadata"]["labels"]["diptych.dev/role"]: d["spec"]["strategy"]["rollingUpdate"]
        for d in store.deployments()
    }


async def test_old_pods_make_room_until_all_have_the_new_template() -> None:
    store = await rolling(2, "ReplaceInPlace")
    await one_pass(store)
    assert strategies(store) == {"prefill": SURGE, "decode": IN_PLACE, "router": SURGE}
    store.pods_here[-1]["status"] = {"phase": "Running", "podIP": "127.0.0.9"}
    (decode,) = (d for d in store.deployments() if "-decode-" in d["metadata"]["name"])
    decode["status"] |= {"updatedReplicas": 1}
    await one_pass(store)
    assert strategies(store)["decode"] == IN_PLACE
    store.settle()
    await one_pass(store)
    assert strategies(store)["decode"] == SURGE


@pytest.mark.parametrize(("replicas", "when_full"), [(1, "ReplaceInPlace"), (2, "Wait")])
async def test_they_stay_where_that_would_be_an_outage_or_is_not_wanted(
    replicas: int, when_full: str
) -> None:
    store = await rolling(replicas, when_full)
    await one_pass(store)
    assert strategies(store)["decode"] == SURGE
