"""Changes of a running service that work: other ways to roll out, other pods, and a rest."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from e2e.bench import ENGINE_RESOURCES, POOL, Bench
from e2e.kubectl import KubectlError, Object, wait_for
from e2e.service import ENGINE_ROLES, READY_TIMEOUT_S, ROLES, Service

HOLD_S = 120
"""router.holdSeconds: as long as all pods of a pool take to leave and to come anew."""
LATER_S = 8.0
"""By then the readiness of a router that calls itself not ready would have been withdrawn."""
PLACE = "diptych.dev/place"
QUESTION = "In one word: what do bees make?"


@pytest.fixture(scope="module")
def bench(unapplied: Bench, example: Object) -> Bench:
    router = {**example["spec"].get("router", {}), "holdSeconds": HOLD_S}
    unapplied.install(example, "apply to change", prefill=POOL, decode=POOL, router=router)
    return unapplied


def rolled_out(bench: Bench, max_num_seqs: int | None) -> str:
    """Another revision, or the first one again; returns which, once it serves alone."""
    bench.service.patch_spec({"engine": {"maxNumSeqs": max_num_seqs}})
    bench.service.settled()
    return bench.service.revision()


def test_blue_green_and_back(bench: Bench) -> None:
    first = bench.service.revision()
    served: list[str] = []

    def disruption() -> None:
        bench.service.patch_spec({"rollout": {"type": "BlueGreen"}})
        served.append(rolled_out(bench, 48))
        served.append(rolled_out(bench, None))

    assert bench.disrupt("blue green and back", disruption).failures == {}
    assert served[0] != first
    assert served[1] == first


def test_a_canary_gets_more_and_more_or_nothing(bench: Bench) -> None:
    """The first keeps what is asked for; the second is asked for a pace that no engine has here."""
    service = bench.service
    steps = [{"weight": 20, "pauseSeconds": 5}, {"weight": 60, "pauseSeconds": 5}]
    analysis = {"handedOver": 0.5, "minRequests": 5}
    canary = {"steps": steps, "analysis": analysis}
    service.patch_spec(
        {"rollout": {"type": "Canary", "canary": canary}, "slo": {"interTokenMs": 1}}
    )
    service.settled()
    first = service.revision()

    def disruption() -> None:
        second = rolled_out(bench, 48)
        assert second != first
        strict = {"canary": {"analysis": {"attainment": 1.0}}}
        service.patch_spec({"engine": {"maxNumSeqs": 40}, "rollout": strict})
        said = service.says("Progressing", "False", "RolloutFailed", READY_TIMEOUT_S)
        assert "answers missed slo.interTokenMs" in said
        assert rolled_out(bench, 48) == second

    try:
        assert bench.disrupt("canary", disruption).failures == {}
    finally:
        back = {"rollout": {"type": None, "canary": None}, "slo": {"interTokenMs": None}}
        service.patch_spec({**back, "engine": {"maxNumSeqs": None}})
        service.settled()


@pytest.mark.slow
def test_recreate_holds_what_arrives(bench: Bench) -> None:
    """Between the revisions there is no engine; users wait, old and new ones, and that is all."""
    service = bench.service
    first = service.revision()
    bench.service.patch_spec({"rollout": {"type": "Recreate"}})
    arrived: list[float] = []

    def disruption() -> None:
        service.patch_spec({"engine": {"maxNumSeqs": 48}})
        wait_for("no engine is ready", lambda: not ready_engines(service), READY_TIMEOUT_S)
        time.sleep(LATER_S)
        started = time.monotonic()
        assert service.chat(QUESTION)["choices"]
        arrived.append(round(time.monotonic() - started, 1))
        service.settled()

    report = bench.disrupt("recreate", disruption)
    bench.figures.add("recreate", {"held_s": arrived[0]})
    assert report.failures == {}
    assert service.revision() != first


@pytest.mark.slow
def test_where_no_place_is_spare_old_pods_make_room(bench: Bench) -> None:
    """The node has four places, and the old pods hold all of them."""
    service = bench.service
    first = service.revision()
    with_place = {**ENGINE_RESOURCES, "limits": {**ENGINE_RESOURCES["limits"], PLACE: "1"}}
    four = {key: {"replicas": 2, "resources": with_place} for key in ENGINE_ROLES}
    back = {key: {"replicas": 1, "resources": {"limits": {PLACE: None}}} for key in ENGINE_ROLES}
    offer_places(bench, "4")
    service.patch_spec({**four, "rollout": {"type": None}})
    service.settled()

    def disruption() -> None:
        service.patch_spec({"engine": {"maxNumSeqs": 40}})
        service.settled()

    try:
        assert bench.disrupt("no place to spare", disruption).failures == {}
        assert service.revision() != first
    finally:
        service.patch_spec({**back, "engine": {"maxNumSeqs": None}})
        service.settled()
        offer_places(bench, None)


def offer_places(bench: Bench, number: str | None) -> None:
    """Have the first node offer so many of an extended resource, as a device plugin would."""
    (node, *_) = (node["metadata"]["name"] for node in bench.kubectl.list("nodes"))
    status = {"status": {key: {PLACE: number} for key in ("capacity", "allocatable")}}
    patch = ("--type", "merge", "--subresource", "status", "--patch", json.dumps(status))
    bench.kubectl.run("patch", "node", node, *patch)


def ready_engines(service: Service) -> list[str]:
    return [name for role in ENGINE_ROLES for name in service.ready_pods(role)]


CHANGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "annotate decode": (
        "decode",
        {"decode": {"podTemplate": {"metadata": {"annotations": {"example.org/team": "search"}}}}},
    ),
    "more memory for prefill": (
        "prefill",
        {"prefill": {"resources": {"requests": {"memory": "600Mi"}}}},
    ),
    "more memory for the router": (
        "router",
        {"router": {"resources": {"requests": {"memory": "300Mi"}}}},
    ),
}
"""Each by its row: the pods that are replaced, and the change."""


@pytest.mark.parametrize("row", CHANGES)
def test_pods_change_within_a_revision(bench: Bench, row: str) -> None:
    role, change = CHANGES[row]
    service = bench.service
    revision = service.revision()
    before = {each: uids(service, each) for each in ROLES}

    def disruption() -> None:
        service.patch_spec(change)
        wait_for(f"new {role} pods", lambda: not before[role] & uids(service, role), 120)
        service.has_ready(role, len(before[role]))
        service.settled()

    assert bench.disrupt(row, disruption).failures == {}
    assert service.revision() == revision
    others = [each for each in ROLES if each != role]
    assert {each: uids(service, each) for each in others} == {each: before[each] for each in others}


def uids(service: Service, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in service.pods(role)}


def test_routers_come_and_go(bench: Bench) -> None:
    def disruption() -> None:
        for replicas in (2, 1):
            bench.service.patch_spec({"router": {"replicas": replicas}})
            bench.service.has_ready("router", replicas)
        bench.service.settled()

    assert bench.disrupt("two routers and one", disruption).failures == {}


def test_a_route_asks_the_service_that_is_there(bench: Bench) -> None:
    """Under another name for its model, and whatever becomes of routers."""
    services = [{"name": bench.service.name, "weight": 1}, {"name": "absent", "weight": 1}]
    models = [{"name": "any", "aliases": ["gpt-4o"], "services": services}]
    meta, kind = {"name": "all"}, "modelroutes.diptych.dev"
    bench.kubectl.apply(
        {
            "apiVersion": "diptych.dev/v1alpha1",
            "kind": "ModelRoute",
            "metadata": meta,
            "spec": {"models": models},
        }
    )

    def status() -> Object:
        found: Object = (bench.kubectl.get(kind, "all") or {}).get("status", {})
        return found

    wait_for("the route is ready", lambda: status().get("ready") == "1/1", READY_TIMEOUT_S)
    assert status()["conditions"][0]["reason"] == "ServiceMissing"

    def disruption() -> None:
        for replicas in (2, 1):
            bench.service.patch_spec({"router": {"replicas": replicas}})
            bench.service.has_ready("router", replicas)
        bench.service.settled()

    address = status()["url"], "gpt-4o"
    assert bench.disrupt("routers behind a route", disruption, address).failures == {}
    bench.kubectl.delete(kind, "all")
    bench.kubectl.gone(kind, ["all"])


def test_suspend_and_resume(bench: Bench) -> None:
    service = bench.service
    answer = service.chat(QUESTION)["choices"]
    started = time.monotonic()
    service.patch_spec({"suspend": True})
    said = service.says("Available", "False", "Suspended", READY_TIMEOUT_S)
    assert "spec.suspend" in said
    wait_for("no pods", lambda: not service.pods(), READY_TIMEOUT_S)
    with pytest.raises(KubectlError, match="refused"):
        service.chat(QUESTION)
    bench.measured("suspend", started)

    started = time.monotonic()
    service.patch_spec({"suspend": False})
    service.settled()
    bench.measured("resume", started)
    assert service.chat(QUESTION)["choices"] == answer
