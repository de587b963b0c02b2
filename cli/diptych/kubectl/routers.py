"""Asks the routers of a service about requests, for `kubectl diptych why NAME REQUEST-ID`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

from diptych.kubectl.cluster import Cluster, ClusterError
from diptych.router_admin import Get, RouterError, Told, ask_all
from diptych_operator.api.names import ADMIN_PORT
from diptych_operator.status.observed import pod_view

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
    pods = sorted(map(pod_view, cluster.pods(name)), key=lambda pod: pod.name)
    names = [pod.name for pod in pods if pod.role == "router"]
    if not names:
        return
    tokens = cluster.admin_tokens(name)
    for router in names:
        yield router, partial(_get, cluster, router, tokens)


def _get(cluster: Cluster, router: str, tokens: Sequence[str], path: str) -> tuple[int, bytes]:
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
