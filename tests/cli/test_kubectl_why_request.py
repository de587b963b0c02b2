"""`kubectl diptych why NAME REQUEST-ID` and `kubectl diptych trace NAME REQUEST-ID` through an API
server that forwards ports of pods.

The API server is a small one of the tests; it speaks the protocol of `kubectl port-forward` over
WebSockets, and forwards to the real admin app of a router.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import WSMsgType, web
from click.testing import CliRunner
from waits import PATIENCE_S

from diptych.kubectl.main import main
from diptych_frontend.admin.calls import build_admin_app
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_operator.api.names import (
    ADMIN_PORT,
    KEYS_LABEL,
    PUBLIC_KEY_FILE,
    ROLE_LABEL,
    SECRET_KEY_FILE,
    SERVICE_LABEL,
)
from diptych_protocol import EngineCoreRequest, SamplingParams
from diptych_router.choosing.policy import Decision
from diptych_router.requests.records import Records
from diptych_router.telling.admin_port import request_routes
from diptych_router.telling.explanations import Explanations

DATA, ERROR = b"\0", b"\1"
"""The two channels of a forwarded port."""


def remembering(request_id: str) -> Explanations:
    """What a router knows of one request."""
    records = Records()
    made = EngineCoreRequest(
        f"{request_id}-1", [1] * 9, None, SamplingParams(), None, None, 0.0, None, None, None,
        external_req_id=request_id,
    )  # fmt: skip
    record = records.begin(made, 0.0)
    decision = Decision("p0", "d0", "cheapest pair", terms={"wait_s": 0.1, "compute_s": 0.2})
    facts = {"prefill": "pod-p0", "decode": "pod-d0"}
    records.chose(record, decision, facts, 0.0, 0.0)
    return Explanations(records, str, policy="prefix_aware", disaggregate="auto")


KEY_FILES = (PUBLIC_KEY_FILE, SECRET_KEY_FILE, "admin-token")


class ApiServer:
    """A service `svc` with routers, one that forwards for each port given, the rest refused."""

    def __init__(self, ports: dict[str, int], tokens: list[str]) -> None:
        self._ports = ports
        self._secrets = [
            {
                "metadata": {"name": f"svc-keys-{at}", "creationTimestamp": f"2026-01-0{at + 1}"},
                "data": dict.fromkeys(KEY_FILES, base64.b64encode(token.encode()).decode()),
            }
            for at, token in enumerate(tokens)
        ]
        self.selectors: list[str] = []
        self.app = web.Application()
        core = "/api/v1/namespaces/models"
        services = "/apis/diptych.dev/v1alpha1/namespaces/models/inferenceservices/svc"
        self.app.router.add_get(services, self._service)
        self.app.router.add_get(f"{core}/pods", self._pods)
        self.app.router.add_get(f"{core}/secrets", self._list_secrets)
        self.app.router.add_get(f"{core}/pods/{{pod}}/portforward", self._forward)

    async def _service(self, request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"name": "svc"}, "spec": {}})

    async def _pods(self, request: web.Request) -> web.Response:
        items = [
            {"metadata": {"name": name, "labels": {SERVICE_LABEL: "svc", ROLE_LABEL: "router"}}}
            for name in self._ports
        ]
        return web.json_response({"items": items})

    async def _list_secrets(self, request: web.Request) -> web.Response:
        self.selectors.append(request.query["labelSelector"])
        return web.json_response({"items": self._secrets})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert request.query["ports"] == str(ADMIN_PORT)
        assert request.headers["authorization"] == "Bearer t"
        port = self._ports[request.match_info["pod"]]
        if not port:
            return web.json_response({"message": "no"}, status=403)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for channel in (DATA, ERROR):
            await socket.send_bytes(channel + ADMIN_PORT.to_bytes(2, "little"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def back() -> None:
            while data := await reader.read(1 << 16):
                await socket.send_bytes(DATA + data)

        answering = asyncio.create_task(back())
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == DATA:
                writer.write(message.data[1:])
        answering.cancel()
        writer.close()
        return socket


class Running(threading.Thread):
    """Routers' admin ports and the API server, on a loop of their own."""

    def __init__(self, keys_dir: Path, known: dict[str, Explanations | None], tokens: list[str]):
        super().__init__()
        self._keys_dir, self._known, self._tokens = keys_dir, known, tokens
        self._ready = threading.Event()
        self.url = ""

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        ports, serving = {}, []
        for name, known in self._known.items():
            ports[name] = 0
            if known is not None:
                app = build_admin_app(self._keys_dir, request_routes(known))
                site = Site(app, listen("127.0.0.1", 0))
                ports[name] = site.listener.getsockname()[1]
                serving.append(asyncio.create_task(serve_sites(site)))
        self.api = ApiServer(ports, self._tokens)
        runner = web.AppRunner(self.api.app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await runner.cleanup()

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        self.start()
        assert self._ready.wait(PATIENCE_S)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            self.join(PATIENCE_S)


@pytest.fixture
def keys_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "admin-token").write_text("sesame")
    return folder


def ask(server: Running, folder: Path, *arguments: str, command: str = "why") -> Any:
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "contexts": [
            {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "models"}}
        ],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }  # fmt: skip
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    where = ("--kubeconfig", str(file))
    return CliRunner().invoke(main, [command, "svc", *arguments, *where])


def test_all_routers_are_asked_and_the_one_that_knows_it_answers(
    keys_dir: Path, tmp_path: Path
) -> None:
    known = {"r0": remembering("other"), "r1": remembering("abc"), "r2": None}
    # A newer Secret has a token that the routers do not know yet.
    server = Running(keys_dir, known, ["sesame", "newer"])
    with server.started():
        shown = ask(server, tmp_path, "abc")
        assert shown.exit_code == 0, shown.output
        assert "r1" in shown.stdout
        assert "attempt 1: pod-p0 -> pod-d0 (cheapest pair)" in shown.stdout
        assert "r2: port 8081 of r2 cannot be reached" in shown.stderr
        (told,) = json.loads(ask(server, tmp_path, "abc", "--json").stdout)
        assert (told["router"], told["policy"]) == ("r1", "prefix_aware")
        picture = tmp_path / "trace.svg"
        drawn = ask(server, tmp_path, "abc", "--svg", str(picture), command="trace")
        assert drawn.exit_code == 0, drawn.output
        assert "abc: 9 + 0 tokens, not ended" in picture.read_text()
        assert "abc: 9 + 0" in ask(server, tmp_path, "abc", command="trace").stdout
        listed = ask(server, tmp_path, "--requests")
        assert [word in listed.stdout for word in ("other", "abc", "r0", "r1")] == [True] * 4
        assert set(server.api.selectors) == {f"{SERVICE_LABEL}=svc,{KEYS_LABEL}"}


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["sesame"], "this router remembers no request 'stranger'"),
        (["wrong"], "r0: HTTP 401: wrong or missing admin token"),
        ([], "the service has no Secret with an admin token"),
    ],
)
def test_what_cannot_be_told_ends_with_two(
    keys_dir: Path, tmp_path: Path, tokens: list[str], says: str
) -> None:
    server = Running(keys_dir, {"r0": remembering("abc")}, tokens)
    with server.started():
        answer = ask(server, tmp_path, "stranger")
    assert answer.exit_code == 2
    assert says in answer.stderr


def test_a_list_or_one_request_is_asked_for() -> None:
    answer = CliRunner().invoke(main, ["why", "svc", "abc", "--requests"])
    assert answer.exit_code == 2
    assert "give REQUEST_ID or --requests, not both" in answer.stderr
