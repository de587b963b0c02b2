"""Passes over a ModelRoute, against a small API server."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_kit.reconciling import RUNNING, Store, serving

from diptych_frontend.openai.tls import Certificate
from diptych_operator import routes as routes_module
from diptych_operator.api.images import Images
from diptych_operator.api.limits import Allowed
from diptych_operator.kube.cluster import Cluster
from diptych_operator.kube.rivals import Rivals
from diptych_operator.kube.watch import trimmed
from diptych_operator.routes import Routes

Object = dict[str, Any]
KEY = ("ns", "front.route")
CERTIFICATES = Path(__file__).parents[2] / "support" / "certificates"
WHOLE = {"readyReplicas": 1, "updatedReplicas": 1, "replicas": 1, "observedGeneration": 1}
PULLING = {
    "phase": "Pending",
    "containerStatuses": [
        {"name": "route", "image": "newer", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    ],
}
KEYS = {"router": {"apiKeys": {"secretName": "keys"}}}


class Watched(Store):
    """What the watches show of a route and its services."""

    def __init__(
        self, services: dict[str, Object], states: dict[str, Object] | None = None, **spec: Any
    ) -> None:
        super().__init__()
        self.services = services
        self.states = states or {}
        """What else is there of services than their specs."""
        self.routers: dict[str, list[Object]] = {}
        """The pods of services' routers."""
        asked = [{"name": name, "weight": 1} for name in ("a", "b")]
        self.wanted = {"models": [{"name": "m", "services": asked}], **spec}

    def route(self, key: tuple[str, str]) -> Object:
        assert key == KEY
        written = next((o for p, o in self.objects.items() if "/modelroutes/" in p), {})
        return {
            "apiVersion": "diptych.dev/v1alpha1",
            "kind": "ModelRoute",
            "metadata": {"name": "front", "namespace": "ns", "uid": "u1", "generation": 3},
            "spec": self.wanted,
            "status": written.get("status"),
        }

    def service(self, key: tuple[str, str]) -> Object | None:  # type: ignore[override]
        found = self.services.get(key[1])
        state = self.states.get(key[1], {})
        return None if found is None else {"spec": {"model": {}, **found}, **state}

    def children(self, key: tuple[str, str]) -> list[Object]:
        unseen = ("Event", "ModelRoute")
        return [obj for obj in self.objects.values() if obj["kind"] not in unseen]

    def pods(self, key: tuple[str, str]) -> list[Object]:
        return self.pods_here if key == KEY else self.routers.get(key[1], [])

    def ready(self) -> tuple[str, str]:
        status = self.route(KEY)["status"]
        (condition,) = status["conditions"]
        assert status["observedGeneration"] == condition["observedGeneration"] == 3
        return condition["status"], condition["reason"]


async def passes(store: Watched, count: int = 1, allowed: Allowed | None = None) -> None:
    async with serving(store) as kube:
        rivals = Rivals(kube, serves_cluster=False)
        routes = Routes(kube, store, Cluster(), Images(), rivals, allowed)  # type: ignore[arg-type]
        for _ in range(count):
            await routes.reconcile(KEY)


async def settled(store: Watched) -> tuple[str, str]:
    """The condition once its pods are ready."""
    await passes(store)
    for deployment in store.deployments():
        deployment["status"] = WHOLE
    await passes(store)
    return store.ready()


async def test_a_route_says_what_its_pods_wait_for() -> None:
    store = Watched({"a": KEYS, "b": KEYS}, apiKeys={"secretName": "keys"})
    await passes(store)
    store.start_pods({"phase": "Pending"})
    for deployment in store.deployments():
        del deployment["status"]
    await passes(store)
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert condition["reason"] == "PodsNotReady"
    assert (
        'Create the Secret "keys" in the namespace ns, or correct spec.apiKeys.'
        in (condition["message"])
    )


async def test_a_route_whose_pods_are_refused_names_the_field_to_correct() -> None:
    store = Watched({"a": {}, "b": {}})
    store.refuses_pods = (422, "spec.template.spec.nodeSelector: Invalid value")
    await passes(store)
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert condition["reason"] == "Refused"
    assert condition["message"].endswith("Correct spec.podTemplate or spec.resources.")


async def test_an_operator_makes_no_pods_of_a_route_beyond_the_limits_and_says_so() -> None:
    store = Watched({}, podTemplate={"spec": {"hostPID": True}})
    await passes(store, allowed=Allowed())
    assert store.deployments() == []
    assert store.ready() == ("False", "SpecRejected")
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert "spec.podTemplate.spec.hostPID: True is not allowed" in condition["message"]


async def test_what_is_told_of_a_route_is_never_too_long_to_be_stored() -> None:
    """The API server takes 32,768 characters."""
    path = "/" + "x" * 40_000
    volumes = [{"name": "v", "hostPath": {"path": path}}]
    store = Watched({}, podTemplate={"spec": {"volumes": volumes}})
    await passes(store, allowed=Allowed())
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert condition["message"].startswith("spec.podTemplate.spec.volumes[0].hostPath.path: ")
    assert condition["message"].endswith("in the chart's value limits.allow.hostPaths")
    assert len(condition["message"]) <= 1024


async def test_a_route_is_ready_when_its_pods_are() -> None:
    store = Watched({"a": {}, "b": {}})
    await passes(store)
    assert store.ready() == ("False", "PodsNotReady")
    assert await settled(store) == ("True", "Serving")
    status = store.route(KEY)["status"]
    assert (status["ready"], status["url"]) == ("1/1", "http://front-route.ns.svc:8000/v1")


async def test_a_route_is_not_ready_before_all_its_pods_are_as_the_spec_asks() -> None:
    store = Watched({"a": {}, "b": {}}, replicas=2)
    assert await settled(store) == ("False", "PodsNotReady")
    (deployment,) = store.deployments()
    deployment["status"] = dict.fromkeys(WHOLE, 2) | {"readyReplicas": 1}
    await passes(store)
    assert store.ready() == ("True", "Serving"), "the other pod is on its way"
    store.wanted["image"] = "newer"
    await passes(store)
    (deployment,) = store.deployments()
    deployment["status"] = dict.fromkeys(WHOLE, 2) | {"updatedReplicas": 1, "replicas": 3}
    store.start_pods(PULLING)
    deployment["status"] = dict.fromkeys(WHOLE, 2) | {"updatedReplicas": 1, "replicas": 3}
    await passes(store)
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert store.ready() == ("False", "PodsNotReady")
    assert "not all pods of front-route are ready" in condition["message"]
    assert "Check spec.image (left out, it is the chart's images.router)" in condition["message"]


async def test_a_route_says_why_its_pods_are_not_even_created() -> None:
    store = Watched({"a": {}, "b": {}})
    await passes(store)
    (deployment,) = store.deployments()
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}
    deployment["status"] = {"conditions": [failure]}
    await passes(store)
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert condition["message"].startswith("no pod of front-route is ready: route pods cannot be")
    assert condition["message"].endswith("or ask for less in spec.resources.")


async def test_a_route_without_a_usable_key_says_what_it_waits_for() -> None:
    store = Watched({"a": KEYS, "b": KEYS}, apiKeys={"secretName": "keys"})
    meta = {"name": "keys", "namespace": "ns"}
    store.objects["/api/v1/namespaces/ns/secrets/keys"] = {"kind": "Secret", "metadata": meta}
    await passes(store)
    store.start_pods()
    for deployment in store.deployments():
        del deployment["status"]
    await passes(store)
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert "until the Secret keys of spec.apiKeys holds a usable key" in condition["message"]


async def test_a_model_that_no_service_answers_for_is_named() -> None:
    down = {"status": {"conditions": [{"type": "Available", "status": "False", "message": "why"}]}}
    store = Watched({"a": {}, "b": {}}, states={"a": down})
    assert await settled(store) == ("True", "Serving")
    store.states["b"] = down
    assert await settled(store) == ("False", "ServiceUnavailable")
    (condition,) = store.route(KEY)["status"]["conditions"]
    assert condition["message"] == "no service of the model m answers: a: why"


async def test_at_rest_a_pass_asks_nothing() -> None:
    store = Watched({"a": {}, "b": {}})
    async with serving(store) as kube:
        rivals = Rivals(kube, serves_cluster=False)
        routes = Routes(kube, store, Cluster(), Images(), rivals)  # type: ignore[arg-type]
        for _ in range(2):
            await routes.reconcile(KEY)
        before = kube.requests
        await routes.reconcile(KEY)
        assert kube.requests == before


async def test_a_service_that_is_not_there_is_named_and_the_others_are_served() -> None:
    store = Watched({"a": {}})
    assert await settled(store) == ("False", "ServiceMissing")
    assert "InferenceService b" in store.route(KEY)["status"]["conditions"][0]["message"]
    store.services["b"] = {"model": {"servedName": "big"}}
    assert await settled(store) == ("True", "Serving")
    (config,) = (obj for obj in store.objects.values() if obj["kind"] == "ConfigMap")
    (model,) = yaml.safe_load(config["data"]["route.json"])["models"]
    assert [each["model"] for each in model["targets"]] == ["a", "big"]


async def test_a_service_that_is_made_anew_replaces_no_pods_of_a_route() -> None:
    own = {"model": {"servedName": "big"}, "router": {"tls": {"secretName": "cert"}}}
    store = Watched({"a": {}, "b": own})

    def made() -> list[Object]:
        parts = {"ConfigMap": "data", "Deployment": "spec"}
        kept = [o[parts[o["kind"]]] for o in store.children(KEY) if o["kind"] in parts]
        return deepcopy(kept)

    async with serving(store) as kube:
        rivals = Rivals(kube, serves_cluster=False)
        routes = Routes(kube, store, Cluster(), Images(), rivals)  # type: ignore[arg-type]
        await routes.reconcile(KEY)
        before = made()
        del store.services["b"]
        await routes.reconcile(KEY)
        assert made() == before
        store.services["b"] = own
        await routes.reconcile(KEY)
        assert made() == before
        store.services["b"] = {}
        await routes.reconcile(KEY)
        assert made() != before, "it is another one"


@pytest.mark.parametrize(
    ("certificate", "ready"),
    [("expired", ("False", "CertificateExpired")), ("first", ("True", "Serving"))],
)
async def test_a_route_says_that_its_own_certificate_has_ended(
    certificate: str, ready: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Watched({"a": {}, "b": {}}, tls={"secretName": "cert"})
    context = Certificate(CERTIFICATES / certificate).context
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.9", 0, ssl=context
    )
    async with server:
        monkeypatch.setattr(routes_module, "HTTP_PORT", server.sockets[0].getsockname()[1])
        await passes(store)
        store.start_pods(RUNNING | {"conditions": [{"type": "Ready", "status": "True"}]})
        assert await settled(store) == ready
        (condition,) = store.route(KEY)["status"]["conditions"]
        if certificate == "expired":
            assert "Secret cert of spec.tls ended at 2020-02-01T00:00:00Z" in condition["message"]
    assert await settled(store) == ("True", "Serving"), "one that does not answer says nothing"


async def test_services_that_would_refuse_its_clients_are_named() -> None:
    other = {"a": KEYS, "b": {}}
    assert await settled(Watched(other)) == ("False", "KeysDiffer")
    assert await settled(Watched(other, apiKeys={"secretName": "keys"})) == ("True", "Serving")


async def test_a_service_that_serves_https_is_asked_so() -> None:
    store = Watched({"a": {"router": {"tls": {"secretName": "cert"}}}, "b": {}})
    assert await settled(store) == ("True", "Serving")
    (config,) = (obj for obj in store.objects.values() if obj["kind"] == "ConfigMap")
    (model,) = yaml.safe_load(config["data"]["route.json"])["models"]
    assert [each["url"].partition(":")[0] for each in model["targets"]] == ["https", "http"]


async def test_a_service_is_asked_as_its_routers_serve_until_one_serves_as_its_spec_asks() -> None:
    """A Secret that is not there keeps new routers from starting: those that are there serve on."""
    store = Watched({"a": {"router": {"tls": {"secretName": "new"}}}, "b": {}})

    def known() -> tuple[str, list[str]]:
        (config,) = (obj for obj in store.objects.values() if obj["kind"] == "ConfigMap")
        (deployment,) = store.deployments()
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        sources = [s for v in volumes if "projected" in v for s in v["projected"]["sources"]]
        (model,) = yaml.safe_load(config["data"]["route.json"])["models"]
        scheme = model["targets"][0]["url"].partition(":")[0]
        return scheme, [source["secret"]["name"] for source in sources]

    http, former, new = router_pod(), router_pod("former"), router_pod("new")
    leaving = new | {"metadata": new["metadata"] | {"deletionTimestamp": "2026-11-30T00:00:00Z"}}
    for pods, expected in (
        ([], ("https", ["new"])),
        ([http], ("http", [])),
        ([http, new], ("https", ["new"])),
        # Before the first router shows the new one, until none shows the former.
        ([former, leaving], ("https", ["new", "former"])),
        ([former, router_pod("new", ready="False")], ("https", ["new", "former"])),
        ([former, new], ("https", ["new", "former"])),
        ([new], ("https", ["new"])),
    ):
        store.routers = {"a": pods}
        await passes(store)
        assert known() == expected


def router_pod(certificate: str = "", ready: str = "True") -> Object:
    """A router of a service, as the watches keep it."""
    volumes = [{"name": "tls", "secret": {"secretName": certificate}}] if certificate else []
    meta = {"name": f"router-{certificate}", "namespace": "ns"}
    return dict(
        trimmed(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": meta | {"labels": {"diptych.dev/role": "router"}},
                "spec": {"volumes": [{"name": "keys"}, *volumes], "containers": []},
                "status": {"conditions": [{"type": "Ready", "status": ready}]},
            }
        )
    )


async def test_what_cannot_be_rendered_is_reported_with_its_field() -> None:
    twice = [{"name": "m", "services": [{"name": "a"}]}] * 2
    store = Watched({"a": {}}, models=twice)
    await passes(store)
    assert store.ready() == ("False", "SpecRejected")


async def test_an_object_of_somebody_else_is_left_alone() -> None:
    store = Watched({"a": {}, "b": {}})
    path = "/api/v1/namespaces/ns/services/front-route"
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "front-route"}}
    store.objects[path] = theirs
    store.children = lambda key: []  # type: ignore[method-assign]  # it has no labels of ours
    await passes(store)
    assert store.ready() == ("False", "ObjectNotOurs")
    assert store.objects[path] == theirs
