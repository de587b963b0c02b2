"""Hands requests to services, byte for byte but for the model's name, and their answers back.

A service that cannot take a request is followed by the next, until one begins to answer. Clients'
keys go along: services with the same keys count and share by client as if they were asked directly.
"""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry, Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych_frontend.observability.metrics import PREFIX
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import Exchange, decode_json, exchange_of
from diptych_frontend.openai.generation import unknown_model
from diptych_frontend.openai.mounted import LOOK_INTERVAL_S
from diptych_frontend.openai.request_workers import RequestWorkers
from diptych_frontend.openai.responses import json_response
from diptych_frontend.openai.tls import KnownCertificate
from diptych_protocol import (
    UNREADABLE,
    ClientClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
)
from diptych_protocol.router_settings import RouteConfig, RouteTarget
from diptych_router.route.targets import Targets, by_name

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 4 << 20
"""As services have it."""
CONNECT_S: Final = 2.0
SILENCE_S: Final = 600.0
"""A service that sends no byte for so long has failed."""
ROTATION_S: Final = 90.0
"""Within this time all pods have a changed certificate: the kubelet looks every minute or so."""
CARDS_S: Final = 2.0
"""How long a service may take to tell of its models."""
MAX_SHORT_BYTES: Final = 64 << 10
REFUSALS: Final = frozenset({429, 502, 503, 504})
"""Answers of a service that cannot take the request now; another may."""
TOO_LONG: Final = b'"context_length_exceeded"'
"""In an answer 400: another model may have room for the prompt."""
HOP_BY_HOP: Final = frozenset({
    "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect",
    "proxy-authorization", "proxy-authenticate", "proxy-connection", "x-request-id",
})  # fmt: skip
NOT_ASKED: Final = HOP_BY_HOP | {"host", "origin", "cookie", "content-length"}
NOT_ANSWERED: Final = HOP_BY_HOP | {"date", "server", "request-id", "set-cookie"}

_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Proxy:
    """Answers for all models of a route. It is the ASGI endpoint of paths whose body names one."""

    leaving = False

    def __init__(
        self, config: RouteConfig, registry: CollectorRegistry, keys: ApiKeys | None = None
    ) -> None:
        """Needs a running event loop. keys: None lets everybody in."""
        self._keys = keys
        self._targets: Mapping[str, Targets] = by_name(config.models)
        self._name = config.name
        self._created = int(time.time())
        self._requests = Counter(
            f"{PREFIX}route_requests",
            "Requests handed to a service, by what came of it: answered, refused, or lost.",
            ("model_name", "service", "outcome"),
            registry=registry,
        )
        self._workers = RequestWorkers()
        self.certificates = {
            target.url: KnownCertificate(
                map(Path, filter(None, (target.certificate, target.other_certificate)))
            )
            for targets in self._targets.values()
            for target in targets.all
            if target.certificate
        }
        """Those of services that serve HTTPS, by their addresses."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=SILENCE_S, total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept-Encoding"),
        )

    async def close(self) -> None:
        await self._session.close()

    async def check_health(self) -> None:
        """Raise `ClientClosedError` once the process is about to end, or if it has no key by which
        it could let anybody in. Services speak for themselves: without one of them the others are
        still to be reached."""
        if self.leaving:
            raise ClientClosedError("the route is shutting down")
        if self._keys is not None and not self._keys.names:
            raise ClientClosedError("there is no usable API key, so nobody would be let in")

    async def check_live(self) -> None:
        return

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        body = exchange.body
        name, fields = await self._workers.read(scope, body, partial(asked_for, body))
        targets = self._targets.get(name)
        if targets is None:
            raise unknown_model(name, frozenset(self._targets))
        del body
        with UntilDisconnect(receive, exchange):
            await self._hand_on(scope, fields, targets, receive, send)

    async def _hand_on(
        self,
        scope: Scope,
        fields: dict[str, msgspec.Raw],
        targets: Targets,
        receive: Receive,
        send: Send,
    ) -> None:
        """Let the services try one after the other until one answers. If all that could be reached
        refuse, the client gets the answer that says most: not that the prompt is too long."""
        exchange = exchange_of(scope)
        refusal: Response | None = None
        began = time.monotonic()
        queue, dropped = deque(targets.order(began)), set[str]()
        while queue:
            target = queue.popleft()
            try:
                short = await self._ask(scope, fields, target, send)
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                is_over = exchange.status is not None
                if not is_over and _was_dropped(exc) and target.url not in dropped:
                    # A router that ends closes connections that are idle; the service has others.
                    dropped.add(target.url)
                    queue.appendleft(target)
                    continue
                if refusal is None and not queue and self._is_rotating(target, exc, began):
                    await asyncio.sleep(LOOK_INTERVAL_S)
                    queue.append(target)
                    continue
                self._count(targets, target, "lost")
                if is_over:
                    raise EngineDeadError(f"{target.service} ended its answer early") from exc
                if targets.rest(target, time.monotonic()):
                    log.warning("the service %s cannot be reached: %s", target.service, exc)
                continue
            refuses = short is not None and (short.status_code != 400 or TOO_LONG in short.body)
            self._count(targets, target, "refused" if refuses else "answered")
            if short is None:
                return
            if refusal is None or refusal.status_code == 400 or not refuses:
                refusal = short
            if not refuses:
                break
        if refusal is None:
            raise EngineOverloadedError(
                f"no service of the model {targets.name} can be reached; retry later"
            )
        await refusal(scope, receive, send)

    async def _ask(
        self, scope: Scope, fields: dict[str, msgspec.Raw], target: RouteTarget, send: Send
    ) -> Response | None:
        """Ask one service, and send its answer on. Returns one that was read whole and not sent,
        because it may leave the request to another service."""
        *others, last = self._trusted(target)
        for trusted in others:
            with suppress(aiohttp.ClientConnectorCertificateError):
                return await self._ask_trusting(trusted, scope, fields, target, send)
        return await self._ask_trusting(last, scope, fields, target, send)

    async def _ask_trusting(
        self,
        trusted: ssl.SSLContext | bool,
        scope: Scope,
        fields: dict[str, msgspec.Raw],
        target: RouteTarget,
        send: Send,
    ) -> Response | None:
        exchange = exchange_of(scope)
        async with self._session.post(
            f"{target.url}{scope['path']}",
            data=io.BytesIO(_renamed(exchange.body, fields, target)),  # is written in parts
            headers=_asked(scope, exchange),
            allow_redirects=False,
            ssl=trusted,
        ) as answer:
            if isinstance(trusted, ssl.SSLContext):
                self.certificates[target.url].recognise(trusted)
            if answer.status in REFUSALS or answer.status == 400:
                short = Response(await _beginning(answer), answer.status)
                kept = (each for each in _answered(answer) if each[0] != b"content-length")
                short.raw_headers += kept  # beside its own content-length
                return short
            part = await answer.content.readany()
            fields.clear()  # no service will be asked any more
            exchange.body = b""
            await _pass_on(answer, part, exchange, send)
            return None

    def _trusted(self, target: RouteTarget) -> Sequence[ssl.SSLContext | bool]:
        """What may be the argument `ssl` of aiohttp, in turn."""
        known = self.certificates.get(target.url)
        return (True,) if known is None else known.contexts

    def _is_rotating(self, target: RouteTarget, exc: Exception, began: float) -> bool:
        """Whether a service that was known shows another certificate: this pod and its own get a
        changed one at different times. began: when the request came, by the monotonic clock."""
        differs = isinstance(exc, aiohttp.ClientConnectorCertificateError)
        known = self.certificates.get(target.url)
        was_shown = known is not None and known.shown is not None
        return differs and was_shown and time.monotonic() - began < ROTATION_S

    def _count(self, targets: Targets, target: RouteTarget, outcome: str) -> None:
        self._requests.labels(targets.name, target.service, outcome).inc()

    async def models(self, request: Request) -> Response:
        """Answer /v1/models: each name of the route, with what its services say of it."""
        return json_response({"object": "list", "data": await self._cards(request, self._targets)})

    async def model(self, request: Request) -> Response:
        """Answer /v1/models/{model}."""
        name = request.path_params["model"]
        if name not in self._targets:
            raise unknown_model(name, frozenset(self._targets))
        return json_response((await self._cards(request, (name,)))[0])

    async def _cards(self, request: Request, names: Iterable[str]) -> list[dict[str, Any]]:
        headers = _asked(request.scope, exchange_of(request.scope))
        asked = {self._targets[name]: None for name in names}
        found = await asyncio.gather(*(self._card(targets, headers) for targets in asked))
        said = dict(zip(asked, found, strict=True))
        own = {"object": "model", "created": self._created, "owned_by": self._name}
        return [own | said[self._targets[name]] | {"id": name} for name in names]

    async def _card(self, targets: Targets, headers: list[tuple[str, str]]) -> dict[str, Any]:
        """What the first service that answers says of the model; empty if none does."""
        limit = aiohttp.ClientTimeout(total=CARDS_S)
        for target, trusted in ((t, trusted) for t in targets.all for trusted in self._trusted(t)):
            url = f"{target.url}/v1/models/{quote(target.model)}"
            try:
                async with self._session.get(
                    url, headers=headers, timeout=limit, ssl=trusted
                ) as answer:
                    if answer.status == 200:
                        return msgspec.json.decode(await _beginning(answer), type=dict[str, Any])
            except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE):
                continue
        return {}


async def not_here(request: Request) -> Response:
    """Refuse what names no model: it is kept by one service."""
    raise InvalidRequestError(
        f"{request.url.path[:200]}: a route hands on requests that name a model; ask the service "
        "that keeps this, at its own address",
        status=404,
        code="not_routed",
    )


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices within half a minute that the other machine is gone."""
    made = socket.socket(*info[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def asked_for(body: bytes) -> tuple[str, dict[str, msgspec.Raw]]:
    """Return the model's name in a body, and all fields as they were written. Raises
    `InvalidRequestError`."""
    fields = decode_json(body, _fields, max_values=MAX_BODY_BYTES)
    if "model" not in fields:
        raise InvalidRequestError("missing required field: model", param="model")
    try:
        return msgspec.json.decode(fields["model"], type=str), fields
    except UNREADABLE as exc:
        raise InvalidRequestError("model: expected a text", param="model") from exc


def _renamed(body: bytes, fields: dict[str, msgspec.Raw], target: RouteTarget) -> bytes:
    """The body with the model's name at that service; all other values as they were written."""
    name = msgspec.json.encode(target.model)
    if bytes(fields["model"]) == name:
        return body
    return msgspec.json.encode(fields | {"model": msgspec.Raw(name)})


def _asked(scope: Scope, exchange: Exchange) -> list[tuple[str, str]]:
    """The headers of a request that a service gets."""
    given = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    kept = [
        (name, value)
        for name, value in given
        if name not in NOT_ASKED and not name.startswith("sec-")
    ]
    return [*kept, ("x-request-id", exchange.request_id)]


def _answered(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """The headers of a service's answer that the client gets."""
    raw = ((name.lower(), value) for name, value in answer.raw_headers)
    return [(name, value) for name, value in raw if name.decode("latin-1") not in NOT_ANSWERED]


async def _beginning(answer: aiohttp.ClientResponse) -> bytes:
    """As much of a body as a short one has."""
    found = b""
    while len(found) < MAX_SHORT_BYTES and (part := await answer.content.readany()):
        found += part
    return found[:MAX_SHORT_BYTES]


async def _pass_on(
    answer: aiohttp.ClientResponse, part: bytes, exchange: Exchange, send: Send
) -> None:
    """Send the answer as it comes. Its head has waited for the first `part` of its body."""
    exchange.is_event_stream = answer.content_type == "text/event-stream"
    headers = _answered(answer)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    while part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = await answer.content.readany()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _was_dropped(exc: Exception) -> bool:
    """Whether a connection ended that had been made."""
    is_new = isinstance(exc, aiohttp.ClientConnectorError)
    return not is_new and isinstance(exc, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
