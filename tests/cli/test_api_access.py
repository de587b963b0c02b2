"""Where the API of a service on this machine listens, and who may use it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.errors import BadInputError
from diptych.laptop import rundir as client
from diptych.laptop.api_access import ApiAccess
from diptych.laptop.pods import LOOPBACK, local_pods, port_runs
from diptych.laptop.rundir import RunDirectory, RunState
from diptych_operator.api.parse import parse
from diptych_operator.api.router import Batches
from diptych_operator.api.service import InferenceService
from diptych_operator.render import ServiceSecrets, render
from diptych_protocol import CurveKeys

CERTIFICATE = Path(__file__).parents[1] / "support" / "certificates" / "first"
FILE = Path("service.yaml")
ASKS_ALL = {"apiKeys": {"secretName": "clients"}, "tls": {"secretName": "certificate"}}


def service(**router: Any) -> InferenceService:
    raw = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc"},
        "spec": {"model": {"uri": "dummy://"}, "prefill": {}, "decode": {}, "router": router},
    }
    return parse(yaml.safe_dump(raw))


@pytest.mark.parametrize("router", [{}, {"ui": False}])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_laptop_always_has_the_page(router: dict[str, Any], host: str) -> None:
    assert ApiAccess(8080, host).fit(FILE, service(**router)).spec.router.ui


def test_a_laptop_always_has_files_and_batches() -> None:
    fitted = ApiAccess(8080, "127.0.0.1").fit
    assert fitted(FILE, service()).spec.router.batches == Batches(size="256Mi")
    assert fitted(FILE, service(batches={"size": "5Gi"})).spec.router.batches == Batches(size="5Gi")


def test_names_and_sites_are_those_of_the_file_and_of_the_command_line() -> None:
    api = ApiAccess(8080, hosts=("b.example",), origins=("http://b.example:81",))
    said = service(allowedHosts=["a.example"], allowedOrigins=["https://a.example"])
    router = api.fit(FILE, said).spec.router
    assert router.allowed_hosts == ["a.example", "b.example"]
    assert router.allowed_origins == ["https://a.example", "http://b.example:81"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "alice").write_text("sesame")
    (folder / "bob").write_text("open-up")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RunDirectory("svc") as directory:
        yield directory


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
@pytest.mark.parametrize("router", [{}, ASKS_ALL])
def test_on_loopback_the_api_is_open_whatever_a_cluster_would_want(
    host: str, router: dict[str, Any], run_dir: RunDirectory
) -> None:
    api = ApiAccess(8080, host)
    fitted = api.fit(FILE, service(**router)).spec.router
    assert (fitted.api_keys, fitted.tls) == (None, None)
    assert api.furnish(run_dir) is None
    assert api.access() == "open on loopback, no keys; no TLS"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8080/v1"), ("::", "http://127.0.0.1:8080/v1"),
        ("192.0.2.7", "http://192.0.2.7:8080/v1"), ("2001:db8::1", "http://[2001:db8::1]:8080/v1"),
        ("pc.example", "http://pc.example:8080/v1"),
    ],
)  # fmt: skip
def test_elsewhere_there_is_a_key_made_for_the_run(
    host: str, url: str, run_dir: RunDirectory
) -> None:
    api = ApiAccess(8080, host)
    fitted = api.fit(FILE, service())
    assert fitted.spec.router.api_keys is not None
    file = api.furnish(run_dir)
    assert file is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert len(key) > 32
    assert key not in api.access()
    assert api.access(key) == f"one key, made for this run: {key}; no TLS"
    assert api.url == url

    pods = pods_of(fitted, run_dir, api)
    command = pods["svc-router-0"].command
    assert command[command.index("--api-keys") + 1] == str(file.parent)
    assert command[command.index("--host") + 1] == host
    assert command[command.index("--admin-host") + 1] == LOOPBACK
    for engine in ("svc-prefill-0", "svc-decode-0"):
        assert pods[engine].command.count(host) == 0


def test_keys_and_certificate_of_the_user_are_followed_where_they_are(
    keys: Path, run_dir: RunDirectory
) -> None:
    api = ApiAccess(8080, api_keys=keys, tls=CERTIFICATE)
    fitted = api.fit(FILE, service())
    file = api.furnish(run_dir)
    assert api.access() == "keys of alice, bob; TLS"
    pods = pods_of(fitted, run_dir, api)
    command = pods["svc-router-0"].command
    mounted = Path(command[command.index("--api-keys") + 1])
    (keys / "carol").write_text("new")
    assert (mounted / "carol").read_text() == "new"
    assert (Path(command[command.index("--tls") + 1]) / "tls.key").exists()
    readiness = pods["svc-router-0"].readiness
    assert readiness is not None
    assert readiness.url == "https://127.0.0.1:8080/health"

    state = RunState(
        "svc", "svc", api.url, True, 0.0, 1, 0.0,
        key_file=str(file), certificate=str(api.certificate),
    )  # fmt: skip
    (keys / "alice").write_text("sesame\ntokensPerMinute: 1000\n")
    options = client.options(state, "a key of somewhere else")
    assert options["headers"] == {"Authorization": "Bearer sesame"}
    assert client.options(None, "k")["headers"] == {"Authorization": "Bearer k"}


def test_the_users_folders_outlive_the_run(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RunDirectory("svc") as directory:
        ApiAccess(8080, api_keys=keys).furnish(directory)
    assert not directory.path.exists()
    assert (keys / "alice").read_text() == "sesame"


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (ApiAccess(1, "0.0.0.0"), "spec.router.tls: its Secret is a cluster's; give --tls DIR"),
        (ApiAccess(1, api_keys=Path("/nonexistent")), "--api-keys: /nonexistent holds no key"),
        (
            ApiAccess(1, tls=Path("/nonexistent")),
            "--tls: /nonexistent must hold tls.crt and tls.key",
        ),
        (ApiAccess(1, hosts=("a.example:80",)), "--allow-host is a lower-case name without a port"),
        (
            ApiAccess(1, origins=("http://a.example/",)),
            "--allow-origin is like https://app.example.com",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(api: ApiAccess, words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        api.fit(FILE, service(**ASKS_ALL))
    assert words in str(caught.value)


def pods_of(fitted: InferenceService, run_dir: RunDirectory, api: ApiAccess) -> dict[str, Any]:
    objects = render(fitted, ServiceSecrets(CurveKeys("P" * 40, "S" * 40), "token"))
    ports = range(20000, 20000 + sum(port_runs(objects)))
    pods = local_pods(objects, run_dir.path, ports, api.port, api.host)
    return {pod.name: pod for pod in pods}
