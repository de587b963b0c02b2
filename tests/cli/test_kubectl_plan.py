"""`kubectl diptych plan` says what an operator would change, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cluster_kit.reconciling import KEY, Object, Store, one_pass

from diptych.kubectl.cluster import Cluster as Asked
from diptych.kubectl.cluster import ClusterError
from diptych.kubectl.plan import ServicePlan, plan_service, plans
from diptych_operator.api.images import Images
from diptych_operator.kube.cluster import Cluster
from diptych_operator.upgrades import DAYS

NAMES = ("engine", "router")
"""The containers of both kinds of pods."""


async def made() -> Store:
    """A service as an operator with the default images made it."""
    store = Store()
    for _ in range(2):
        await one_pass(store)
    return store


def planned(store: Store, images: Images, **spec: Object | bool) -> ServicePlan:
    raw = store.service(KEY)
    return plan_service(raw | {"spec": raw["spec"] | spec}, store.children(KEY), images, Cluster())


async def test_an_operator_that_renders_the_same_has_nothing_to_do() -> None:
    found = planned(await made(), Images())
    assert not found.pending
    assert found.text == "ns/svc: nothing"


async def test_the_operator_changes_nothing_of_what_is_being_deleted() -> None:
    raw = Store().service(KEY)
    raw["metadata"]["deletionTimestamp"] = "2026-11-21T07:00:00Z"
    assert not plan_service(raw, [], Images(), Cluster()).pending


async def test_other_images_replace_pods_and_are_shown_beside_those_that_run() -> None:
    found = planned(await made(), Images(engine="engine:new", router="router:new"))
    assert found.pending
    assert found.replaces_pods
    path = "spec.template.spec.containers[{}].image"
    shown = {(change.path, change.live, change.wanted) for change in found.changes}
    assert (path.format(NAMES[0]), Images().engine, "engine:new") in shown
    assert (path.format(NAMES[1]), Images().router, "router:new") in shown
    # A new revision has a name of its own, and that is all else.
    assert {change.path for change in found.changes} == {
        path.format(n) for n in ("engine", "router")
    }
    assert f"image: {Images().engine} -> engine:new" in found.text


async def test_a_disaggregated_set_is_compared_whatever_its_size() -> None:
    store = Store()
    store.spec = {"workload": "DisaggregatedSet"}
    for _ in range(2):
        await one_pass(store)
    assert not planned(store, Images(), decode={"replicas": 9}).pending
    found = planned(store, Images(engine="engine:new"))
    assert found.replaces_pods
    role = "spec.roles[decode].spec.leaderWorkerTemplate.workerTemplate"
    assert f"{role}.spec.containers[engine].image" in {change.path for change in found.changes}


async def test_quantities_that_the_api_server_writes_in_its_own_form_are_the_same() -> None:
    store = Store()
    written = {"requests": {"cpu": "1000m", "memory": "2048Mi"}, "limits": {"cpu": "0.5"}}
    store.spec = {"decode": {"resources": written}}
    for _ in range(2):
        await one_pass(store)
    stored = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "500m"}}
    (decode,) = (d for d in store.deployments() if "-decode-" in d["metadata"]["name"])
    (engine,) = decode["spec"]["template"]["spec"]["containers"]
    engine["resources"] = stored
    assert not planned(store, Images()).pending
    engine["resources"] = stored | {"limits": {"cpu": "501m"}}
    (change,) = planned(store, Images()).changes
    assert (change.live, change.wanted) == ("501m", "0.5")


async def test_a_service_that_was_never_to_serve_lacks_no_pods() -> None:
    store = Store()
    store.spec = {"suspend": True}
    for _ in range(2):
        await one_pass(store)
    assert not planned(store, Images()).pending
    assert planned(store, Images(), suspend=False).pending


async def test_what_needs_no_new_pods_says_so() -> None:
    store = await made()
    service = next(o for o in store.children(KEY) if o["kind"] == "Service")
    service["spec"]["ports"] = []
    found = planned(store, Images())
    assert found.pending
    assert not found.replaces_pods
    assert "no pod is replaced" in found.text


def fields_of(value: Any) -> Object:
    """As an API server notes what an operator applies: lists of containers and such have keys."""
    if isinstance(value, dict):
        return {f"f:{name}": fields_of(each) for name, each in value.items()}
    if isinstance(value, list) and all(isinstance(each, dict) and "name" in each for each in value):
        return {f"k:{json.dumps({'name': each['name']})}": fields_of(each) for each in value}
    return {}


async def test_what_others_added_to_lists_is_left_and_what_is_given_up_goes() -> None:
    """A webhook may add containers, variables and volumes to a Deployment."""
    store = await made()
    deployment = store.deployments()[0]
    ours = fields_of(deployment)
    pod = deployment["spec"]["template"]["spec"]
    pod["containers"][0]["env"].insert(0, {"name": "MESH", "value": "on"})
    pod["containers"].insert(0, {"name": "sidecar", "image": "mesh"})
    pod["volumes"].append({"name": "mesh", "emptyDir": {}})
    for applied, pending in ((ours, False), (fields_of(deployment), True)):
        deployment["metadata"]["managedFields"] = [
            {"manager": "helm", "operation": "Apply", "fieldsV1": {}},
            {"manager": "diptych", "operation": "Apply", "fieldsV1": applied},
        ]
        found = planned(store, Images())
        assert (found.pending, found.replaces_pods) == (pending, pending)


async def test_a_service_that_is_not_there_yet_is_made_anew() -> None:
    found = planned(Store(), Images())
    assert not found.replaces_pods, "there are none"
    assert "Deployment svc-router: made anew" in found.text


async def test_a_service_that_is_suspended_has_no_pods_to_be_replaced() -> None:
    store = await made()
    store.spec = {"suspend": True}
    await one_pass(store)
    found = planned(store, Images(engine="engine:new"), suspend=True)
    assert found.pending
    assert "ns/svc: no pod is replaced" in found.text


async def test_a_spec_that_cannot_be_rendered_says_why() -> None:
    pod = {"podTemplate": {"spec": {"restartPolicy": "Never"}}}
    found = planned(await made(), Images(), decode=pod)
    assert found.pending
    assert "restartPolicy" in found.text


class Operated(Asked):
    """A cluster whose operator has these arguments, or none at all."""

    store = Store()

    def __init__(self, **container: list[str]) -> None:
        self._found = [{"spec": {"template": {"spec": {"containers": [container]}}}}]

    def _list(self, *_: object) -> list[Object]:
        return self._found

    def version(self) -> tuple[Object, list[str]]:
        return {"major": "1", "minor": "30"}, ["policy/v1"]

    def children(self, *_: object) -> list[Object]:
        return self.store.children(KEY)


class Listing(Asked):
    """A cluster that serves these, and has one object of each kind."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _list(self, path: str, query: Mapping[str, str] | None = None) -> list[Object]:
        self.asked.append(path.rpartition("/")[2])
        return [{"metadata": {"name": "svc-router"}}]


@pytest.mark.parametrize("able", [True, False])
def test_what_leads_a_gateway_to_a_service_is_looked_at_where_the_cluster_has_it(
    able: bool,
) -> None:
    raw = Store().service(KEY)
    raw["spec"]["expose"] = {"gateway": {"name": "front"}}
    listing = Listing()
    found = listing.children(raw, Cluster(has_gateways=able))
    assert ({"httproutes", "inferencepools"} <= {*listing.asked}) is able
    assert ({"HTTPRoute", "InferencePool"} <= {each["kind"] for each in found}) is able
    (of_none,) = plans(Operated(), [raw], "diptych-system")  # where there are none of these kinds
    assert "HTTPRoute" not in of_none.text


@pytest.mark.parametrize("words", [{}, {"args": ["--of-a-later-version=1"]}])
def test_an_operator_may_have_other_arguments(words: dict[str, list[str]]) -> None:
    assert plans(Operated(**words), [], "diptych-system") == []


def test_who_may_not_see_the_operator_hears_which_right_that_takes() -> None:
    class Refusing(Operated):
        def _list(self, *_: object) -> list[Object]:
            raise ClusterError("you may not do that", 403)

    words = r"the right to list deployments\.apps in the namespace diptych-system: you may not"
    with pytest.raises(ClusterError, match=words):
        plans(Refusing(), [], "diptych-system")


@pytest.mark.parametrize(
    "word",
    [
        '--limits={"ofALaterVersion": []}',
        "--max-concurrent-rollouts=many",
        "--rollout-window=Sat 01:00-05:00 Of/ALaterVersion",
    ],
)
def test_an_operator_whose_arguments_mean_something_else_is_no_plan(word: str) -> None:
    with pytest.raises(ClusterError, match=f"{word[:8]}.*take the plugin of its version") as told:
        plans(Operated(args=[word]), [], "diptych-system")
    assert told.value.exit_code == 2


async def test_what_an_upgrade_replaces_waits_for_a_window() -> None:
    day = datetime.now(UTC).date() + timedelta(days=3)
    window = f"--rollout-window={DAYS[day.weekday()]} 01:00-05:00 UTC"
    cluster = Operated(args=["--engine-image=engine:new", window])
    cluster.store = await made()
    (found,) = plans(cluster, [cluster.store.service(KEY)], "diptych-system")
    head = found.text.partition("\n")[0]
    assert head == f"ns/svc: pods are replaced; by an upgrade not before {day}T01:00:00Z"
