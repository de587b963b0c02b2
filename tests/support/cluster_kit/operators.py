"""The operator as a real process against a real API server, with the rights that the chart gives.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml
from chaos_kit.namespaces import (
    COMMAND_TIMEOUT_S,
    KUBECONFIG,
    Namespace,
    Object,
    secret_values,
    until,
)
from cluster_kit.charts import CHART
from cluster_kit.kube_tools import find_tool
from free_ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from waits import PATIENCE_S

from diptych_operator.kube.leader import LEASE_NAME

NOWHERE: Object = {"podTemplate": {"spec": {"nodeSelector": {"diptych.dev/test": "no-such-node"}}}}
STUCK: Object = {"prefill": NOWHERE, "decode": NOWHERE, "router": NOWHERE}
"""The spec of a service whose pods are never scheduled."""
NO_IMAGE = "127.0.0.1:1/no/such-image:1"
"""Refused at once. A node pulls one image after the other: a registry whose name has to time out
would hold up the pods of whoever tests next."""


class Identity:
    """The chart's ServiceAccount with the chart's Role, and the arguments that the chart gives."""

    def __init__(self, namespace: Namespace, folder: Path) -> None:
        values = {"scope": "namespaced", "namespaces": [namespace.name], "crds": {"install": False}}
        rendered = _run(
            *(str(find_tool("helm")), "template", "diptych", str(CHART)),
            *("-n", namespace.name, "-f", "-"),
            stdin=json.dumps(values),
        )
        objects = [o for o in yaml.safe_load_all(rendered) if o]
        rights = [o for o in objects if o["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
        kubectl = (str(find_tool("kubectl")), "--kubeconfig", str(KUBECONFIG), "-n", namespace.name)
        _run(*kubectl, "apply", "-f", "-", stdin=json.dumps(_as_list(rights)))
        (deployment,) = (o for o in objects if o["kind"] == "Deployment")
        pod = deployment["spec"]["template"]["spec"]
        self.token = _run(*kubectl, "create", "token", pod["serviceAccountName"]).strip()
        self.namespace = namespace.name
        self.arguments: list[str] = [
            argument.replace("$(POD_NAMESPACE)", namespace.name)
            for argument in pod["containers"][0]["args"]
        ]
        self.lease = LEASE_NAME
        self.kubeconfig = folder / f"{namespace.name}.yaml"
        self.kubeconfig.write_text(yaml.safe_dump(_with_token(self.token)))


def _as_list(objects: Sequence[Object]) -> Object:
    return {"apiVersion": "v1", "kind": "List", "items": objects}


def _with_token(token: str) -> Object:
    """The administrator's kubeconfig for somebody with this token instead."""
    found: Object = yaml.safe_load(Path(str(KUBECONFIG)).read_text())
    for user in found["users"]:
        user["user"] = {"token": token}
    return found


def _run(*command: str, stdin: str = "") -> str:
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Operator:
    """One operator process."""

    def __init__(
        self, log: Path, arguments: Sequence[str], kubeconfig: Path, name: str = "operator-0"
    ) -> None:
        self.name = name
        self.port = free_port()
        self._log = log
        # The last one of two equal flags counts.
        where = ("--metrics-host=127.0.0.1", f"--metrics-port={self.port}")
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diptych_operator", *arguments, *where],
                env={**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAME": name},
                stderr=stderr,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def entries(self) -> list[Object]:
        """The log, line by line; every line has to be JSON."""
        return [json.loads(line) for line in self.log.splitlines()]

    def metrics(self) -> Mapping[str, float]:
        """Samples by name, with labels as in the exposition; empty while the port is closed."""
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{self.port}/metrics", trust_env=False, timeout=PATIENCE_S
            )
        except httpx.TransportError:
            return {}
        return {
            sample.name + _labels(sample.labels): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def leads(self) -> bool:
        assert self.process.poll() is None, f"it ended: {self.log}"
        return self.metrics().get("diptych_operator_leader") == 1

    def requests(self) -> float:
        return self.metrics()["diptych_operator_api_requests"]

    def ended(self, seconds: float) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(seconds)

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def running(operator: Operator, *, leading: bool = True) -> Iterator[Operator]:
    """Waits until it leads (or at least stands by), and ends it at the end whatever happens."""
    try:
        until("the operator is up", operator.metrics)
        if leading:
            until("the operator leads", operator.leads)
        yield operator
    finally:
        operator.process.kill()
        operator.process.wait()


@contextmanager
def without_rights(namespace: Namespace, *resources: str) -> Iterator[None]:
    """The operator may not look at these kinds meanwhile; to it, missing CRDs are just alike."""

    def role(*arguments: str) -> str:
        where = ("--kubeconfig", str(KUBECONFIG), "--namespace", namespace.name)
        return _run(str(find_tool("kubectl")), *where, *arguments)

    items = json.loads(role("get", "role", "--output", "json"))["items"]
    (granted,) = (r for r in items if not r["metadata"]["name"].endswith("-leader"))
    kept = [r for r in granted["rules"] if not {*resources} & {*r["resources"]}]
    assert len(kept) == len(granted["rules"]) - len(resources)
    for rules in (kept, granted["rules"]):
        patch = json.dumps({"rules": rules})
        role("patch", "role", granted["metadata"]["name"], "--type=merge", "--patch", patch)
        if rules is kept:
            yield


def metric_change(
    operator: Operator, namespace: Namespace, lease: str, seconds: float
) -> tuple[dict[str, float], int]:
    """How the metrics changed in at least so many seconds, and how often the Lease was renewed.

    From one renewal to another, so that none is in flight when the requests are counted.
    """

    def renewed() -> str:
        version: str = namespace.there("Lease", lease)["metadata"]["resourceVersion"]
        return version

    def next_renewal() -> Mapping[str, float]:
        before = renewed()
        until("the Lease is renewed", lambda: renewed() != before)
        return operator.metrics()

    first, started, renewals = next_renewal(), time.monotonic(), 0
    last = first
    while time.monotonic() - started < seconds:
        last = next_renewal()
        renewals += 1
    return {name: last[name] - first.get(name, 0) for name in last}, renewals


def _labels(labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""


@dataclass(frozen=True)
class Home:
    """A namespace and the operator that serves it."""

    namespace: Namespace
    identity: Identity
    operator: Operator

    def check_log(self) -> None:
        """The operator lives, its rights sufficed for all it did, and it gave nothing away."""
        assert self.operator.leads()
        self.namespace.serve("last", suspend=True)
        self.namespace.settled("last")
        values = secret_values(self.namespace)
        assert values
        assert not [line for line in self.operator.entries() if line["level"] == "ERROR"]
        log = self.operator.log
        assert "forbidden" not in log.lower()
        assert not [name for name, value in values.items() if value in log]
        assert self.identity.token not in log
