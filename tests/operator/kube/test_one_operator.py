"""An operator's process serves only what it can hear and what nobody else serves, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from cluster_kit.operators import Operator
from cluster_kit.reconciling import KEY, Object, Store, one_pass, serving
from cluster_kit.small_api import serving_api
from waits import PATIENCE_S

from diptych_operator.kube.leader import (
    LEASE_NAME,
    RELEASE_ANNOTATION,
    Candidate,
    lead,
    leases_of,
)
from diptych_operator.kube.rivals import LOOK_S

LEASES = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


async def says(operator: Operator, probe: str, words: str) -> int:
    """The status of a probe, once its answer has these words."""
    url = f"http://127.0.0.1:{operator.port}/{probe}"
    async with (
        asyncio.timeout(PATIENCE_S),
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
    ):
        while True:
            assert operator.process.poll() is None, operator.log
            try:
                answer = await client.get(url)
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            if words in answer.text:
                return answer.status_code
            await asyncio.sleep(0.1)


def end(operator: Operator) -> None:
    operator.process.kill()
    operator.process.wait(PATIENCE_S)


async def ended(operator: Operator) -> int:
    return await asyncio.to_thread(operator.ended, PATIENCE_S)


async def test_a_leader_waits_for_its_crd_serves_and_ends_when_it_can_no_longer_watch(
    tmp_path: Path,
) -> None:
    async with serving_api(tmp_path) as (api, kubeconfig):
        operator = Operator(tmp_path / "log", ["--namespaces=ns"], kubeconfig)
        try:
            assert await says(operator, "readyz", "apply the CRD") == 503
            assert await says(operator, "healthz", "ok") == 200, "no restart would mend it"
            assert not await asyncio.to_thread(operator.leads)
            api.serves_crd = True
            assert await says(operator, "readyz", "ok") == 200
            assert await says(operator, "metrics", "diptych_operator_leader 1.0") == 200
            async with asyncio.timeout(PATIENCE_S):
                await api.crd_is_watched.wait()
            api.take_crd_away()
            assert await ended(operator) == 1
            words = operator.entries()[-1]["message"]
            assert "inferenceservices can no longer be watched: the API server answers 404" in words
            (lease,) = (o for p, o in api.store.objects.items() if p.startswith(LEASES))
            assert lease["spec"]["holderIdentity"] == "", "another may take over at once"
        finally:
            end(operator)


async def test_a_second_installation_serves_nothing_and_says_so_in_three_places(
    tmp_path: Path,
) -> None:
    async with serving_api(tmp_path) as (api, kubeconfig):
        api.serves_crd = True

        def installed(release: str, pod: str) -> Operator:
            arguments = ["--namespaces=ns", f"--release={release}"]
            return Operator(tmp_path / pod, arguments, kubeconfig, pod)

        first = installed("team-a/diptych", "a-0")
        others: list[Operator] = []
        try:
            await says(first, "metrics", "diptych_operator_leader 1.0")
            second, standby = installed("team-b/diptych", "b-0"), installed("team-a/diptych", "a-1")
            others = [second, standby]
            words = "the namespace ns is served by team-a/diptych; team-b/diptych serves nothing"
            assert await says(second, "readyz", words) == 503
            assert await says(second, "healthz", "ok") == 200
            assert await says(standby, "readyz", "ok") == 200
            assert any(words in entry["message"] for entry in second.entries())
            (event,) = (o for o in api.store.objects.values() if o["kind"] == "Event")
            assert event["involvedObject"]["name"] == LEASE_NAME
            assert (event["reason"], event["type"]) == ("ServedByAnother", "Warning")
            assert words in event["message"]
            assert not await asyncio.to_thread(second.leads)
        finally:
            for operator in (first, *others):
                end(operator)


# --- an operator of the cluster beside one of a namespace -------------------------------------


def lease(holder: str) -> Object:
    meta = {"name": LEASE_NAME, "namespace": "ns", "annotations": {RELEASE_ANNOTATION: "team/own"}}
    return {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": meta | {"resourceVersion": "1", "uid": "l1"},
        "spec": {"holderIdentity": holder},
    }  # fmt: skip


@pytest.mark.parametrize("holder", ["own-0", ""], ids=["held", "between two replicas"])
async def test_the_clusters_operator_leaves_a_namespace_alone_that_another_serves(
    holder: str,
) -> None:
    store = Store()
    store.serves_cluster = True
    store.objects[f"{LEASES}/{LEASE_NAME}"] = lease(holder)
    await one_pass(store)
    assert {child["kind"] for child in store.children(KEY)} == {"Lease"}
    assert store.names("secrets") == set()
    assert store.service(KEY)["status"] is None
    assert store.events() == ["ServedByAnother"]


async def test_without_such_a_lease_or_in_its_own_namespace_it_serves() -> None:
    for serves_cluster in (True, False):
        store = Store()
        store.serves_cluster = serves_cluster
        if not serves_cluster:
            store.objects[f"{LEASES}/{LEASE_NAME}"] = lease("own-0")
        await one_pass(store)
        assert store.deployments()
        assert "ServedByAnother" not in store.events()


@pytest.mark.parametrize("left", [None, ""], ids=["created", "left by an uninstalled release"])
async def test_an_operator_begins_when_that_of_the_cluster_has_seen_it(left: str | None) -> None:
    store, path = Store(), f"{LEASES}/{LEASE_NAME}"
    if left is not None:
        store.objects[path] = lease(left)
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()

    async with serving(store) as kube, asyncio.timeout(PATIENCE_S):
        candidate = Candidate("own-0", "team/own", leases_of(["ns"]))
        leading = asyncio.create_task(lead(kube, candidate, work, asyncio.Event(), lambda _: None))
        while not store.objects.get(path, {}).get("spec", {}).get("holderIdentity"):
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(begun.wait(), LOOK_S)
        await leading
    assert begun.is_set()


def test_leases_are_taken_in_one_order_and_one_stands_for_the_cluster() -> None:
    assert leases_of(["b", "a", "b"]) == (("a", LEASE_NAME), ("b", LEASE_NAME))
    (cluster,) = leases_of([])
    assert cluster != ("default", LEASE_NAME), "an operator of the namespace default has that"
