"""Renders one ModelRoute into its Kubernetes objects: the pods of a proxy, and their address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from diptych_operator.api.base import Object, digest
from diptych_operator.api.names import (
    CERTIFICATES_DIR,
    CONFIG_DIR,
    HTTP_PORT,
    LINGER_VARIABLE,
    ROUTE_FILE,
    metadata,
    object_name,
)
from diptych_operator.api.route import ModelRoute, RoutedService
from diptych_operator.kube.cluster import Cluster
from diptych_operator.render.config import config_map
from diptych_operator.render.deployment import (
    LINGER_SECONDS,
    Pods,
    container_ports,
    deployment,
    environment,
    variable,
)
from diptych_operator.render.model import ModelMount, resources_of
from diptych_operator.render.pods import (
    SCHEME_ANNOTATION,
    door_arguments,
    door_probes,
    door_volumes,
)
from diptych_operator.render.shared import api_service, disruption_budget, service_account
from diptych_protocol.router_settings import RouteConfig, RouteModel, RouteTarget

_COMMAND = ["python", "-m", "diptych_router.route"]
_ARGUMENTS = [
    *("--config", f"$(DIPTYCH_CONFIG_DIR)/{ROUTE_FILE}"),
    *("--host", "$(DIPTYCH_BIND_HOST)"),
    *("--port", "$(DIPTYCH_HTTP_PORT)"),
    *("--linger-seconds", f"$({LINGER_VARIABLE})"),
]
_PORTS = {"http": HTTP_PORT}


class Served(NamedTuple):
    """What a route has to know of a service."""

    model: str
    """The model's name."""
    tls_secret: str = ""
    """The name of the Secret of its certificate; empty: it serves plain HTTP."""
    other_tls_secret: str = ""
    """That of the certificate which some of its routers still have; empty: none has another."""


Services = Mapping[str, Served]
"""Those that are there, by their names."""


def route_objects(route: ModelRoute, served: Services, cluster: Cluster) -> list[Object]:
    """Return the objects of a route, each before those that refer to it.

    Raises `SpecError` for a podTemplate that does not fit.
    """
    config = _config_map(route, served)
    tls = route.spec.tls
    return [
        service_account(route, "route"),
        config,
        api_service(route, "route", _PORTS, over_https=tls is not None),
        disruption_budget(route, "route", cluster),
        _deployment(route, config, served),
    ]


def _config_map(route: ModelRoute, served: Services) -> Object:
    meta = route.metadata
    config = RouteConfig(
        meta.name,
        [
            RouteModel(
                [model.name, *model.aliases],
                [_target(each, meta.namespace, served) for each in model.services],
            )
            for model in route.spec.models
        ],
        allowed_hosts=[
            f"{object_name(route, 'route')}.{meta.namespace}",
            *route.spec.allowed_hosts,
        ],
        drain_seconds=route.spec.availability.drain_seconds,
    )
    text = msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
    return config_map(metadata(route, "route", "route"), {ROUTE_FILE: text})


def _target(service: RoutedService, namespace: str, served: Services) -> RouteTarget:
    known = served.get(service.name, Served(service.name))
    scheme = "https" if known.tls_secret else "http"
    url = f"{scheme}://{service.name}-router.{namespace}.svc:{HTTP_PORT}"
    files = [f"{CERTIFICATES_DIR}/{file}" for file in _files(service.name, known)]
    return RouteTarget(service.name, url, service.model or known.model, service.weight, *files)


def _certificates(route: ModelRoute, served: Services) -> list[Object]:
    """The volume of the certificates, without their keys, of services that serve HTTPS. A Secret
    that is not there keeps only its service from being asked."""
    sources = [
        {
            "secret": {
                "name": secret,
                "items": [{"key": "tls.crt", "path": file}],
                "optional": True,
            }
        }
        for name in route.services
        if name in served
        for file, secret in _files(name, served[name]).items()
    ]
    if not sources:
        return []
    return [{"name": "certificates", "projected": {"sources": sources, "defaultMode": 0o440}}]


def _files(service: str, known: Served) -> dict[str, str]:
    """Those of its certificates, and their Secrets; no service's name has a dot."""
    found = {f"{service}.crt": known.tls_secret, f"{service}.other.crt": known.other_tls_secret}
    return {file: secret for file, secret in found.items() if secret}


def _deployment(route: ModelRoute, config: Object, served: Services) -> Object:
    spec = route.spec
    container: dict[str, Any] = {
        "name": "route",
        "image": spec.image,
        "command": _COMMAND,
        "args": [*_ARGUMENTS, *door_arguments(spec)],
        "env": [
            *environment(_PORTS, {"DIPTYCH_CONFIG_DIR": CONFIG_DIR}),
            variable(LINGER_VARIABLE, str(LINGER_SECONDS)),
        ],
        "ports": container_ports(_PORTS),
        **door_probes(spec),
        **resources_of(spec.resources),
    }
    volumes = [
        {"name": "config", "configMap": {"name": object_name(route, "route")}},
        *door_volumes(spec),
        *_certificates(route, served),
    ]
    annotations = {} if spec.tls is None else SCHEME_ANNOTATION
    pods = Pods(
        "route", spec, spec.replicas, container, volumes, digest(config["data"]), ModelMount(""),
        annotations=annotations,
    )  # fmt: skip
    return deployment(route, pods)
