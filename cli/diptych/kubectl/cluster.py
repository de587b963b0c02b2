"""The plugin's requests to a cluster: GETs only, with the rights of the user.

`kubernetes` is imported only here, and only when a command needs a cluster.
"""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlencode

import click
import msgspec

from diptych.defaults import own_file
from diptych.router_admin import Get, RouterError, Told, ask_all
from diptych_protocol import UNREADABLE

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

    from diptych_operator.kube.cluster import Cluster as Capabilities

Raw = dict[str, Any]

TIMEOUT_S = (5.0, 20.0)
"""Time limits for connecting and for reading."""
MAX_EVENTS = 500
MAX_ANSWER_BYTES = 16 << 20
SERVICES = "inferenceservices"
_GROUP_PATH = "/apis/diptych.dev/v1alpha1"
_SERVICE_LABEL = "diptych.dev/service"
_KEYS_LABEL = "diptych.dev/keys"


class ClusterError(click.ClickException):
    """The question cannot be asked or answered. Exit code 2, because 1 is an answer of `why`."""

    exit_code = 2

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the API server's answer; 0 without one."""


@dataclass(frozen=True, slots=True)
class Access:
    """The cluster, and the namespace in it. None: as the kubeconfig says."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None


class Cluster:
    """A session with one API server."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    @classmethod
    def connect(cls, access: Access) -> Self:
        """Read the kubeconfig. Raises `ClusterError`."""
        from kubernetes import client, config

        file = access.kubeconfig or os.environ.get("KUBECONFIG") or None
        settings = client.Configuration()
        try:
            config.load_kube_config(file, access.context, settings, persist_config=False)
            contexts, active = config.list_kube_config_contexts(file)
        # That library looks for no errors of a file that is none, or of fields of other types.
        except Exception as exc:
            said = " ".join(str(exc).split()).rstrip(".")
            raise ClusterError(
                f"no cluster to talk to: {said}; set KUBECONFIG, or give --kubeconfig or --context"
            ) from exc
        settings.retries = False
        chosen = next((c for c in contexts if c["name"] == access.context), active)
        namespace = access.namespace or chosen["context"].get("namespace") or "default"
        return cls(client.ApiClient(settings), checked_name(str(namespace)))

    def services(self, *, everywhere: bool = False) -> list[Raw]:
        """Return all InferenceServices of the namespace, or of the cluster."""
        where = "" if everywhere else f"/namespaces/{quote(self.namespace, safe='')}"
        return self._list(f"{_GROUP_PATH}{where}/{SERVICES}")

    def service(self, name: str) -> Raw:
        """Return one service. Raises `ClusterError` if there is none of that name."""
        # Of other names the API server would make other paths: one that is empty lists all.
        named = checked_name(name, "a service")
        return self._get(f"{_GROUP_PATH}/namespaces/{self.namespace}/{SERVICES}/{named}")

    def pods(self, name: str) -> list[Raw]:
        """Return the pods of a service."""
        return self._list(self._core("pods"), {"labelSelector": f"{_SERVICE_LABEL}={name}"})

    def fetching(self, name: str) -> list[Raw]:
        """Return the pods that fetch ahead for a service. They have none of its own labels."""
        from diptych_operator.api.names import (
            COMPONENT_LABEL,
            INSTANCE_LABEL,
            POOLS,
            PREFETCH_SUFFIX,
        )

        components = ",".join(f"{role}{PREFETCH_SUFFIX}" for role in POOLS)
        chosen = f"{INSTANCE_LABEL}={name},{COMPONENT_LABEL} in ({components})"
        return self._list(self._core("pods"), {"labelSelector": chosen})

    def children(self, raw: Raw, able: Capabilities) -> list[Raw]:
        """Return what an operator made of a service, but for Secrets and PoolScalers."""
        from diptych_operator.kube.client import PLURALS
        from diptych_operator.kube.cluster import (
            HTTP_ROUTE_API,
            HTTP_ROUTE_KIND,
            POOL_API,
            POOL_KIND,
            SET_API,
            SET_KIND,
        )

        meta = raw["metadata"]
        where = f"namespaces/{quote(meta['namespace'], safe='')}"
        query = {"labelSelector": f"{_SERVICE_LABEL}={meta['name']}"}
        kinds = {
            "Deployment": "apis/apps/v1", "ConfigMap": "api/v1", "Service": "api/v1",
            "ServiceAccount": "api/v1", "NetworkPolicy": "apis/networking.k8s.io/v1",
            "PodDisruptionBudget": f"apis/{able.policy_api}", "DaemonSet": "apis/apps/v1",
        }  # fmt: skip
        if able.has_sets and raw["spec"].get("workload") == SET_KIND:
            kinds[SET_KIND] = f"apis/{SET_API}"
        if able.has_gateways and (raw["spec"].get("expose") or {}).get("gateway"):
            kinds |= {POOL_KIND: f"apis/{POOL_API}", HTTP_ROUTE_KIND: f"apis/{HTTP_ROUTE_API}"}
        return [
            item | {"kind": kind}  # entries of a list do not say it
            for kind, group in kinds.items()
            for item in self._list(f"/{group}/{where}/{PLURALS[kind]}", query)
        ]

    def operator(self, namespace: str) -> list[str]:
        """Return the arguments of the operator in a namespace. Raises `ClusterError`."""
        path = f"/apis/apps/v1/namespaces/{checked_name(namespace)}/deployments"
        query = {"labelSelector": "app.kubernetes.io/name=diptych-operator"}
        try:
            operators = self._list(path, query)
        except ClusterError as exc:
            if exc.status != 403:
                raise
            raise ClusterError(
                "a plan follows the operator's arguments, so it needs the right to list "
                f"deployments.apps in the namespace {namespace}: {exc.message}",
                exc.status,
            ) from exc
        for found in operators:
            arguments = found["spec"]["template"]["spec"]["containers"][0].get("args") or []
            return [text.replace("$(POD_NAMESPACE)", namespace) for text in arguments]
        raise ClusterError(
            f"no operator runs in the namespace {namespace}; give --operator-namespace"
        )

    def version(self) -> tuple[Raw, list[str]]:
        """Return the version, and all `group/version` that are served."""
        groups = self._get("/apis")["groups"]
        return self._get("/version"), [v["groupVersion"] for g in groups for v in g["versions"]]

    def warnings(self) -> list[Raw]:
        """Return the warning events of the namespace."""
        query = {"fieldSelector": "type=Warning", "limit": str(MAX_EVENTS)}
        return self._list(self._core("events"), query)

    def admin_tokens(self, name: str) -> list[str]:
        """Return the admin tokens of a service, the newest first: a rotation has two."""
        from diptych_operator.render.keys import admin_token

        query = {"labelSelector": f"{_SERVICE_LABEL}={name},{_KEYS_LABEL}"}
        secrets = self._list(self._core("secrets"), query)
        secrets.sort(key=lambda raw: str(raw["metadata"].get("creationTimestamp")), reverse=True)
        return [token for token in map(admin_token, secrets) if token is not None]

    def forwarded(
        self, pod: str, port: int, path: str, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send a GET to a pod's port and return status and body. The API server and the kubelet
        forward it, so no NetworkPolicy blocks it, and the header Authorization arrives. Raises
        `ClusterError`."""
        from kubernetes.client import ApiException, CoreV1Api
        from kubernetes.stream import portforward

        begin = CoreV1Api(self._api).connect_get_namespaced_pod_portforward
        try:
            forward = portforward(
                begin, pod, self.namespace, ports=str(port), _request_timeout=TIMEOUT_S[1]
            )
        except ApiException as exc:
            raise ClusterError(
                f"port {port} of {pod} cannot be reached: {exc.reason}; that needs the right to "
                "get and create pods/portforward",
                exc.status or 0,
            ) from exc
        try:
            sock = forward.socket(port)
            sock.settimeout(TIMEOUT_S[1])
            connection = http.client.HTTPConnection(pod, port)
            connection.sock = sock
            connection.request("GET", path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as exc:
            said = forward.error(port) or str(exc) or type(exc).__name__
            raise ClusterError(f"{pod} does not answer at port {port}: {said}") from exc
        finally:
            forward.close()

    def metrics(self, pod: str, port: int, *, https: bool = False) -> str:
        """Return a pod's `/metrics`. The API server forwards the request, so the user needs no
        port-forward and no route to the pod."""
        name = f"https:{quote(pod, safe='')}" if https else quote(pod, safe="")
        path = f"{self._core('pods')}/{name}:{port}/proxy/metrics"
        return self._request(path, {}, "text/plain").decode(errors="replace")

    def _core(self, kind: str) -> str:
        return f"/api/v1/namespaces/{quote(self.namespace, safe='')}/{kind}"

    def _list(self, path: str, query: Mapping[str, str] | None = None) -> list[Raw]:
        items = self._get(path, query).get("items")
        return items if isinstance(items, list) else []

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> Raw:
        data = self._request(path, query or {}, "application/json")
        try:
            return msgspec.json.decode(data, type=Raw)
        except UNREADABLE as exc:
            host = self._api.configuration.host
            raise ClusterError(f"{host} does not answer as an API server does: {exc}") from exc

    def _request(self, path: str, query: Mapping[str, str], accept: str) -> bytes:
        import urllib3
        from kubernetes.client import ApiException

        host = self._api.configuration.host
        headers = {"Accept": accept}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
        url = host + path + (f"?{urlencode(query)}" if query else "")
        try:
            answer = self._api.call_api("GET", url, headers, _request_timeout=TIMEOUT_S)
            data: bytes = answer.read()
        # The latter where the server's certificate is not trusted.
        except (urllib3.exceptions.HTTPError, ApiException) as exc:
            raise ClusterError(f"the API server {host} does not answer: {_cause(exc)}") from exc
        if answer.status >= 400:
            raise ClusterError(refusal(answer.status, data, path), answer.status)
        return data


def checked_name(name: str, what: str = "a namespace") -> str:
    """Return it. Raises `ClusterError` for what cannot be the name of one."""
    if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise ClusterError(f"{name!r} cannot be the name of {what}; correct it")
    return name


def refusal(status: int, data: bytes, path: str) -> str:
    """Explain the API server's refusal, and what to do."""
    try:
        said = msgspec.json.decode(data, type=Raw)
    except UNREADABLE:
        said = {}
    message = str(said.get("message") or data[:200].decode(errors="replace")).strip()
    if status == 401:
        return f"the cluster does not know you ({message}); log in again, or renew the kubeconfig"
    if status == 403:
        return f"you may not do that: {message}; ask for a role that may"
    if status == 404 and path.startswith(_GROUP_PATH):
        if (said.get("details") or {}).get("name"):
            return f"{message}; `kubectl diptych status -A` lists those that are there"
        return (
            "this cluster knows no InferenceService; install Diptych first: helm install diptych "
            f"{own_file('charts/diptych')} --namespace diptych-system --create-namespace"
        )
    return f"HTTP {status} of {path}: {message}"


def _cause(error: Exception) -> str:
    """The innermost reason of urllib3's nested ones."""
    reason = getattr(error, "reason", None)
    return " ".join(str(reason if isinstance(reason, Exception) else error).split())


T = TypeVar("T")


def ask_routers(
    cluster: Cluster, name: str, path: str, kind: type[T]
) -> tuple[list[Told[T]], list[str]]:
    """Return the routers' answers, and an error for each router that cannot be asked. Raises
    `ClusterError` if no router knows the request, or none can be asked."""
    cluster.service(name)  # whose name is wrong should hear that, not that there are no routers
    try:
        return ask_all(_routers(cluster, name), path, kind)
    except RouterError as exc:
        raise ClusterError(str(exc)) from exc


def _routers(cluster: Cluster, name: str) -> Iterator[tuple[str, Get]]:
    """The routers that run, ready or not."""
    from diptych_operator.status.observed import pod_view

    pods = sorted(map(pod_view, cluster.pods(name)), key=lambda pod: pod.name)
    names = [pod.name for pod in pods if pod.role == "router"]
    if not names:
        raise ClusterError(f"no router of {name} runs; `kubectl diptych why {name}` tells more")
    tokens = cluster.admin_tokens(name)
    for router in names:
        yield router, partial(_get, cluster, router, tokens)


def _get(cluster: Cluster, router: str, tokens: Sequence[str], path: str) -> tuple[int, bytes]:
    from diptych_operator.api.names import ADMIN_PORT

    status, body = 401, b"the service has no Secret with an admin token"
    for token in tokens:  # during a rotation a router may still know only the older one
        try:
            headers = {"Authorization": f"Bearer {token}"}
            status, body = cluster.forwarded(router, ADMIN_PORT, path, headers)
        except ClusterError as exc:
            raise RouterError(exc.message) from exc
        if status != 401:
            break
    return status, body
