"""As much of an API server as an operator's process needs to watch, on a port of its own.

It has no objects but those that are created or added, and serves our CRD only as long as it is told
to. On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from cluster_kit.reconciling import KEY, Object, Store

OURS = "/apis/diptych.dev/v1alpha1"
RESOURCES = {
    "/api/v1": ("pods", "services", "configmaps", "serviceaccounts", "events", "namespaces"),
    "/apis/apiextensions.k8s.io/v1": ("customresourcedefinitions",),
    "/apis/apps/v1": ("deployments", "daemonsets"),
    "/apis/policy/v1": ("poddisruptionbudgets",),
    "/apis/networking.k8s.io/v1": ("networkpolicies",),
    "/apis/coordination.k8s.io/v1": ("leases",),
    OURS: ("inferenceservices", "modelroutes", "poolscalers"),
}


class SmallApi:
    """The routes; `store` keeps the objects."""

    def __init__(self) -> None:
        self.store = Store()
        self.serves_crd = False
        self.missing: set[str] = set()
        """Plurals of ours whose CRD is not there."""
        self._crd_went = asyncio.Event()
        self.crd_is_watched = asyncio.Event()

    def take_crd_away(self) -> None:
        """As if somebody deleted it: watches end, and lists are not found."""
        self.serves_crd = False
        self._crd_went.set()

    def add_service(self) -> None:
        """One that is there when the watches begin."""
        service = self.store.service(KEY)
        service["metadata"] |= {"resourceVersion": "1", "generation": 1}
        self.store.objects[f"{OURS}/namespaces/{KEY[0]}/inferenceservices/{KEY[1]}"] = service

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/version":
            return web.json_response({"major": "1", "minor": "31"})
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            return web.json_response(
                {"groups": [_group(v) for v in self._served() if v != "/api/v1"]}
            )
        if path in self._served():
            return web.json_response({"resources": [_resource(n) for n in RESOURCES[path]]})
        version = next((v for v in RESOURCES if path.startswith(v)), "")
        if version not in self._served() or path.rpartition("/")[2] in self.missing:
            return web.json_response({"reason": "NotFound"}, status=404)
        if request.method != "GET" or path.rpartition("/")[2] not in RESOURCES[version]:
            return await self.store.answer(request)
        if "watch" in request.query:
            return await self._watch(request, version)
        items = [o for p, o in self.store.objects.items() if p.rpartition("/")[0] == path]
        first = int(request.query.get("continue", "0"))
        after = first + int(request.query.get("limit", len(items)))
        meta = {"resourceVersion": "1", "continue": str(after) if after < len(items) else ""}
        kind = {"apiVersion": version.split("/", 2)[2], "kind": f"{path.rpartition('/')[2]}List"}
        return web.json_response({**kind, "metadata": meta, "items": items[first:after]})

    def _served(self) -> list[str]:
        return [version for version in RESOURCES if version != OURS or self.serves_crd]

    async def _watch(self, request: web.Request, version: str) -> web.StreamResponse:
        """Nothing happens, until the watch's time is over or its kind is no longer there."""
        stream = web.StreamResponse()
        await stream.prepare(request)
        if request.path.endswith("/inferenceservices"):
            self.crd_is_watched.set()
        went = self._crd_went if version == OURS else asyncio.Event()
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "60"))):
                await went.wait()
        except TimeoutError:
            pass
        return stream


def _group(version: str) -> Object:
    name, number = version.removeprefix("/apis/").split("/")
    served = {"groupVersion": f"{name}/{number}", "version": number}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _resource(plural: str) -> Object:
    verbs = ["get", "list", "watch"]
    return {"name": plural, "kind": plural, "namespaced": True, "singularName": "", "verbs": verbs}


@asynccontextmanager
async def serving_api(folder: Path, port: int = 0) -> AsyncIterator[tuple[SmallApi, Path]]:
    """The API server, and a kubeconfig that leads to it. port: 0 takes any that is free."""
    api = SmallApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        kubeconfig = folder / "kubeconfig"
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        kubeconfig.write_text(
            f"apiVersion: v1\nkind: Config\ncurrent-context: x\nusers: [{{name: x, user: {{}}}}]\n"
            f"clusters: [{{name: x, cluster: {{server: '{server}'}}}}]\n"
            "contexts: [{name: x, context: {cluster: x, user: x}}]\n"
        )
        yield api, kubeconfig
    finally:
        await runner.cleanup()
