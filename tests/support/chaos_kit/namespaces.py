"""One namespace of a real cluster as an administrator sees it, and waits with deadlines.

On the import path of the tests (pytest's `pythonpath`). Only of use where DIPTYCH_TEST_KUBECONFIG
names an administrator's kubeconfig of a cluster that has the CRDs.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
from cluster_kit.old_clusters import newest
from kubernetes import client, config

from diptych_operator.api.names import MANAGED_BY, MANAGED_BY_LABEL, ROLE_LABEL, SERVICE_LABEL
from diptych_operator.kube.client import object_path

KUBECONFIG = os.environ.get("DIPTYCH_TEST_KUBECONFIG")
API_VERSIONS = {
    "ConfigMap": "v1",
    "DaemonSet": "apps/v1",
    "Deployment": "apps/v1",
    "DisaggregatedSet": "disaggregatedset.x-k8s.io/v1",
    "Event": "v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "InferenceService": "diptych.dev/v1alpha1",
    "Lease": "coordination.k8s.io/v1",
    "ModelRoute": "diptych.dev/v1alpha1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Pod": "v1",
    "PodDisruptionBudget": "policy/v1",
    "PoolScaler": "diptych.dev/v1alpha1",
    "Secret": "v1",
    "Service": "v1",
    "ServiceAccount": "v1",
}
CHILD_KINDS = (
    *("Deployment", "ConfigMap", "Service", "ServiceAccount"),
    *("DaemonSet", "PodDisruptionBudget", "NetworkPolicy", "Secret"),
)
COMMAND_TIMEOUT_S = 60
SOON_S = 120.0
"""Within it the operator has done what needs no pod, on a machine that is busy with other tests."""
POLL_S = 0.1

Object = dict[str, Any]
T = TypeVar("T")


class NoLongerThere(Exception):
    """Another was quicker to delete the object."""


def until(what: str, look: Callable[[], T], seconds: float = SOON_S) -> T:
    """The first true result of `look`. Fails the test, with the last one, after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s; last: {found!r}"
        time.sleep(POLL_S)
    return found


class Namespace:
    """The API as an administrator sees it, in one namespace. Use as a context manager."""

    def __init__(self, purpose: str) -> None:
        self.name = f"operator-{purpose}-{secrets.token_hex(3)}"
        settings = client.Configuration()
        config.load_kube_config(KUBECONFIG, client_configuration=settings)
        trust = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if settings.cert_file:
            trust.load_cert_chain(settings.cert_file, settings.key_file)
        token = settings.api_key.get("authorization")
        self._http = httpx.Client(
            base_url=settings.host,
            verify=trust,
            headers={"Authorization": token} if token else {},
            timeout=COMMAND_TIMEOUT_S,
            trust_env=False,
        )
        policies = self._ask("GET", "/apis/policy")["versions"]
        budgets = newest("policy", (each["groupVersion"] for each in policies))
        self._versions = API_VERSIONS | {"PodDisruptionBudget": budgets}

    def __enter__(self) -> Namespace:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name}}
        self._ask("POST", "/api/v1/namespaces", json=body)
        return self

    def __exit__(self, *_: object) -> None:
        self._ask("DELETE", f"/api/v1/namespaces/{self.name}")
        self._http.close()

    # --- objects ------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Object | None:
        answer = self._http.get(self._path(kind, name))
        return None if answer.status_code == 404 else self._told(answer)

    def there(self, kind: str, name: str) -> Object:
        """An object that has to be there."""
        found = self.get(kind, name)
        assert found is not None, f"no {kind} {name}"
        return found

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """In no particular order; without apiVersion and kind, as lists have them."""
        query = {"labelSelector": selector} if selector else {}
        found: list[Object] = self._ask("GET", self._path(kind), params=query)["items"]
        return found

    def create(self, obj: Object) -> Object:
        body = {"apiVersion": self._versions[obj["kind"]], **obj}
        return self._ask("POST", self._path(obj["kind"]), json=body)

    def merge(self, kind: str, name: str, patch: Object, part: str = "") -> Object:
        """What `kubectl patch --type merge` does; `part` may be a subresource such as `status`."""
        path = f"{self._path(kind, name)}{f'/{part}' if part else ''}?fieldManager=kubectl-patch"
        headers = {"Content-Type": "application/merge-patch+json"}
        return self._ask("PATCH", path, content=json.dumps(patch), headers=headers)

    def delete(self, kind: str, name: str, policy: str = "Background") -> None:
        """As kubectl does: what the object owns goes after it, or stays by the policy `Orphan`."""
        self._ask("DELETE", self._path(kind, name), params={"propagationPolicy": policy})

    @property
    def minor(self) -> int:
        """The minor number of the cluster's version."""
        digits = filter(str.isdigit, self._ask("GET", "/version")["minor"])
        return int("".join(digits))

    def make_ready(self, service: str, role: str) -> None:
        """Have all pods of a role ready, which no kubelet minds, by what a kubelet would write."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        for pod in self.list("Pod", f"{SERVICE_LABEL}={service},{ROLE_LABEL}={role}"):
            conditions = (pod.get("status") or {}).get("conditions") or []
            if not any(c["type"] == "Ready" for c in conditions):
                status = {"phase": "Running", "conditions": [*conditions, ready]}
                with suppress(NoLongerThere):
                    self.merge("Pod", pod["metadata"]["name"], {"status": status}, part="status")

    def children(self, service: str) -> dict[tuple[str, str], Object]:
        """Everything with the service's label that the operator makes, by kind and name."""
        selector = f"{MANAGED_BY_LABEL}={MANAGED_BY},{SERVICE_LABEL}={service}"
        return {
            (kind, item["metadata"]["name"]): item
            for kind in CHILD_KINDS
            for item in self.list(kind, selector)
        }

    def versions(self, service: str) -> dict[tuple[str, str], str]:
        """The resourceVersion of every child, and of the service itself."""
        found = self.children(service)
        found["InferenceService", service] = self.there("InferenceService", service)
        return {key: item["metadata"]["resourceVersion"] for key, item in found.items()}

    def contents(self, service: str) -> dict[tuple[str, str], Object]:
        """What was made of every child, and which object it is."""
        return {
            key: editable(child) | {"uid": child["metadata"]["uid"]}
            for key, child in self.children(service).items()
        }

    def _path(self, kind: str, name: str = "") -> str:
        return object_path(self._versions[kind], kind, self.name, name)

    def _ask(self, method: str, path: str, **rest: Any) -> Object:
        return self._told(self._http.request(method, path, **rest))

    @staticmethod
    def _told(answer: httpx.Response) -> Object:
        if answer.status_code == 404:
            raise NoLongerThere(f"{answer.request.method} {answer.url}")
        assert answer.status_code < 400, f"{answer.request.method} {answer.url}: {answer.text}"
        told: Object = answer.json()
        return told

    # --- services -----------------------------------------------------------------------------

    def serve(self, name: str, **spec: Any) -> Object:
        """Create a service; without anything else said, one whose pods are never wanted."""
        return self.create(
            {
                "kind": "InferenceService",
                "metadata": {"name": name, "namespace": self.name},
                "spec": {"model": {"uri": "dummy://"}, "prefill": {}, "decode": {}} | spec,
            }
        )

    def status(self, name: str) -> Object:
        found: Object = self.there("InferenceService", name).get("status") or {}
        return found

    def condition(self, name: str, kind: str) -> Object:
        """One condition of a service, empty as long as it has none."""
        conditions = self.status(name).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def degraded(self, name: str, reason: str, seconds: float = SOON_S) -> str:
        """What Degraded says once its reason is the given one."""
        return until(  # type: ignore[return-value]
            f"{name} is Degraded with {reason}",
            lambda: (
                (told := self.condition(name, "Degraded")).get("reason") == reason
                and told["message"]
            ),
            seconds,
        )

    def settled(self, name: str, phase: str = "Suspended", seconds: float = SOON_S) -> Object:
        """The status once it speaks of the newest spec and of a phase of the rollout."""

        def look() -> Object | None:
            found = self.there("InferenceService", name)
            status: Object = found.get("status") or {}
            newest = status.get("observedGeneration") == found["metadata"]["generation"]
            there = (status.get("rollout") or {}).get("phase") == phase
            return status if newest and there else None

        found = until(f"{name} is {phase}", look, seconds)
        assert found is not None
        return found


def resting(namespace: Namespace, name: str, seconds: float = SOON_S) -> dict[Any, str]:
    """The versions of a service and its children once none of them has changed for a while."""
    found, since = namespace.versions(name), time.monotonic()
    deadline = since + seconds
    while time.monotonic() - since < 1.5:
        time.sleep(POLL_S)
        if (now := namespace.versions(name)) != found:
            found, since = now, time.monotonic()
        assert since < deadline, f"{name} is still changing after {seconds:g} s"
    return found


def editable(obj: Object) -> Object:
    """What somebody may have edited: everything but status, and what the API server keeps."""
    kept = {name: value for name, value in obj.items() if name not in ("status", "metadata")}
    meta = obj["metadata"]
    marks = {name: meta.get(name) for name in ("labels", "ownerReferences")}
    # Controllers keep notes of their own there.
    annotations = meta.get("annotations") or {}
    ours = {name: value for name, value in annotations.items() if "diptych.dev/" in name}
    kept.pop("secrets", None)  # of a ServiceAccount: its token comes a moment later
    return kept | {"marks": marks, "annotations": ours}


def secret_values(namespace: Namespace) -> dict[str, str]:
    """Everything secret in the namespace's Secrets that is ours, encoded and plain."""
    found = {}
    for item in namespace.list("Secret", f"{MANAGED_BY_LABEL}={MANAGED_BY}"):
        for key, value in item["data"].items():
            if key != "curve-public":
                found[f"{item['metadata']['name']}/{key}"] = value
                plain = base64.b64decode(value).decode()
                found[f"{item['metadata']['name']}/{key} decoded"] = plain
    return found
