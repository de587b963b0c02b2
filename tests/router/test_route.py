"""One address for the models of several services, in front of real servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest
from engine_kit.echo_engine import EchoEngine
from free_ports import free_port
from served import serving
from waits import PATIENCE_S

from diptych_frontend.api_docs.operations import OPERATIONS
from diptych_frontend.app import build_app
from diptych_frontend.openai import tls
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.asgi import BodyRoom
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.openai.tls import Certificate
from diptych_protocol import EngineOverloadedError, InvalidRequestError, TenantOverloadedError
from diptych_protocol.router_settings import RouteConfig, RouteModel, RouteTarget
from diptych_router.route import proxy
from diptych_router.route.__main__ import PATHS, routing
from diptych_router.route.targets import REST_S, Targets

CHAT = "/v1/chat/completions"
CERTIFICATES = Path(__file__).parents[1] / "support" / "certificates"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Guten Tag"}], "max_tokens": 8}
OLD = TenantOverloadedError("too much", retry_after_s=7)
TOO_LONG = InvalidRequestError("too long", param="messages", code="context_length_exceeded")


@dataclass
class Route:
    """A route with the models `big` (also `gpt-4o`), of two services, and `small`, of one."""

    http: httpx.AsyncClient
    url: str
    big: EchoEngine
    spare: EchoEngine

    async def ask(self, **changes: Any) -> httpx.Response:
        return await self.http.post(CHAT, json={"model": "big"} | ASK | changes)


@contextlib.asynccontextmanager
async def routed(
    *targets: RouteTarget, keys: ApiKeys | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A route with one model, `m`."""
    config = RouteConfig("front", [RouteModel(["m"], list(targets))])
    async with (
        routing(config, keys) as (app, _, _),
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        yield http, url


@pytest.fixture
async def route() -> AsyncIterator[Route]:
    big, spare = EchoEngine(), EchoEngine()
    big.max_model_len, spare.max_model_len = 4096, 1024
    async with (
        serving(build_app(big, served_names=["big-70b"])) as at_big,
        serving(build_app(spare, served_names=["spare-8b"])) as at_spare,
    ):
        to_spare = RouteTarget("spare", at_spare, "spare-8b", 0)
        config = RouteConfig(
            "front",
            [
                RouteModel(["big", "gpt-4o"], [RouteTarget("big", at_big, "big-70b"), to_spare]),
                RouteModel(["small"], [to_spare]),
                RouteModel(["gone"], [RouteTarget("gone", "http://127.0.0.1:1", "gone")]),
            ],
        )
        async with (
            routing(config) as (app, _, _),
            serving(app) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
        ):
            yield Route(http, url, big, spare)


Answer = Callable[[bytes, int], bytes]
"""The bytes that answer a request, given it and how many were before; then the connection ends."""


@contextlib.asynccontextmanager
async def rude(answer: Answer, kept_open: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A service that writes what it likes: its address, and the requests that it got."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                asked.append(head + await reader.readexactly(length))
                writer.write(written := answer(asked[-1], len(asked) - 1))
                await writer.drain()
                if not (kept_open and written):
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def answered(body: bytes, length: int | None = None, kind: str = "application/json") -> bytes:
    declared = len(body) if length is None else length
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {declared}\r\n\r\n"
    return head.encode() + body


async def test_a_model_answers_under_each_of_its_names(route: Route) -> None:
    for name in ("big", "gpt-4o"):
        answer = await route.ask(model=name)
        assert answer.status_code == 200
        assert answer.json()["model"] == "big-70b"  # the service's answer as it is
    assert (await route.ask(model="small")).json()["model"] == "spare-8b"
    assert (len(route.big.seen), len(route.spare.seen)) == (2, 1)


async def test_a_large_body_is_read_beside_the_event_loop(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[int] = []
    asked_for = proxy.asked_for

    def watched(body: bytes) -> Any:
        readers.append(threading.get_ident())
        return asked_for(body)

    monkeypatch.setattr(proxy, "asked_for", watched)
    for size in (1, 3 << 20):
        assert (await route.ask(padding="x" * size)).status_code == 200
    assert [reader == threading.get_ident() for reader in readers] == [True, False]


async def test_bodies_that_wait_for_a_service_are_bounded(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(BodyRoom.__init__, "__defaults__", (1 << 20,))
    engine = EchoEngine()
    engine.gate.clear()
    asked = {"model": "m", "padding": "x" * 400_000} | ASK
    async with (
        serving(build_app(engine, served_names=["m"])) as at,
        routed(RouteTarget("slow", at, "m")) as (http, _),
    ):
        first = asyncio.create_task(http.post(CHAT, json=asked))
        await eventually(lambda: engine.seen)
        answer = await http.post(CHAT, json=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        engine.gate.set()
        assert (await first).status_code == 200
        assert (await http.post(CHAT, json=asked)).status_code == 200


async def test_all_but_the_models_name_goes_through_byte_for_byte() -> None:
    events = b'data: {"x":1.10,  "y":"\\u00e4\xc3\xa4"}\n\n: \n\ndata: [DONE]\n\n'
    async with (
        rude(lambda *_: answered(events, kind="text/event-stream")) as (at, asked),
        routed(RouteTarget("rude", at, "theirs")) as (http, _),
    ):
        body = b'{"temperature": 1.10,"model":"m" , "seed":12345678901234567890, "x":{"model":"m"}}'
        answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.content == events
    assert answer.headers["content-type"] == "text/event-stream"
    got = asked[0].partition(b"\r\n\r\n")[2]
    assert got == (
        b'{"temperature":1.10,"model":"theirs","seed":12345678901234567890,"x":{"model":"m"}}'
    )


async def test_a_service_hears_who_asks_and_under_which_id() -> None:
    async with (
        rude(lambda *_: answered(b"{}")) as (at, asked),
        routed(RouteTarget("rude", at, "m")) as (http, url),
    ):
        headers = {
            "Authorization": "Bearer sesame", "X-Request-Id": "mine", "Traceparent": "00-1-2-01",
            "Origin": url, "Cookie": "secret=1",
        }  # fmt: skip
        answer = await http.post(CHAT, json={"model": "m"}, headers=headers)
    assert answer.headers["x-request-id"] == "mine"
    head = asked[0].lower()
    for line in (b"authorization: bearer sesame", b"x-request-id: mine", b"traceparent: 00-1-2-01"):
        assert head.count(line) == 1
    assert b"cookie" not in head
    assert b"origin" not in head


def test_of_any_run_of_requests_each_service_gets_its_weight() -> None:
    weights = {"a": 5, "b": 2, "c": 1, "never": 0}
    model = RouteModel(["m"], [RouteTarget(name, name, "m", w) for name, w in weights.items()])
    targets = Targets(model)
    turns = [targets.order(0.0)[0].service for _ in range(40)]
    for begin in range(33):
        assert Counter(turns[begin : begin + 8]) == {"a": 5, "b": 2, "c": 1}
    assert turns == [Targets(model).order(0.0)[0].service, *turns[1:]]
    assert [each.service for each in targets.order(0.0)][-1] == "never"


def test_without_weights_services_are_asked_in_their_order() -> None:
    targets = Targets(RouteModel(["m"], [RouteTarget(name, name, "m", 0) for name in "abc"]))
    for _ in range(3):
        assert [each.service for each in targets.order(0.0)] == ["a", "b", "c"]


def test_a_service_that_could_not_be_reached_is_asked_last_for_a_while() -> None:
    first, second = (RouteTarget(name, name, "m", weight) for name, weight in (("a", 1), ("b", 0)))
    targets = Targets(RouteModel(["m"], [first, second]))
    targets.rest(first, now=10.0)
    assert targets.order(10.0 + REST_S / 2) == [second, first]
    assert targets.order(10.0 + REST_S) == [first, second]


@pytest.mark.parametrize(
    "refusal",
    [EngineOverloadedError("full"), OLD, TOO_LONG],
    ids=["503", "429", "prompt too long"],
)
async def test_another_service_answers_when_one_cannot_take_the_request(
    route: Route, refusal: Exception
) -> None:
    route.big.refusal = refusal
    answer = await route.ask()
    assert answer.status_code == 200
    assert answer.json()["model"] == "spare-8b"
    metrics = (await route.http.get("/metrics")).text
    for service, outcome in (("big", "refused"), ("spare", "answered")):
        labels = f'model_name="big",outcome="{outcome}",service="{service}"'
        assert f"diptych:route_requests_total{{{labels}}} 1.0" in metrics


@pytest.mark.parametrize(
    "beginning",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"nonsense\r\n\r\n"],
    ids=["no answer", "no first byte", "no HTTP"],
)
async def test_another_service_answers_when_one_breaks_before_the_first_byte(
    beginning: bytes,
) -> None:
    async with (
        rude(lambda *_: beginning) as (bad, _),
        rude(lambda *_: answered(b'{"good": 1}')) as (good, _),
        routed(RouteTarget("bad", bad, "m"), RouteTarget("good", good, "m", 0)) as (http, _),
    ):
        answer = await http.post(CHAT, json={"model": "m"})
        assert answer.json() == {"good": 1}


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_that_has_begun_is_never_another_services(streams: bool) -> None:
    kind = "text/event-stream" if streams else "application/json"
    cut = answered(b"data: 1\n\n", length=1000, kind=kind)
    async with (
        rude(lambda *_: cut) as (bad, _),
        rude(lambda *_: answered(b"{}")) as (good, asked),
        routed(RouteTarget("bad", bad, "m"), RouteTarget("good", good, "m", 0)) as (http, _),
    ):
        # The declared length is the service's, so the client sees that the rest is missing.
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(CHAT, json={"model": "m"})
        assert asked == []


async def test_a_stream_of_unknown_length_that_is_cut_ends_with_an_error() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    async with (
        rude(lambda *_: head + b"9\r\ndata: 1\n\n\r\n") as (bad, _),
        routed(RouteTarget("bad", bad, "m")) as (http, _),
    ):
        answer = await http.post(CHAT, json={"model": "m"})
    first, last = answer.text.strip().split("\n\n")
    assert first == "data: 1"
    assert msgspec.json.decode(last.removeprefix("data: "))["error"]["code"] == "engine_dead"


async def test_a_connection_that_was_closed_when_idle_is_no_reason_to_leave_the_service() -> None:
    def answer(_: bytes, before: int) -> bytes:
        return b"" if before == 1 else answered(b'{"first": 1}')

    async with (
        rude(answer, kept_open=True) as (at, asked),
        rude(lambda *_: answered(b"{}")) as (other, _),
        routed(RouteTarget("a", at, "m"), RouteTarget("b", other, "m", 0)) as (http, _),
    ):
        for _ in range(2):
            assert (await http.post(CHAT, json={"model": "m"})).json() == {"first": 1}
    assert len(asked) == 3


async def test_the_refusal_that_says_most_is_passed_on(route: Route) -> None:
    route.big.refusal, route.spare.refusal = OLD, TOO_LONG
    answer = await route.ask()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    route.big.refusal, route.spare.refusal = TOO_LONG, OLD
    assert (await route.ask()).status_code == 429
    route.spare.refusal = TOO_LONG
    assert (await route.ask()).json()["error"]["code"] == "context_length_exceeded"


async def test_what_is_wrong_with_a_request_no_other_service_mends(route: Route) -> None:
    answer = await route.ask(max_tokens="many")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert route.spare.seen == []


async def test_without_any_service_the_client_is_told_to_come_back(route: Route) -> None:
    answer = await route.ask(model="gone")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "gone" in answer.json()["error"]["message"]


async def test_models_are_those_of_all_services_under_the_routes_names(route: Route) -> None:
    cards = {card["id"]: card for card in (await route.http.get("/v1/models")).json()["data"]}
    assert list(cards) == ["big", "gpt-4o", "small", "gone"]
    assert [cards[name].get("max_model_len") for name in cards] == [4096, 4096, 1024, None]
    one = await route.http.get("/v1/models/gpt-4o")
    assert one.json() == cards["gpt-4o"]
    assert (await route.http.get("/v1/models/spare-8b")).status_code == 404


BAD: dict[str, tuple[bytes, int]] = {
    "no JSON": (b"{", 400),
    "no object": (b"[1]", 400),
    "empty": (b"", 400),
    "no model": (b'{"prompt": "x"}', 400),
    "model is a number": (b'{"model": 3}', 400),
    "model is null": (b'{"model": null}', 400),
    "a lone surrogate": (b'{"model": "\\ud800"}', 400),
    "unknown model": (b'{"model": "' + b"x" * 100_000 + b'"}', 404),
    "deep": (b'{"model": "big", "x": ' + b"[" * 100_000, 400),
    "many members": (b"{" + b",".join(b'"%d":1' % i for i in range(40_000)) + b"}", 413),
    "large": (b'{"model": "big", "x": "' + b"x" * (4 << 20) + b'"}', 413),
}


@pytest.mark.parametrize(("body", "status"), BAD.values(), ids=BAD)
async def test_a_hostile_body_gets_an_error_of_the_api(
    route: Route, body: bytes, status: int
) -> None:
    answer = await route.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 2000
    assert route.big.seen == route.spare.seen == []


async def test_errors_have_the_form_of_the_api_that_is_asked(route: Route) -> None:
    answer = await route.http.post("/v1/messages", json={"model": "unheard of"})
    assert (answer.status_code, answer.json()["type"]) == (404, "error")


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/batches/b1/cancel", "/v1/responses/r1", "/v1/kv_transfer/reject"]
)
async def test_what_one_service_keeps_is_refused_by_name(route: Route, path: str) -> None:
    answer = await route.http.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_routed")
    assert path in answer.json()["error"]["message"]


def test_every_operation_whose_body_names_a_model_is_routed() -> None:
    named = {
        operation.path
        for operation in OPERATIONS
        if operation.request is not None and "model" in get_type_hints(operation.request)
    }
    assert {*PATHS} == named


async def test_a_client_that_leaves_frees_its_service(route: Route, eventually: Any) -> None:
    async with route.http.stream(
        "POST", CHAT, json={"model": "big", "stream": True} | ASK | {"max_tokens": 2000}
    ) as answer:
        await anext(answer.aiter_bytes())
        route.big.gate.clear()
    await eventually(lambda: route.big.left_early)


async def test_a_key_of_the_route_opens_it_and_the_services(tmp_path: Path) -> None:
    (tmp_path / "alice").write_text("sesame")
    app = build_app(engine := EchoEngine(), api_keys=ApiKeys(tmp_path))
    keys = ApiKeys(tmp_path)
    async with serving(app) as at, routed(RouteTarget("a", at, "echo"), keys=keys) as (http, _):
        assert (await http.post(CHAT, json={"model": "m"} | ASK)).status_code == 401
        headers = {"authorization": "Bearer sesame"}
        answer = await http.post(CHAT, json={"model": "m"} | ASK, headers=headers)
        assert answer.status_code == 200
        assert len(engine.seen) == 1
        assert (await http.get("/health")).status_code == 200
        (tmp_path / "alice").write_text("")
        keys.refresh()
        answer = await http.get("/health")
        assert (answer.status_code, "no usable API key" in answer.text) == (503, True)


@dataclass
class Secured:
    """A route to one service that serves HTTPS, and is called m."""

    http: httpx.AsyncClient
    context: ssl.SSLContext
    """The service's."""
    known: Path
    proxy: proxy.Proxy

    def knows(self, content: bytes) -> None:
        """The route gets another file of the service's certificate."""
        self.known.write_bytes(content)
        for each in self.proxy.certificates.values():
            each.refresh()

    async def ask(self) -> int:
        return (await self.http.post(CHAT, json={"model": "m"} | ASK)).status_code


@contextlib.asynccontextmanager
async def secured(tmp_path: Path, certificate: Path, other: str = "") -> AsyncIterator[Secured]:
    """other: a file with a further certificate that some of its routers show."""
    listener, context = listen("127.0.0.1", 0), Certificate(certificate).context
    known = tmp_path / "a.crt"
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    target = RouteTarget("a", url, "echo", certificate=str(known), other_certificate=other)
    config = RouteConfig("front", [RouteModel(["m"], [target])])
    site = Site(build_app(EchoEngine()), listener, context)
    service = asyncio.create_task(serve_sites(site))
    try:
        async with (
            routing(config) as (app, made, _),
            serving(app) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
        ):
            yield Secured(http, context, known, made)
    finally:
        service.cancel()
        await asyncio.wait((service,))


async def test_a_service_that_serves_https_is_known_by_its_certificate(tmp_path: Path) -> None:
    own, other = ((CERTIFICATES / name / "tls.crt").read_bytes() for name in ("first", "second"))
    async with secured(tmp_path, CERTIFICATES / "first") as route:
        for content, status in ((b"", 503), (other + own, 503), (own, 200), (b"bad", 200)):
            route.knows(content)
            assert await route.ask() == status
        (card,) = (await route.http.get("/v1/models")).json()["data"]
        assert "max_model_len" in card, "it was asked"


async def test_a_certificate_that_is_known_serves_past_its_last_day(tmp_path: Path) -> None:
    async with secured(tmp_path, CERTIFICATES / "expired") as route:
        route.knows((CERTIFICATES / "expired" / "tls.crt").read_bytes())
        assert await route.ask() == 200


async def test_requests_wait_until_the_route_has_the_changed_certificate_of_a_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(tmp_path, CERTIFICATES / "first") as route:
        route.knows((CERTIFICATES / "first" / "tls.crt").read_bytes())
        assert await route.ask() == 200
        new = CERTIFICATES / "second"
        route.context.load_cert_chain(new / "tls.crt", new / "tls.key")
        asked = [asyncio.create_task(route.ask()) for _ in range(2)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [await each for each in done] == [200], "it took the connection that was there"
        done, waiting = await asyncio.wait(waiting, timeout=0.5)
        assert not done, "nobody else could answer"
        route.knows((new / "tls.crt").read_bytes())
        assert [await each for each in waiting] == [200]
        assert "cannot be reached" not in caplog.text


async def test_a_service_that_keeps_its_former_certificate_is_known_by_it(tmp_path: Path) -> None:
    """As where the new one of its Secret is not that of the key beside it."""
    async with secured(tmp_path, CERTIFICATES / "first") as route:
        route.knows((CERTIFICATES / "first" / "tls.crt").read_bytes())
        assert await route.ask() == 200
        new = CERTIFICATES / "second"
        route.knows((new / "tls.crt").read_bytes())
        asked = [asyncio.create_task(route.ask()) for _ in range(2)]
        done, waiting = await asyncio.wait(asked, timeout=PATIENCE_S / 4)
        assert ([await each for each in done], waiting) == ([200, 200], set())
        (card,) = (await route.http.get("/v1/models")).json()["data"]
        assert "max_model_len" in card, "it was asked"
        route.context.load_cert_chain(new / "tls.crt", new / "tls.key")
        assert await asyncio.gather(*(route.ask() for _ in range(9))) == [200] * 9
        (known,) = route.proxy.certificates.values()
        assert len(known.contexts) == 1, "the former is no longer trusted"


async def test_a_former_certificate_is_not_believed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has its key, and stands between, could show it again and again."""
    async with secured(tmp_path, CERTIFICATES / "first") as route:
        route.knows((CERTIFICATES / "first" / "tls.crt").read_bytes())
        assert await route.ask() == 200
        route.knows((CERTIFICATES / "second" / "tls.crt").read_bytes())
        (known,) = route.proxy.certificates.values()
        assert len(known.contexts) == 2, "for a while"
        monkeypatch.setattr(tls, "FORMER_S", 0.0)
        known.refresh()
        assert len(known.contexts) == 1
        assert [await route.ask() for _ in range(2)] == [503, 503]


async def test_each_certificate_of_a_services_routers_is_known(tmp_path: Path) -> None:
    """While routers with another Secret take the place of those that were there."""
    first, second = (CERTIFICATES / name for name in ("first", "second"))
    async with secured(tmp_path, second, other=str(second / "tls.crt")) as route:
        route.knows((first / "tls.crt").read_bytes())
        for number, shown in enumerate((second, first, second, first), 1):
            route.context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
            asked = [route.ask() for _ in range(2 * number)]  # more than connections are kept
            assert await asyncio.gather(*asked) == [200] * len(asked)


async def test_a_page_of_another_site_may_not_use_a_route(route: Route) -> None:
    headers = {"origin": "https://elsewhere.example", "sec-fetch-site": "cross-site"}
    answer = await route.http.post(CHAT, json={"model": "big"} | ASK, headers=headers)
    assert answer.status_code == 403


async def test_the_program_ends_when_its_answers_have_ended(
    tmp_path: Path, eventually: Any
) -> None:
    async def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await http.get("/health")).status_code == 200
        return False

    engine, port = EchoEngine(), free_port()
    async with (
        serving(build_app(engine)) as at,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http,
    ):
        config = RouteConfig("front", [RouteModel(["m"], [RouteTarget("a", at, "echo")])])
        (tmp_path / "route.json").write_bytes(msgspec.json.encode(config))
        program = (sys.executable, "-m", "diptych_router.route", "--port", str(port))
        process = subprocess.Popen([*program, "--config", str(tmp_path / "route.json")])
        try:
            await eventually(ready)
            engine.gate.clear()
            asking = asyncio.create_task(http.post(CHAT, json={"model": "m"} | ASK))
            await eventually(lambda: engine.running)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            engine.gate.set()
            assert (await asking).status_code == 200
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        finally:
            process.kill()
