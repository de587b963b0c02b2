"""The plugin against a real API server.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs. The tests work in a namespace of their own. What a router says is asked of a real pod if
DIPTYCH_TEST_PYTHON_IMAGE names an image with `python3` in it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from cluster_kit.kube_tools import ToolUnavailable, find_tool
from waits import PATIENCE_S, Deadline, source_of

from diptych.kubectl.main import main
from diptych_operator.status.reasons import ConditionType

KUBECONFIG = os.environ.get("DIPTYCH_TEST_KUBECONFIG")
IMAGE = os.environ.get("DIPTYCH_TEST_PYTHON_IMAGE")
pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster to ask"
)
COMMAND_TIMEOUT_S = 120
POD_TIMEOUT_S = 120
SINCE = "2026-11-21T07:00:00Z"


class Cluster:
    """kubectl in a namespace of this run's own."""

    def __init__(self) -> None:
        try:
            self._kubectl = find_tool("kubectl")
        except ToolUnavailable as exc:
            pytest.skip(str(exc))
        self.namespace = f"plugin-{secrets.token_hex(4)}"

    def kubectl(self, *arguments: str, stdin: Any = None, check: bool = True) -> str:
        """What a command prints. Fails the test with what it says if it fails."""
        done = subprocess.run(
            [str(self._kubectl), "--kubeconfig", str(KUBECONFIG), "-n", self.namespace, *arguments],
            input=json.dumps(stdin) if stdin else None,
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout if done.returncode == 0 else ""

    def until(self, condition: Callable[[], Any], seconds: float) -> None:
        deadline = Deadline(source_of(condition), seconds)
        while not condition():
            deadline.check()
            time.sleep(0.3)

    def create(self, name: str, **conditions: tuple[str, str, str]) -> None:
        """A service, with a status as an operator would write it, unless `conditions` is empty."""
        service = {
            "apiVersion": "diptych.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"model": {"uri": "hf://org/repo"}, "prefill": {}, "decode": {}},
        }
        made = json.loads(self.kubectl("create", "-f", "-", "-o", "json", stdin=service))
        if not conditions:
            return
        made["status"] = {
            "observedGeneration": made["metadata"]["generation"],
            "updateRevision": "aaaaaaaa",
            "currentRevision": "aaaaaaaa",
            "decode": {"summary": "1/2"},
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": message,
                 "lastTransitionTime": SINCE}
                for kind, (status, reason, message) in conditions.items()
            ],
        }  # fmt: skip
        path = f"/apis/diptych.dev/v1alpha1/namespaces/{self.namespace}/inferenceservices"
        self.kubectl("replace", "--raw", f"{path}/{name}/status", "-f", "-", stdin=made)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        cluster.kubectl("create", "namespace", cluster.namespace)
        well = dict.fromkeys(ConditionType, ("True", "Serving", "It serves."))
        well[ConditionType.DEGRADED] = ("False", "AsExpected", "Nothing wants attention.")
        cluster.create("well", **well)
        crash = "decode pod ill-decode-1: keeps crashing (no model). Correct the spec."
        ill = well | {
            ConditionType.AVAILABLE: ("False", "DecodeNotReady", f"No decode pod. {crash}"),
            ConditionType.DEGRADED: ("True", "ContainerCrashing", crash),
        }
        cluster.create("ill", **ill)
        cluster.create("new")
        yield cluster
    finally:
        cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=false", check=False)


@pytest.fixture
def run(cluster: Cluster) -> Callable[..., Any]:
    def invoke(*arguments: str, kubeconfig: str = str(KUBECONFIG)) -> Any:
        where = ("--kubeconfig", kubeconfig, "-n", cluster.namespace)
        return CliRunner().invoke(main, [*arguments, *where], prog_name="kubectl diptych")

    return invoke


def test_status_lists_and_shows(run: Callable[..., Any], cluster: Cluster) -> None:
    listing = run("status")
    assert listing.exit_code == 0, listing.output
    rows = [line.split() for line in listing.stdout.splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["ill", "no", "DecodeNotReady"], ["new", "?", "NotReported"], ["well", "yes", "Serving"],
    ]  # fmt: skip
    everywhere = run("status", "-A").stdout
    assert [cluster.namespace, "well"] in [line.split()[:2] for line in everywhere.splitlines()]
    details = run("status", "ill").stdout
    assert "hf://org/repo" in details
    assert "1/2" in details
    found = json.loads(run("status", "ill", "--json").stdout)
    assert found["status"]["decode"]["summary"] == "1/2"
    assert [item["name"] for item in json.loads(run("status", "--json").stdout)] == [
        "ill", "new", "well",
    ]  # fmt: skip


def test_why_ends_with_what_it_found(run: Callable[..., Any], cluster: Cluster) -> None:
    warning = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "ill-decode-1.1", "namespace": cluster.namespace},
        "involvedObject": {
            "kind": "Pod", "name": "ill-decode-1", "namespace": cluster.namespace,
        },
        "type": "Warning",
        "reason": "BackOff",
        "message": "Back-off restarting failed container",
        "lastTimestamp": SINCE,
    }  # fmt: skip
    cluster.kubectl("create", "-f", "-", stdin=warning)
    assert run("why", "well").exit_code == 0
    ill = run("why", "ill")
    assert ill.exit_code == 1
    assert "keeps crashing (no model)" in ill.stdout
    assert "Pod/ill-decode-1: BackOff: Back-off restarting failed container" in ill.stdout
    new = run("why", "new", "--json")
    assert new.exit_code == 1
    assert "No operator has reported" in json.loads(new.stdout)["causes"][0]["message"]


@pytest.mark.parametrize("command", ["status", "why", "top"])
def test_a_name_that_is_not_there(run: Callable[..., Any], command: str) -> None:
    result = run(command, "nobody")
    assert result.exit_code == 2
    assert '"nobody" not found; `kubectl diptych status -A` lists' in result.stderr


def test_top_without_a_router(run: Callable[..., Any]) -> None:
    result = run("top", "well")
    assert result.exit_code == 2
    assert "no router of well is ready" in result.stderr


def test_somebody_without_rights_is_told_so(
    run: Callable[..., Any], cluster: Cluster, tmp_path: Path
) -> None:
    cluster.kubectl("create", "serviceaccount", "nobody")
    token = cluster.kubectl("create", "token", "nobody").strip()
    config = yaml.safe_load(Path(str(KUBECONFIG)).read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    refused = run("status", kubeconfig=str(file))
    assert refused.exit_code == 2
    assert "you may not do that: inferenceservices.diptych.dev is forbidden" in refused.stderr
    rule = ("--verb=get,list", "--resource=inferenceservices.diptych.dev")
    cluster.kubectl("create", "role", "reader", *rule)
    account = f"--serviceaccount={cluster.namespace}:nobody"
    cluster.kubectl("create", "rolebinding", "reader", "--role=reader", account)
    cluster.until(lambda: run("status", kubeconfig=str(file)).exit_code == 0, PATIENCE_S)
    partly = run("why", "ill", kubeconfig=str(file))
    assert partly.exit_code == 1
    assert "no events: you may not list them" in partly.stderr
    assert "keeps crashing" in partly.stdout


def test_watch_goes_on_until_it_is_interrupted(cluster: Cluster) -> None:
    where = ["--kubeconfig", str(KUBECONFIG), "-n", cluster.namespace]
    command = [sys.executable, "-u", "-m", "diptych.kubectl.main", "status", "--watch", *where]
    # Whoever starts the tests in the background has them ignore SIGINT, and so their children.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as watch:
        assert watch.stdout is not None
        heads = 0
        try:
            while heads < 2:
                line = watch.stdout.readline()
                assert line, "it ended by itself"
                heads += line.startswith("NAME ")
        finally:
            watch.send_signal(signal.SIGINT)
        assert watch.wait(COMMAND_TIMEOUT_S) == 0


ROUTER = """
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path == "/metrics"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            text = '''# TYPE diptych:engine_tokens_generated_total counter
diptych:engine_tokens_generated_total{engine="decode/d-0"} %f
# TYPE diptych:num_requests_running gauge
diptych:num_requests_running{engine="decode/d-0"} 3
''' % (time.monotonic() * 50)
            self.wfile.write(text.encode())
http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""


@pytest.mark.skipif(not IMAGE, reason="DIPTYCH_TEST_PYTHON_IMAGE names no image with python3")
def test_top_reads_a_router_through_the_api_server(
    run: Callable[..., Any], cluster: Cluster
) -> None:
    container = {"name": "router", "image": IMAGE, "command": ["python3", "-c", ROUTER]}
    probe = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    labels = {"diptych.dev/service": "well", "diptych.dev/role": "router"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "well-router-0", "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [container | {"readinessProbe": probe}],
        },
    }
    account = ("get", "serviceaccount", "default")
    cluster.until(lambda: cluster.kubectl(*account, check=False), POD_TIMEOUT_S)
    cluster.kubectl("create", "-f", "-", stdin=pod)
    state = ("get", "pod", "well-router-0", "-o", "jsonpath={.status.conditions[*].status}")
    cluster.until(lambda: cluster.kubectl(*state).split() == ["True"] * 4, POD_TIMEOUT_S)
    result = run("top", "well", "--interval", "1")
    assert result.exit_code == 0, result.output
    name, role, running, *_, rate = result.stdout.splitlines()[1].split()
    assert (name, role, running) == ("d-0", "decode", "3")
    assert 40 < float(rate) < 60
    (engine,) = json.loads(run("top", "well", "--json").stdout)
    assert engine["running"] == 3
