"""The reconciler against a small server that keeps objects as an API server does.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

from aiohttp import web
from kubernetes.aio import client

from diptych_operator.api.images import Images
from diptych_operator.api.limits import Allowed
from diptych_operator.kube.client import Kube
from diptych_operator.kube.cluster import SET_KIND, Cluster
from diptych_operator.kube.rivals import Rivals
from diptych_operator.kube.watch import trimmed
from diptych_operator.kube.workloads import deployments_among, sizes
from diptych_operator.metrics import OperatorMetrics
from diptych_operator.reconcile import Reconciler
from diptych_operator.routers import Routers
from diptych_protocol.admin import RouterReport

Object = dict[str, Any]
KEY = ("ns", "svc")
SECRETS = "/api/v1/namespaces/ns/secrets"
RUNNING: Object = {"phase": "Running", "podIP": "127.0.0.9"}
REPLICA_SET: Object = {"kind": "ReplicaSet", "name": "of-them", "controller": True}
"""What owns the pods."""


def edited(obj: Object, operations: Sequence[Object]) -> Object:
    """The object after a JSON patch that replaces values."""
    after = deepcopy(obj)
    for operation in operations:
        assert operation["op"] == "replace"
        *way, last = operation["path"].split("/")[1:]
        place: Any = after
        for step in way:
            place = place[int(step) if isinstance(place, list) else step]
        assert last in place
        place[last] = operation["value"]
    return after


class Store:
    """As much of an API server as keeps objects; and what the watches would have seen of it."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.pods_here: list[Object] = []
        self.annotations: dict[str, str] = {}
        self.uid = "u1"
        """The uid of the service; another one after it was made anew."""
        self.spec: Object = {}
        self.serves_cluster = False
        """The operator is that of the cluster, and not of the namespace alone."""
        self.refuses_pods: tuple[int, str] | None = None
        """It takes no pod template, and answers this status and message."""
        self.refuses_status: tuple[int, str] | None = None
        """It takes no status, and answers this HTTP status and message."""
        self.drops_of_status: frozenset[str] = frozenset()
        """Fields of a status that its CRD lacks: it drops them in silence."""
        self.refuses_owners_of = ""
        """The kind, in the plural, of which it takes no patch that gives an object an owner."""
        self.reports: Sequence[RouterReport] | None = None
        """What its routers say; None: they are asked at their ports."""
        self._version = 0

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path.removesuffix("/status")
        if request.method == "GET":
            found = self.objects.get(path)
            return web.json_response(found or {"reason": "NotFound"}, status=200 if found else 404)
        if request.method == "DELETE":
            return web.json_response(self.objects.pop(path, {}))
        body = await request.json()
        if request.content_type == "application/json-patch+json":
            if path not in self.objects:
                return web.json_response({"reason": "NotFound"}, status=404)
            body = edited(self.objects[path], body)
        for refusal, about in (
            (self.refuses_pods, "template" in body.get("spec", {})),
            (self.refuses_status, path != request.path),
        ):
            if refusal and about:
                status, message = refusal
                return web.json_response({"reason": "Refused", "message": message}, status=status)
        for name in self.drops_of_status & body.get("status", {}).keys():
            del body["status"][name]
        owned = request.method == "PATCH" and body.keys() == {"metadata"}
        if owned and f"/{self.refuses_owners_of}/" in path:
            return web.json_response({"reason": "Forbidden", "message": "not you"}, status=403)
        if request.method == "POST":
            meta = body["metadata"]
            path += "/" + meta.get("name", f"{meta.get('generateName')}{self._version}")
            if path in self.objects:
                return web.json_response({"reason": "AlreadyExists"}, status=409)
        before = self.objects.get(path, {})
        if request.method == "PATCH":
            body |= {"metadata": before.get("metadata", {}) | body.get("metadata", {})}
        kept = {**before, **body}
        if "kind" not in kept:
            return web.json_response({"reason": "NotFound"}, status=404)
        self._version += 1
        kept["metadata"] |= {"uid": path, "resourceVersion": str(self._version), "generation": 1}
        if "dryRun" not in request.query:
            self.objects[path] = kept
        return web.json_response(kept)

    def names(self, collection: str) -> set[str]:
        return {path.rpartition("/")[2] for path in self.objects if f"/{collection}/" in path}

    # What the watches have seen.

    def service(self, key: tuple[str, str]) -> Object:
        meta = {"name": "svc", "namespace": "ns", "uid": self.uid, "annotations": self.annotations}
        written = next((o for p, o in self.objects.items() if "/inferenceservices/" in p), {})
        return {
            "apiVersion": "diptych.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": meta,
            "spec": {"model": {"uri": "dummy://"}, "prefill": {}, "decode": {}, **self.spec},
            "status": written.get("status"),
        }

    def service_keys(self) -> set[tuple[str, str]]:
        return {KEY}

    def children(self, key: tuple[str, str]) -> list[Object]:
        unseen = ("Secret", "Event", "InferenceService")
        return [obj for obj in self.objects.values() if obj["kind"] not in unseen]

    def pods(self, key: tuple[str, str]) -> list[Object]:
        return self.pods_here

    def start_pods(self, status: Object | None = None) -> None:
        """One for each Deployment that there is now."""
        for deployment in self.deployments():
            its = deployment["metadata"]
            meta = {"name": f"{its['name']}-0", "namespace": "ns", "labels": its["labels"]}
            meta["ownerReferences"] = [REPLICA_SET]
            spec = deployment["spec"]["template"]["spec"]
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
            self.pods_here.append(dict(trimmed({**pod, "status": status or RUNNING})))
            deployment["status"] = {"readyReplicas": 1, "replicas": 1, "observedGeneration": 1}

    def settle(self) -> None:
        """Every Deployment has the pods that it wants, ready, and no others."""
        self.pods_here.clear()
        for made in self.children(KEY):
            if made["kind"] == SET_KIND:
                roles = [{"name": role, **_all(wanted)} for role, wanted in sizes(made).items()]
                made["status"] = {"roleStatuses": roles, "observedGeneration": 1}
        for deployment in self.deployments():
            wanted = deployment["spec"].get("replicas", 1)
            deployment["status"] = {**_all(wanted), "observedGeneration": 1}
        for pool in deployments_among(self.children(KEY)):
            its, wanted = pool["metadata"], pool["spec"].get("replicas", 1)
            for number in range(wanted):
                meta: Object = {"name": f"{its['name']}-{number}", "namespace": "ns"}
                meta["ownerReferences"] = [REPLICA_SET]
                pod = {
                    "apiVersion": "v1", "kind": "Pod", "status": RUNNING,
                    "metadata": meta | {"labels": its["labels"]},
                    "spec": {"containers": [{"name": "engine", "image": "engine"}]},
                }  # fmt: skip
                self.pods_here.append(dict(trimmed(pod)))

    def condition(self, kind: str) -> Object:
        conditions: list[Object] = self.service(KEY)["status"]["conditions"]
        (found,) = (c for c in conditions if c["type"] == kind)
        return found

    def events(self) -> list[str]:
        return [obj["reason"] for obj in self.objects.values() if obj["kind"] == "Event"]

    def deployments(self) -> list[Object]:
        return [obj for obj in self.children(KEY) if obj["kind"] == "Deployment"]


def _all(wanted: int) -> Object:
    """What a controller says of so many pods that are all well."""
    return dict.fromkeys(("readyReplicas", "replicas", "updatedReplicas"), wanted)


async def passes(store: Store, reconciler: Reconciler, times: int = 3) -> None:
    """All wanted pods are ready after each."""
    for _ in range(times):
        await reconciler.reconcile(KEY)
        store.settle()
        for pod in store.pods_here:
            pod["status"] = RUNNING | {"conditions": [{"type": "Ready", "status": "True"}]}
    await reconciler.reconcile(KEY)


@asynccontextmanager
async def serving(store: Store) -> AsyncIterator[Kube]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", store.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Kube(client.ApiClient(client.Configuration(host=host))) as kube:
            yield kube
    finally:
        await runner.cleanup()


class StoresRouters(Routers):
    """Routers that say what the store says."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    async def poll(
        self, addresses: Sequence[str], tokens: Sequence[str]
    ) -> Mapping[str, RouterReport | None]:
        if self._store.reports is None:
            return await super().poll(addresses, tokens)
        return {str(place): each for place, each in enumerate(self._store.reports)}


@asynccontextmanager
async def operating(
    store: Store, allowed: Allowed | None = None, cluster: Cluster | None = None
) -> AsyncIterator[Reconciler]:
    """An operator that has just started and remembers nothing."""
    async with serving(store) as kube, StoresRouters(store) as routers:
        rivals = Rivals(kube, serves_cluster=store.serves_cluster)
        yield Reconciler(
            kube,
            store,  # type: ignore[arg-type]
            cluster or Cluster(),
            routers,
            OperatorMetrics(),
            Images(),
            rivals,
            allowed,
        )


async def one_pass(store: Store, allowed: Allowed | None = None) -> None:
    """One pass of such an operator."""
    async with operating(store, allowed) as reconciler:
        await reconciler.reconcile(KEY)
