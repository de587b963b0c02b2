"""What the operator makes of answers over HTTP: of the API server's, and of routers' reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from cluster_kit.reconciling import KEY, Store, one_pass, operating
from kubernetes.aio import client
from msgspec import structs
from waits import FOR_EVER_S, PATIENCE_S

from diptych_operator import routers
from diptych_operator.kube.client import RIGHTS, ApiError, Kube
from diptych_operator.reconcile import AUTOSCALE_INTERVAL_S, REST_INTERVAL_S
from diptych_operator.routers import Routers
from diptych_protocol.admin import RouterReport

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
REPORT = RouterReport(
    ready=True, reason="", open_requests=3, held_requests=0, serving_revisions=[], engines=[],
    canaries=[],
)  # fmt: skip


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[int]:
    """A server on 127.0.0.1 that answers everything so; its port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


# --- the API server ---------------------------------------------------------------------------


async def refusal(status: int, body: str, content_type: str = "application/json") -> ApiError:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type=content_type)

    async with served(answer) as port, kube(port) as api:
        with pytest.raises(ApiError) as caught:
            await api.get("v1", "ConfigMap", "ns", "x")
        return caught.value


def kube(port: int) -> Kube:
    return Kube(client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{port}")))


@pytest.mark.parametrize(
    ("status", "message", "refused"),
    [
        (400, "not so", True),
        (401, "Unauthorized", False),  # our token, not the service, is at fault
        (403, "denied by a webhook", True),
        (409, "the object has been modified", False),
        (422, "spec.replicas: Invalid value", True),
        (429, "slow down", False),
        (500, "etcd is away", False),
        (500, "failed to create typed patch object: .spec.x: field not declared in schema", True),
    ],
)
async def test_what_is_refused_for_good(status: int, message: str, refused: bool) -> None:
    body = msgspec.json.encode({"kind": "Status", "reason": "R", "message": message}).decode()
    error = await refusal(status, body)
    assert (error.status, error.reason, str(error)) == (status, "R", message)
    assert error.is_refusal is refused
    assert error.blames_object


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        (403, 'secrets is forbidden: User "x" cannot create resource "secrets" in API group ""',
         RIGHTS),
        (403, 'services "x" is forbidden: exceeded quota: q, used: services=3',
         "Raise the namespace's ResourceQuota."),
        (403, 'deployments "x" is forbidden: unable to create new content in namespace ns because '
         "it is being terminated", "Wait until the namespace is gone."),
        (422, 'ConfigMap "x" is invalid: data: Forbidden: field is immutable when `immutable` is '
         "set", "Delete the one that is there: it is made anew."),
        (422, 'Service "x" is invalid: spec.clusterIPs[0]: Invalid value: []string{"None"}: may '
         "not change once set", "Delete the one that is there: it is made anew."),
    ],
)  # fmt: skip
async def test_what_no_spec_would_mend_names_its_remedy(
    status: int, message: str, remedy: str
) -> None:
    error = await refusal(status, msgspec.json.encode({"message": message}).decode())
    assert str(error) == f"{message}. {remedy}"
    assert not error.blames_object


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (422, "spec.containers[0].image: Required value", "PodTemplateRejected"),
        (403, 'admission webhook "x" denied the request: no', "PodTemplateRejected"),
        (403, 'deployments "x" is forbidden: exceeded quota: q, used: 1', "OperatorProblem"),
        (403, 'deployments is forbidden: User "x" cannot patch resource', "OperatorProblem"),
        (422, 'Deployment "x" is invalid: spec.selector: field is immutable', "OperatorProblem"),
    ],
)
async def test_a_pod_template_is_blamed_for_what_another_one_would_mend(
    status: int, message: str, reason: str
) -> None:
    store = Store()
    store.refuses_pods = (status, message)
    await one_pass(store)
    degraded = store.condition("Degraded")
    assert degraded["reason"] == reason
    assert message in degraded["message"]
    assert ("podTemplate" in degraded["message"]) is (reason == "PodTemplateRejected")


@pytest.mark.parametrize("status", [200, 502])
@pytest.mark.parametrize("body", ["<html>busy</html>", "[1]", ""])
async def test_an_answer_of_somebody_else_is_an_error_and_no_refusal(
    status: int, body: str
) -> None:
    error = await refusal(status, body, "text/html")
    assert error.status == (0 if status == 200 else status)
    assert not error.is_refusal


async def test_a_closed_port_is_an_error_in_words() -> None:
    async with kube(9) as api:
        with pytest.raises(ApiError, match=r"the API server does not answer: .*127\.0\.0\.1:9"):
            await api.version()


async def test_what_is_not_there_is_none() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)

    async with served(answer) as port, kube(port) as api:
        assert await api.get("v1", "ConfigMap", "ns", "x") is None
        await api.delete("v1", "ConfigMap", "ns", "x", "uid")
        assert api.requests == 2


# --- routers ----------------------------------------------------------------------------------


async def poll(answer: Answer, monkeypatch: pytest.MonkeyPatch, *tokens: str) -> Any:
    async with served(answer) as port, Routers() as session:
        monkeypatch.setattr(routers, "ADMIN_PORT", port)
        return await session.poll(["127.0.0.1"], tokens or ["token"])


@pytest.mark.parametrize("tokens", [("token",), ("newer", "token")])
async def test_a_router_reports_to_either_token(
    monkeypatch: pytest.MonkeyPatch, tokens: tuple[str, ...]
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer token":
            return web.Response(status=401)
        return web.Response(body=msgspec.json.encode(REPORT))

    assert await poll(answer, monkeypatch, *tokens) == {"127.0.0.1": REPORT}
    assert await poll(answer, monkeypatch, "wrong") == {"127.0.0.1": None}


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"\xff not json")


async def elsewhere(request: web.Request) -> web.StreamResponse:
    if request.path == "/report":
        return web.Response(body=msgspec.json.encode(REPORT))
    return web.Response(status=302, headers={"Location": "/report"})


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(msgspec.json.encode(REPORT))
    return response


async def packed(request: web.Request) -> web.StreamResponse:
    response = web.Response(body=msgspec.json.encode(REPORT))
    response.enable_compression(web.ContentCoding.gzip)
    return response


async def too_long(request: web.Request) -> web.StreamResponse:
    return web.Response(body=msgspec.json.encode(REPORT) + b" " * routers.MAX_REPORT_BYTES)


@pytest.mark.parametrize("answer", [garbage, elsewhere, endless, packed, too_long])
async def test_what_is_no_report_counts_as_out_of_reach(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await poll(answer, monkeypatch) == {"127.0.0.1": None}


async def test_a_router_that_sleeps_tells_of_a_request_when_it_comes(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    comes, woken = asyncio.Event(), asyncio.Event()
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query["wait"])
        await comes.wait()
        return web.Response(body=msgspec.json.encode(structs.replace(REPORT, held_requests=1)))

    async with served(answer) as port, Routers(lambda _: woken.set()) as session:
        monkeypatch.setattr(routers, "ADMIN_PORT", port)
        for _ in range(3):  # each pass says so again
            session.follow(("ns", "svc"), ["127.0.0.1"], ["token"])
            await asyncio.sleep(0.05)
        await eventually(lambda: asked)
        assert len(asked) == 1
        assert not woken.is_set()
        comes.set()
        async with asyncio.timeout(PATIENCE_S):
            await woken.wait()
        session.follow(("ns", "svc"), [], [])


async def test_one_of_an_older_release_which_answers_at_once_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=msgspec.json.encode(REPORT))

    async with served(answer) as port, Routers() as session:
        monkeypatch.setattr(routers, "ADMIN_PORT", port)
        monkeypatch.setattr(routers, "REST_S", FOR_EVER_S)
        session.follow(("ns", "svc"), ["127.0.0.1"], ["token"])
        await asyncio.sleep(0.3)
        assert len(asked) <= 1


ELASTIC = {"router": {"elasticRoles": 1}, "slo": {"ttftMs": 500, "interTokenMs": 50}}


@pytest.mark.parametrize(
    ("ready", "spec", "seconds"),
    [
        (True, {}, REST_INTERVAL_S),
        (False, {}, AUTOSCALE_INTERVAL_S),
        (True, ELASTIC, AUTOSCALE_INTERVAL_S),
    ],
    ids=["at rest", "not ready", "roles may turn"],
)
async def test_routers_are_soon_asked_again_for_what_no_event_tells(
    ready: bool, spec: dict[str, Any], seconds: float
) -> None:
    """That one is ready again: the kubelet may not have noticed that it was not. And which engines
    have turned."""
    store = Store()
    store.spec = {"transfer": {"verify": "Off"}, **spec}
    store.reports = [structs.replace(REPORT, ready=ready)]
    async with operating(store) as reconciler:
        for _ in range(2):
            await reconciler.reconcile(KEY)
            store.settle()
        assert await reconciler.reconcile(KEY) == seconds
