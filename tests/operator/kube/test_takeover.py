"""An operator that takes over writes only what it would render otherwise, or somebody changed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web
from cluster_kit.reconciling import KEY, Object, Store, one_pass, operating

from diptych_operator.api.images import Images
from diptych_operator.api.names import APPLIED_ANNOTATION, REVISION_LABEL
from diptych_operator.api.parse import parse_object
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.children import Children
from diptych_operator.kube.client import Difference, differences
from diptych_operator.kube.cluster import Cluster
from diptych_operator.render import KeySets, once, render_shared
from diptych_operator.render.once import KEPT, Renderings
from diptych_protocol.router_settings import Serving


class Ledger(Store):
    """Notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            self.writes.append(f"{request.method} {request.path}")
        return await super().answer(request)


@pytest.fixture
async def store() -> Ledger:
    """A service as an operator left it."""
    store = Ledger()
    for _ in range(2):
        await one_pass(store)
    store.writes.clear()
    return store


def routers(store: Store) -> Object:
    return next(obj for obj in store.deployments() if obj["metadata"]["name"] == "svc-router")


async def test_who_renders_the_same_writes_nothing(store: Ledger) -> None:
    await one_pass(store)
    assert store.writes == []


async def test_what_somebody_changed_while_nobody_led_is_mended(store: Ledger) -> None:
    spec = routers(store)["spec"]["template"]["spec"]
    image = spec["containers"][0]["image"]
    spec["containers"][0]["image"] = "another"
    await one_pass(store)
    assert {path.rpartition("/")[2] for path in store.writes} == {"svc-router"}
    template = routers(store)["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == image


async def test_a_copy_of_a_deployment_is_left_to_whoever_made_it(store: Ledger) -> None:
    decode = next(obj for obj in store.deployments() if "-decode-" in obj["metadata"]["name"])
    copy = msgspec.json.decode(msgspec.json.encode(decode))
    copy["metadata"] |= {"name": "svc-primary", "uid": "another"}
    copy["metadata"]["labels"][REVISION_LABEL] = "primary"
    copy["spec"]["replicas"] = 3
    path = next(path for path in store.objects if path.endswith(decode["metadata"]["name"]))
    store.objects[path.replace(decode["metadata"]["name"], "svc-primary")] = copy
    await one_pass(store)
    assert store.writes == []


async def test_a_field_that_is_no_longer_rendered_is_taken_away(store: Ledger) -> None:
    """The object holds all that is rendered, and more that an older operator gave it."""
    older = routers(store)
    older["metadata"]["annotations"][APPLIED_ANNOTATION] = "older"
    await one_pass(store)
    assert [path for path in store.writes if path.endswith("/svc-router")]


async def test_at_rest_nothing_is_made_and_what_somebody_changes_is_mended(
    store: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    async def counted(children: Children, *rest: Any) -> bool:
        looks.append("once")
        return await apply_all(children, *rest)

    apply_all = Children.apply_all
    monkeypatch.setattr(Children, "apply_all", counted)
    async with operating(store) as reconciler:
        for _ in range(4):
            await reconciler.reconcile(KEY)
        assert len(looks) == 1
        path = next(path for path in store.objects if path.endswith("deployments/svc-router"))
        before = store.objects[path]
        store.objects[path] = before | {"metadata": before["metadata"] | {"labels": {}}}
        await reconciler.reconcile(KEY)
    assert store.objects[path]["metadata"]["labels"] == before["metadata"]["labels"]


@pytest.mark.parametrize(
    ("wanted", "live", "found"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1, "default": 2}}, None),
        ({"cpu": 2, "env": [], "x": ""}, {"cpu": "2"}, None),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, Difference("a.b", 1, 2)),
        ({"a": {"b": 1}}, {}, Difference("a", {"b": 1}, None)),
        ({"a": [1]}, {"a": [1, 2]}, Difference("a", [1], [1, 2])),
        ({"replicas": 0}, {"replicas": 1}, Difference("replicas", 0, 1)),
        (
            {"containers": [{"name": "engine", "image": "new"}]},
            {"containers": [{"name": "engine", "image": "old", "tty": True}]},
            Difference("containers[engine].image", "new", "old"),
        ),
        # An API server adds what is new behind what was there.
        (
            {"volumes": [{"name": "keys"}, {"name": "tls", "secret": {}}, {"name": "tmp"}]},
            {"volumes": [{"name": "keys"}, {"name": "tmp"}, {"name": "tls", "secret": {}}]},
            None,
        ),
        (
            {"mounts": [{"mountPath": "/b", "name": "x"}, {"mountPath": "/a", "name": "x"}]},
            {"mounts": [{"mountPath": "/a", "name": "x"}, {"mountPath": "/b", "name": "y"}]},
            Difference("mounts[x].name", "x", "y"),
        ),
        ({"args": ["b", "a"]}, {"args": ["b", "a"]}, None),
        ({"args": ["b"]}, {"args": ["a"]}, Difference("args[0]", "b", "a")),
        # It also writes quantities in its own form.
        (
            {"resources": {"limits": {"cpu": "0.5"}}},
            {"resources": {"limits": {"cpu": "500m"}}},
            None,
        ),
        ({"v": {"sizeLimit": "1024Mi"}}, {"v": {"sizeLimit": "1Gi"}}, None),
        ({"v": {"value": "1000m"}}, {"v": {"value": "1"}}, Difference("v.value", "1000m", "1")),
    ],
)
def test_only_what_is_rendered_is_compared(
    wanted: Object, live: Object, found: Difference | None
) -> None:
    assert list(differences(wanted, live)) == ([found] if found else [])


# --- rendering once -----------------------------------------------------------------------------


def read(**more: object) -> InferenceService:
    return parse_object(Store().service(KEY) | more, Images())


def test_a_service_is_rendered_once_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[InferenceService] = []

    def counted(service: InferenceService, *rest: object) -> list[Object]:
        calls.append(service)
        return render_shared(service, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(once, "render_shared", counted)
    renderings, keys = Renderings(Cluster()), KeySets("k")

    def times(service: InferenceService, *serving: str) -> int:
        told = Serving(serving)
        made = renderings.shared(service, keys, told)
        assert made == render_shared(service, Cluster(), keys, told)
        made.clear()  # each caller has its own
        return len(calls)

    assert [times(read()) for _ in range(3)] == [1, 1, 1]
    assert times(read(status={"observedGeneration": 7})) == 1
    assert times(read(), "a") == 2
    meta = Store().service(KEY)["metadata"]
    assert times(read(metadata=meta | {"annotations": {"diptych.dev/rotate-secrets": "1"}})) == 3
    spec = Store().service(KEY)["spec"]
    assert times(read(spec=spec | {"router": {"replicas": 3}})) == 4
    renderings.forget(KEY)
    assert times(read(spec=spec | {"router": {"replicas": 3}})) == 5


def test_few_renderings_of_a_service_are_kept() -> None:
    renderings, service = Renderings(Cluster()), read()
    for pods in range(3 * KEPT):
        renderings.revision(service, "r", KeySets("k"), Counts(1, pods))
    ((_, _, made),) = renderings._made.values()
    assert len(made) == KEPT
