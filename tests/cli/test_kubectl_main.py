"""The plugin without a cluster: help, wrong usage, and refusals in words."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner
from waits import PATIENCE_S

from diptych.kubectl.cluster import Access, Cluster, ClusterError, ask_routers, refusal
from diptych.kubectl.main import main
from diptych.main import main as laptop
from diptych_protocol.admin import RequestList

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
SERVICES = "/apis/diptych.dev/v1alpha1/namespaces/ns/inferenceservices"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments), prog_name="kubectl diptych")


def kubeconfig(path: Path, server: str) -> str:
    cluster = {"name": "c", "cluster": {"server": server}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "models"}}
    user = {"name": "u", "user": {"token": "t"}}
    config = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "c"}
    file = path / "kubeconfig"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
    return str(file)


def test_every_help_teaches_by_example() -> None:
    assert isinstance(main, click.Group)
    assert sorted(main.commands) == ["advise", "plan", "render", "status", "top", "trace", "why"]
    for name in main.commands:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert f"Example:\n    kubectl diptych {name}" in result.stdout


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    heavy = ["kubernetes", "torch", "zmq", "prometheus_client", "diptych_operator"]
    code = (
        "import sys, diptych.kubectl.main, diptych.main;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("output", ["yaml", "json"])
def test_render_is_that_of_the_laptop_command(output: str) -> None:
    ours = run("render", str(EXAMPLE), "-o", output)
    theirs = CliRunner().invoke(laptop, ["render", str(EXAMPLE), "-o", output])
    assert ours.exit_code == theirs.exit_code == 0
    assert ours.stdout.splitlines()[:3] == theirs.stdout.splitlines()[:3]


@pytest.mark.parametrize(
    "arguments",
    [("status", "svc", "-A"), ("why",), ("top",), ("top", "svc", "--interval", "0"), ("x",)],
)
def test_wrong_usage_ends_with_two(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", [("status",), ("why", "svc"), ("top", "svc")])
def test_without_a_kubeconfig_it_says_how_to_give_one(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    result = run(*command, "--kubeconfig", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: no cluster to talk to: ")
    assert result.stderr.endswith("; set KUBECONFIG, or give --kubeconfig or --context\n")


@pytest.mark.parametrize(
    "content", [b"a: [", b"hello", b"- a", b"", b"\xff\xfe\0", b"\tx: 1", b"contexts: {}"]
)
def test_a_file_that_is_no_kubeconfig_is_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_bytes(content)
    result = run("status", "--kubeconfig", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: no cluster to talk to: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["why", "top", "plan", "status"])
@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A"])
def test_what_can_name_no_service_is_not_asked_for(command: str, name: str, tmp_path: Path) -> None:
    """The API server would list all, or know nothing of the path."""
    result = run(command, name, "--kubeconfig", kubeconfig(tmp_path, "http://127.0.0.1:9"))
    assert result.exit_code == 2
    words = f"Error: {name!r} cannot be the name of a service; correct it\n"
    assert result.stderr == words


@pytest.mark.parametrize("given", [("-n", "../x"), ("-n", "Models"), ("-n", "a" * 64)])
def test_what_can_be_no_namespace_is_said_to_be_none(
    given: tuple[str, str], tmp_path: Path
) -> None:
    result = run("status", *given, "--kubeconfig", kubeconfig(tmp_path, "http://127.0.0.1:9"))
    assert result.exit_code == 2
    words = f"Error: {given[1]!r} cannot be the name of a namespace; correct it\n"
    assert result.stderr == words


def test_an_unknown_context_is_named(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, "http://127.0.0.1:9")
    result = run("status", "--kubeconfig", file, "--context", "moon")
    assert result.exit_code == 2
    assert "moon" in result.stderr


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, "http://127.0.0.1:9")
    result = run("status", "--kubeconfig", file)
    assert result.exit_code == 2
    assert "the API server http://127.0.0.1:9 does not answer: " in result.stderr


def test_a_server_whose_certificate_is_not_trusted_is_named(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = Path(__file__).parents[1] / "support" / "certificates" / "second"
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}"
        result = run("plan", "--kubeconfig", kubeconfig(tmp_path, url))
        server.shutdown()
    assert result.exit_code == 2, "1 would say that something is pending"
    assert f"the API server {url} does not answer: " in result.stderr
    assert "certificate verify failed" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "body", "path", "words"),
    [
        (404, b"404 page not found\n", SERVICES, "install Diptych first: helm install diptych"),
        (
            404,
            b'{"message": "inferenceservices.diptych.dev \\"svc\\" not found", '
            b'"details": {"name": "svc", "kind": "inferenceservices"}}',
            f"{SERVICES}/svc",
            '"svc" not found; `kubectl diptych status -A` lists',
        ),
        (
            403,
            b'{"message": "pods \\"p\\" is forbidden: User \\"u\\" cannot get resource"}',
            "/api/v1/namespaces/ns/pods/p:8000/proxy/metrics",
            "you may not do that: pods",
        ),
        (401, b'{"message": "Unauthorized"}', SERVICES, "renew the kubeconfig"),
        (
            503,
            b"error trying to reach service: dial tcp 10.0.0.7:8000: connect: refused",
            "/api/v1/namespaces/ns/pods/p:8000/proxy/metrics",
            "HTTP 503 of /api/v1/namespaces/ns/pods/p:8000/proxy/metrics: error trying to reach",
        ),
        (500, msgspec.json.encode({"message": None}), "/api", "HTTP 500 of /api"),
    ],
)
def test_refusals_name_the_remedy(status: int, body: bytes, path: str, words: str) -> None:
    assert words in refusal(status, body, path)


@pytest.mark.parametrize(("https", "name"), [(False, "svc-router-0"), (True, "https:svc-router-0")])
def test_metrics_of_a_router_are_read_in_the_way_that_it_speaks(
    tmp_path: Path, https: bool, name: str
) -> None:
    asked: list[str] = []

    class ApiServer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"text")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), ApiServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = kubeconfig(tmp_path, f"http://127.0.0.1:{server.server_address[1]}")
        cluster = Cluster.connect(Access(file, namespace="ns"))
        assert cluster.metrics("svc-router-0", 8000, https=https) == "text"
        server.shutdown()
    assert asked == [f"/api/v1/namespaces/ns/pods/{name}:8000/proxy/metrics"]


class Routerless(Cluster):
    """A service without pods, as while it is suspended."""

    def __init__(self) -> None:
        """It has no connection."""

    def service(self, name: str) -> Any:
        return {}

    def pods(self, name: str) -> list[Any]:
        return []


def test_who_asks_where_no_router_runs_hears_where_to_look() -> None:
    with pytest.raises(ClusterError, match="`kubectl diptych why svc` tells more"):
        ask_routers(Routerless(), "svc", "/admin/requests", RequestList)
