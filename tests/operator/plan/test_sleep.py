"""A service that may sleep, in the middle of a rollout: only its newest revision would wake."""

from __future__ import annotations

from typing import Any

from cluster_kit.promised_pool import engine_report, router_report
from cluster_kit.reconciling import KEY, RUNNING, Store, operating

LONG_AGO = "2020-01-01T00:00:00Z"
READY = RUNNING | {"conditions": [{"type": "Ready", "status": "True"}]}


def sleepy(image: str) -> dict[str, Any]:
    pool = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2, "scaleDownSeconds": 0}}
    return {
        "engine": {"image": image}, "prefill": pool, "decode": pool, "transfer": {"verify": "Off"},
    }  # fmt: skip


def stand(store: Store, broken: str = "") -> None:
    """All pods are ready but those of a broken revision, and nobody asks for anything."""
    store.settle()
    engines = []
    for number, pod in enumerate(store.pods_here):
        labels = pod["metadata"]["labels"]
        if broken and labels.get("diptych.dev/revision") == broken:
            pod["status"] = {"phase": "Pending"}
            continue
        pod["status"] = READY
        if labels["diptych.dev/role"] != "router":
            engines.append(engine_report(labels["diptych.dev/role"], number))
    for deployment in store.deployments():
        if broken and deployment["metadata"]["labels"].get("diptych.dev/revision") == broken:
            deployment["status"]["readyReplicas"] = 0
    store.reports = [router_report(engines)]


async def test_what_a_failed_rollout_left_serving_is_still_there_after_a_quiet_night() -> None:
    store = Store()
    store.spec = sleepy("good")
    async with operating(store) as reconciler:
        await reconciler.reconcile(KEY)
        stand(store)
        store.reports = [router_report([], open_requests=1)]
        await reconciler.reconcile(KEY)
        good = store.service(KEY)["status"]["currentRevision"]
        store.spec = sleepy("broken")
        for late in (False, True, False, False, False, False):
            await reconciler.reconcile(KEY)
            status = store.service(KEY)["status"]
            stand(store, broken=status["updateRevision"])
            if late:
                status["rollout"]["lastProgressAt"] = LONG_AGO
    status = store.service(KEY)["status"]
    assert (status["rollout"]["phase"], status["currentRevision"]) == ("Failed", good)
    sizes = {d["metadata"]["name"]: d["spec"]["replicas"] for d in store.deployments()}
    assert [sizes[f"svc-{role}-{good}"] for role in ("prefill", "decode")] == [1, 1]
