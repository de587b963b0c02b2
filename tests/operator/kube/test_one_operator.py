"""An operator's process serves only what it can hear and what nobody else serves, and says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml
from aiohttp import web
from cluster_kit.operators import Operator
from cluster_kit.reconciling import KEY, Object, Store, one_pass, serving
from cluster_kit.small_api import serving_api
from free_ports import free_port
from kubernetes.aio import client
from waits import PATIENCE_S

from diptych_operator.__main__ import Leader
from diptych_operator.arguments import parser
from diptych_operator.kube.client import Kube
from diptych_operator.kube.leader import (
    LEASE_NAME,
    RELEASE_ANNOTATION,
    RENEW_DEADLINE_S,
    RETRY_S,
    Candidate,
    LeadershipLostError,
    _renew,
    lead,
    leases_of,
)
from diptych_operator.kube.rivals import LONG_AGO_S, LOOK_S
from diptych_operator.metrics import OperatorMetrics
from diptych_protocol import DiptychError

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
            assert "can no longer be watched: the API server answers 404" in words
            (lease,) = (o for p, o in api.store.objects.items() if p.startswith(LEASES))
            assert lease["spec"]["holderIdentity"] == "", "another may take over at once"
        finally:
            end(operator)


async def test_one_that_starts_while_the_api_server_is_away_waits_for_it(tmp_path: Path) -> None:
    """One that ended would be kept from coming back, for up to five minutes after the outage."""
    port = free_port()
    async with serving_api(tmp_path, port) as (_, kubeconfig):
        pass
    operator = Operator(tmp_path / "log", ["--namespaces=ns"], kubeconfig)
    try:
        assert await says(operator, "readyz", "the API server does not answer") == 503
        assert await says(operator, "healthz", "ok") == 200
        async with serving_api(tmp_path, port) as (api, _):
            api.serves_crd = True
            assert await says(operator, "readyz", "ok") == 200
            assert await says(operator, "metrics", "diptych_operator_leader 1.0") == 200
    finally:
        end(operator)


async def test_a_kind_whose_crd_comes_later_is_watched_in_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else tells of a ModelRoute that nobody watches: it has no status."""
    monkeypatch.setattr("diptych_operator.__main__.FURTHER_S", 0.1)
    async with serving_api(tmp_path) as (api, kubeconfig):
        api.serves_crd, api.missing = True, {"modelroutes"}
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))  # for the watches
        (cluster,) = yaml.safe_load(kubeconfig.read_text())["clusters"]
        server = client.ApiClient(client.Configuration(host=cluster["cluster"]["server"]))
        async with Kube(server) as kube, asyncio.timeout(PATIENCE_S):
            leader = Leader(kube, OperatorMetrics(), parser().parse_args([]), asyncio.Event())
            leading = asyncio.create_task(leader.operate(["ns"]))
            await api.crd_is_watched.wait()
            api.missing.clear()
            with pytest.raises(DiptychError, match="ModelRoute can be watched"):
                await leading


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


def lease(holder: str, renewed: datetime | None = None, namespace: str = "ns") -> Object:
    meta = {
        "name": LEASE_NAME, "namespace": namespace, "resourceVersion": "1", "uid": "l1",
        "annotations": {RELEASE_ANNOTATION: "team/own"},
    }  # fmt: skip
    renewed = renewed or datetime.now(UTC)
    spec = {"holderIdentity": holder, "renewTime": renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
    kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    return {**kind, "metadata": meta, "spec": spec}


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


@pytest.mark.parametrize("holder", ["own-0", ""], ids=["of one that died", "freed"])
async def test_a_lease_that_was_last_renewed_long_ago_is_nobodys_at_once(holder: str) -> None:
    store = Store()
    store.serves_cluster = True
    long_ago = datetime.now(UTC) - timedelta(seconds=LONG_AGO_S + 60)
    store.objects[f"{LEASES}/{LEASE_NAME}"] = lease(holder, long_ago)
    await one_pass(store)
    assert store.deployments()
    assert "ServedByAnother" not in store.events()


class YearsBehind(Store):
    """Its clock differs from ours."""

    async def answer(self, request: web.Request) -> web.Response:
        found = await super().answer(request)
        found.headers["Date"] = "Mon, 05 Mar 2001 10:00:00 GMT"
        return found


async def test_how_old_a_lease_is_goes_by_the_api_servers_clock_alone() -> None:
    store, stop = YearsBehind(), asyncio.Event()

    async def work(_: Sequence[str]) -> None:
        stop.set()

    async with serving(store) as kube, asyncio.timeout(PATIENCE_S):
        candidate = Candidate("own-0", "team/own", leases_of(["ns"]))
        await lead(kube, candidate, work, stop, lambda _: None)
    assert store.objects[f"{LEASES}/{LEASE_NAME}"]["spec"]["renewTime"].startswith("2001-03-05")
    store.serves_cluster = True
    await one_pass(store)
    assert store.deployments() == []
    assert store.events() == ["ServedByAnother"]


async def test_how_long_a_rollout_takes_goes_by_the_api_servers_clock_too() -> None:
    """A jump of this machine's clock ends no rollout."""
    store = YearsBehind()
    await one_pass(store)
    status = store.service(KEY)["status"]
    assert status["rollout"]["lastProgressAt"].startswith("2001-03-05")
    for when in [each["lastTransitionTime"] for each in status["conditions"]]:
        assert when.startswith("2001-03-05")


class SlowStore(Store):
    """It answers the first request for a Deployment only after a while, which is told before."""

    def __init__(self) -> None:
        super().__init__()
        self.serves_cluster = True
        self.asked = asyncio.Event()
        self.looks = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.looks += request.path.endswith(f"/leases/{LEASE_NAME}")
        if "/deployments/" in request.path and not self.asked.is_set():
            self.asked.set()
            await asyncio.sleep(RETRY_S + LOOK_S)
        return await super().answer(request)


@pytest.mark.parametrize("appears", [True, False])
async def test_a_pass_is_stopped_before_an_operator_that_appears_meanwhile_begins(
    appears: bool,
) -> None:
    store = SlowStore()
    passing = asyncio.create_task(one_pass(store))
    async with asyncio.timeout(PATIENCE_S):
        await store.asked.wait()
        if appears:
            store.objects[f"{LEASES}/{LEASE_NAME}"] = lease("own-0")
        await passing
    assert store.looks >= 2
    assert bool(store.deployments()) != appears
    assert ("ServedByAnother" in store.events()) == appears


async def test_who_gets_only_some_of_its_leases_keeps_none_and_serves_once_it_has_all() -> None:
    store, stop, words = Store(), asyncio.Event(), asyncio.Queue[str]()
    own, other = (f"/apis/coordination.k8s.io/v1/namespaces/{ns}/leases/{LEASE_NAME}"
                  for ns in ("a", "b"))  # fmt: skip
    store.objects[other] = lease("b-0", namespace="b")
    begun = asyncio.Event()

    async def work(_: Sequence[str]) -> None:
        assert {store.objects[path]["spec"]["holderIdentity"] for path in (own, other)} == {"a-0"}
        begun.set()

    async with serving(store) as kube, asyncio.timeout(PATIENCE_S):
        candidate = Candidate("a-0", "team/a", leases_of(["a", "b"]))
        leading = asyncio.create_task(lead(kube, candidate, work, stop, words.put_nowait))
        assert "the namespace b is served by team/own" in await words.get()
        assert own not in store.objects, "who serves the cluster may serve it"
        del store.objects[other]
        await leading
    assert begun.is_set()


@pytest.mark.parametrize(
    ("method", "status", "said"),
    [
        ("POST", 404, 'namespaces "b" not found'),
        ("POST", 403, "unable to create new content because it is being terminated"),
        ("GET", 403, 'cannot get resource "leases" in the namespace "b"'),
    ],
)
async def test_a_namespace_that_is_gone_keeps_no_other_from_being_served(
    method: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych_operator.kube.leader.LEASE_S", 1.0)

    class Gone(Store):
        there = False

        async def answer(self, request: web.Request) -> web.Response:
            about_b = "/namespaces/b/leases" in request.path
            if about_b and request.method == method and not self.there:
                return web.json_response({"message": said}, status=status)
            return await super().answer(request)

    store, words, served = Gone(), asyncio.Queue[str](), asyncio.Queue[Sequence[str]]()

    async def work(namespaces: Sequence[str]) -> None:
        await served.put(namespaces)
        await asyncio.Event().wait()

    async with serving(store) as kube, asyncio.timeout(PATIENCE_S):
        candidate = Candidate("a-0", "team/a", leases_of(["a", "b"]))
        stop = asyncio.Event()
        leading = asyncio.create_task(lead(kube, candidate, work, stop, words.put_nowait))
        assert await served.get() == ["a"]
        assert await words.get() == ""
        store.there = True
        with pytest.raises(LeadershipLostError, match="the namespace b can be served too"):
            await leading


async def test_who_is_too_late_for_its_last_lease_gives_back_the_others() -> None:
    """Both looked free; then another was quicker."""

    class Contested(Store):
        async def answer(self, request: web.Request) -> web.Response:
            if request.method == "POST" and "/namespaces/b/leases" in request.path:
                return web.json_response({"reason": "AlreadyExists"}, status=409)
            return await super().answer(request)

    store, words = Contested(), asyncio.Queue[str]()
    stop = asyncio.Event()

    async def work(_: Sequence[str]) -> None:
        raise AssertionError("it serves without its last Lease")

    async with serving(store) as kube, asyncio.timeout(PATIENCE_S):
        candidate = Candidate("a-0", "team/a", leases_of(["a", "b"]))
        leading = asyncio.create_task(lead(kube, candidate, work, stop, words.put_nowait))
        assert await words.get() == "", "it stands by"
        (taken,) = (obj for obj in store.objects.values() if obj["kind"] == "Lease")
        assert taken["metadata"]["namespace"] == "a"
        assert taken["spec"]["holderIdentity"] == ""
        stop.set()
        await leading


@pytest.mark.parametrize("left", [None, ""], ids=["created", "left by an uninstalled release"])
async def test_an_operator_begins_when_that_of_the_cluster_has_seen_it(left: str | None) -> None:
    store, path = Store(), f"{LEASES}/{LEASE_NAME}"
    if left is not None:
        store.objects[path] = lease(left)
    begun = asyncio.Event()

    async def work(_: Sequence[str]) -> None:
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


class Unwilling(Store):
    """Nothing that is there can be written again."""

    refused = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.method != "PUT":
            return await super().answer(request)
        self.refused += 1
        return web.json_response({"reason": "InternalError"}, status=500)


async def test_a_lease_counts_from_when_it_was_taken_though_the_others_took_long() -> None:
    """Others may take it LEASE_S after it was written, also if its first renewal came late."""
    store, candidate = Unwilling(), Candidate("own-0", "team/own", leases_of(["ns"]))
    taken_at = time.monotonic() - RENEW_DEADLINE_S
    async with serving(store) as kube:
        taken = await kube.create(lease("own-0"))
        with pytest.raises(LeadershipLostError):
            await _renew(kube, candidate, taken, taken_at)
    assert store.refused == 1


def test_leases_are_taken_in_one_order_and_one_stands_for_the_cluster() -> None:
    assert leases_of(["b", "a", "b"]) == (("a", LEASE_NAME), ("b", LEASE_NAME))
    (cluster,) = leases_of([])
    assert cluster != ("default", LEASE_NAME), "an operator of the namespace default has that"
