"""One pass over one ModelRoute: what it needs is applied, and its status says what is there."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from diptych_operator.api.base import Raw, ServiceKey, SpecError
from diptych_operator.api.images import Images
from diptych_operator.api.limits import Allowed, check_limits
from diptych_operator.api.names import (
    HTTP_PORT,
    ROLE_LABEL,
    ROUTE_SUFFIX,
    TLS_VOLUME,
    Part,
    object_name,
)
from diptych_operator.api.parse import parse_route
from diptych_operator.api.route import ModelRoute, RouteStatus
from diptych_operator.api.status import MAX_MESSAGE, Condition, ConditionStatus
from diptych_operator.kube.children import ChildId, Children, NotOursError, child_id
from diptych_operator.kube.client import ApiError, Kube
from diptych_operator.kube.cluster import Cluster
from diptych_operator.kube.indexed import Indexed
from diptych_operator.kube.rivals import Rivals, ServedByRivalError
from diptych_operator.kube.watch import is_ready
from diptych_operator.referents import Referents
from diptych_operator.render.route import Served, route_objects
from diptych_operator.routers import TIMEOUT_S
from diptych_operator.service_snapshot import label
from diptych_operator.status.conditions import MAX_PART
from diptych_operator.status.diagnose import diagnose, shorten
from diptych_operator.status.observed import Observed, foreign, observe
from diptych_operator.status.references import Reference

log = logging.getLogger(__name__)

LOOK_S = 15.0
"""How often a route looks whether its services are as they were."""


class Routes:
    """Owns the children of every ModelRoute that the watches show."""

    def __init__(
        self,
        kube: Kube,
        watched: Indexed,
        cluster: Cluster,
        images: Images,
        rivals: Rivals,
        allowed: Allowed | None = None,
    ) -> None:
        """If `allowed` is given, routes may ask for no more than it permits."""
        self._kube, self._watched, self._cluster = kube, watched, cluster
        self._images, self._rivals, self._allowed = images, rivals, allowed
        self._children = Children(kube)
        self._referents = Referents(kube)
        self._known: dict[ServiceKey, dict[str, Served]] = {}
        """What each route last knew of its services: one that is deleted and applied again is
        likely to be as it was, and a pass that knew nothing of it would replace the route's pods.
        """

    async def reconcile(self, key: ServiceKey) -> float | None:
        """Bring one route closer to its spec. Returns the seconds until the next pass."""
        raw = self._watched.route(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self._children.forget(key[0], key[1].removesuffix(ROUTE_SUFFIX))
            self._known.pop(key, None)
            return None
        try:
            return await self._rivals.unless_served(key[0], lambda: self._pass(key, raw))
        except ServedByRivalError:
            return LOOK_S

    async def _pass(self, key: ServiceKey, raw: Raw) -> float:
        try:
            if self._allowed is not None:
                check_limits(raw["spec"], self._allowed)
            route = parse_route(raw, self._images)
            live = {child_id(child): child for child in self._watched.children(key)}
            served = self._known[key] = self._served(route, self._known.get(key, {}))
            wanted = route_objects(route, served, self._cluster)
            await self._children.adopt(route, live.values())
            lags = await self._children.apply_all(route, wanted, live)
        except SpecError as exc:
            await self._report(raw, "SpecRejected", str(exc))
        except NotOursError as exc:
            await self._report(raw, "ObjectNotOurs", str(exc))
        except ApiError as exc:
            if not exc.is_refusal:
                raise
            words = f"the API server refuses an object: {str(exc).rstrip('.')}"
            if exc.kind == "Deployment" and exc.blames_object:
                words += ". Correct spec.podTemplate or spec.resources."
            await self._report(raw, "Refused", words)
        else:
            deployments = (child for child in live.values() if child["kind"] == "Deployment")
            observed = observe(deployments, self._watched.pods(key))
            ready = sum(view.ready for view in observed.deployments)
            why = await self._why_not_ready(route, live, observed, lags=lags)
            ended = "" if route.spec.tls is None else await self._certificate_ended(key)
            reason, message = next(self._problems(route, why, ended), ("Serving", "it serves"))
            await self._report(raw, reason, message, f"{ready}/{route.spec.replicas}")
        return LOOK_S

    def _served(self, route: ModelRoute, before: dict[str, Served]) -> dict[str, Served]:
        """The services that are there, or were `before`, by their names."""
        found = {name: before[name] for name in route.services if name in before}
        for name in route.services:
            key = route.metadata.namespace, name
            raw = self._watched.service(key)
            if raw is not None:
                spec: dict[str, Any] = raw["spec"]
                tls = ((spec.get("router") or {}).get("tls") or {}).get("secretName", "")
                model = spec["model"].get("servedName") or name
                # The one that is asked for may never come, where its Secret is not there.
                shown = {_certificate_of(pod, tls) for pod in self._ready_pods(key, "router")}
                now = tls if tls in shown or not shown else min(shown)
                other = min(shown - {tls, ""}, default="") if tls and now else ""
                found[name] = Served(model, tls if other else now, other)
        return found

    def _ready_pods(self, owner: ServiceKey, role: Part) -> Iterator[Raw]:
        """The pods that the owner's Service leads to."""
        for pod in self._watched.pods(owner):
            leaves = "deletionTimestamp" in pod["metadata"]
            if label(pod, ROLE_LABEL) == role and is_ready(pod) and not leaves:
                yield pod

    async def _why_not_ready(
        self, route: ModelRoute, live: Iterable[ChildId], observed: Observed, *, lags: bool
    ) -> str:
        """Empty if it serves as the spec asks, though a pod may be on its way."""
        views, name = observed.deployments, object_name(route, "route")
        settled = bool(views) and not lags and all(view.settled for view in views)
        if settled and all(view.ready >= view.wanted for view in views):
            return ""
        waits_for = foreign(observed.pods, {Reference(kind, name) for _, kind, name in live})
        missing = await self._referents.missing(route, waits_for)
        found = diagnose(replace(observed, missing=missing), "route")
        findings = [finding.message for finding in found[:1]]
        keys = route.spec.api_keys
        if any(view.ready for view in views):
            if settled and not findings:
                return ""
            said = f"not all pods of {name} are ready, and as the spec asks"
        else:
            said = f"no pod of {name} is ready"
            if keys is not None and not findings and any(pod.has_volumes for pod in observed.pods):
                words = "they start, or wait until the Secret {} of spec.apiKeys holds a usable key"
                findings = [words.format(keys.secret_name)]
        return ": ".join([said, *findings])

    async def _certificate_ended(self, key: ServiceKey) -> str:
        """When the certificate that a pod of the route shows ended, an RFC 3339 time; empty if it
        has not, or none says. All pods have one Secret."""
        pod = next(self._ready_pods(key, "route"), None)
        if pod is None:
            return ""
        try:
            ends = await asyncio.to_thread(_last_moment, pod["status"].get("podIP", ""))
        except (OSError, ValueError) as exc:
            log.debug("%s/%s: its certificate cannot be seen: %s", *key, exc)
            return ""
        return "" if ends > self._kube.now else f"{ends:%Y-%m-%dT%H:%M:%SZ}"

    def _problems(self, route: ModelRoute, why: str, ended: str) -> Iterator[tuple[str, str]]:
        """Reason and message of what keeps the route from being ready, the worst first."""
        if why:
            yield "PodsNotReady", why
        if ended and route.spec.tls is not None:
            words = f"the certificate of the Secret {route.spec.tls.secret_name} of spec.tls ended "
            words += f"at {ended}, and clients refuse it: renew it"
            yield "CertificateExpired", words
        for name in route.services:
            raw = self._watched.service((route.metadata.namespace, name))
            if raw is None:
                words = f"there is no InferenceService {name} here; create it, or take it out of "
                yield "ServiceMissing", words + "spec.models"
            else:
                yield from _differences(route, name, raw["spec"].get("router") or {})
        for model in route.spec.models:
            causes = [self._why_unavailable(route, each.name) for each in model.services]
            if all(causes):
                said = f"no service of the model {model.name} answers: {causes[0]}"
                yield "ServiceUnavailable", shorten(said, MAX_PART)

    def _why_unavailable(self, route: ModelRoute, name: str) -> str:
        """Why a service answers no requests, by its status; empty if nothing says so."""
        raw = self._watched.service((route.metadata.namespace, name))
        if raw is None:
            return f"{name} is not there"
        conditions = (raw.get("status") or {}).get("conditions") or ()
        told = (c for c in conditions if c["type"] == "Available" and c["status"] == "False")
        return next((f"{name}: {c['message']}" for c in told), "")

    async def _report(self, raw: Raw, reason: str, message: str, ready: str = "") -> None:
        meta, old = raw["metadata"], raw.get("status") or {}
        state: ConditionStatus = "True" if reason == "Serving" else "False"
        before: Raw = next(iter(old.get("conditions") or ()), {})
        same = before.get("status") == state
        since = before["lastTransitionTime"] if same else f"{self._kube.now:%Y-%m-%dT%H:%M:%SZ}"
        words = shorten(message, MAX_MESSAGE)
        condition = Condition("Ready", state, reason, words, since, meta["generation"])
        scheme = "https" if raw["spec"].get("tls") else "http"
        status = RouteStatus(
            observed_generation=meta["generation"],
            url=f"{scheme}://{meta['name']}-route.{meta['namespace']}.svc:{HTTP_PORT}/v1",
            ready=ready,
            conditions=[condition],
        )
        new = msgspec.to_builtins(status)
        if new != old:
            log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], reason, message)
            await self._kube.apply_status(raw, new)


def _certificate_of(router: Raw, asked: str) -> str:
    """The Secret of the certificate that a ready router has; empty if it serves HTTP."""
    for volume in router["spec"]["volumes"]:
        if volume["name"] == TLS_VOLUME:
            return str((volume.get("secret") or {}).get("secretName", asked))
    return ""


_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME."""


def _last_moment(address: str) -> datetime:
    """Until when the certificate is good that a pod shows. Raises `OSError`, `ValueError`."""
    where = address, HTTP_PORT
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Only of one that is trusted Python tells more than its bytes.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    context.load_verify_locations(cadata=ssl.get_server_certificate(where, timeout=TIMEOUT_S))
    with socket.create_connection(where, TIMEOUT_S) as line, context.wrap_socket(line) as end:
        shown = end.getpeercert() or {}
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)


def _differences(route: ModelRoute, name: str, router: Raw) -> Iterator[tuple[str, str]]:
    """Why a service does not answer what the route hands on, by its `spec.router`."""
    keys = route.spec.api_keys.secret_name if route.spec.api_keys is not None else ""
    theirs = (router.get("apiKeys") or {}).get("secretName")
    if theirs and theirs != keys:
        words = f"the service {name} gets the keys of the route's clients, and knows those of the "
        yield "KeysDiffer", words + f"Secret {theirs}: name it in the route's spec.apiKeys"
