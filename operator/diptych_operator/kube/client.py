"""A small client of the Kubernetes API, with the few verbs that the operator needs.

The typed classes of the `kubernetes` package are not used: what is rendered is plain data already,
and server-side apply wants exactly that data. The package brings configuration, authentication,
token refresh and the HTTP session.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from kubernetes.aio import client, config
from kubernetes.utils.quantity import parse_quantity

from diptych_operator.api.base import Raw
from diptych_protocol import UNREADABLE, DiptychError

FIELD_MANAGER = "diptych"
REQUEST_TIMEOUT_S = 30.0
RATE: Final = 100.0
"""Requests a second: an upgrade of a thousand services must not drown the API server."""
BURST: Final = 200.0
"""Requests that may follow each other at once after a rest."""

PLURALS = {
    "ConfigMap": "configmaps",
    "DaemonSet": "daemonsets",
    "Deployment": "deployments",
    "DisaggregatedSet": "disaggregatedsets",
    "Event": "events",
    "HTTPRoute": "httproutes",
    "InferencePool": "inferencepools",
    "InferenceService": "inferenceservices",
    "Lease": "leases",
    "NetworkPolicy": "networkpolicies",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PoolScaler": "poolscalers",
    "ModelRoute": "modelroutes",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
}


_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

RIGHTS = "Give the operator this right, as the chart's roles do."
_ANEW = "Delete the one that is there: it is made anew."
_REMEDIES = {
    (403, " cannot "): RIGHTS,
    (403, "exceeded quota"): "Raise the namespace's ResourceQuota.",
    (403, "it is being terminated"): "Wait until the namespace is gone.",
    (422, "field is immutable"): _ANEW,
    (422, "may not change once set"): _ANEW,
}
"""What to do about what is refused whatever the spec says, by status and words of the API server.
"""

_NOT_ITS_FAULT = (
    401,  # our token has run out
    408,
    409,  # somebody was quicker
    429,
)


class ApiError(DiptychError):
    """The API server refused, or did not answer (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message or reason or f"HTTP {status}")
        self.status = status
        self.reason = reason
        """Kubernetes' own word for it, such as Conflict, Invalid, Forbidden."""
        self.kind = ""
        """The kind of the object that was to be applied; empty for other requests."""
        self.component = ""
        """The part of the service that the object belongs to: `prefill`, `decode` or `router`."""
        self.blames_object = True
        """Whether another object of this kind might be accepted."""

    @property
    def will_last(self) -> bool:
        """Whether to tell the user: not of a passing conflict, limit or outage."""
        return self.is_refusal or self.status >= 500

    @property
    def is_refusal(self) -> bool:
        """Whether the request itself is at fault, so that it would be refused again."""
        # Kubernetes before 1.21 calls an unknown field an internal error.
        unknown_field = "failed to create typed patch object" in str(self)
        return unknown_field or (400 <= self.status < 500 and self.status not in _NOT_ITS_FAULT)


@contextlib.contextmanager
def tolerating(*statuses: int) -> Iterator[None]:
    """Leave the block at an error of these statuses."""
    try:
        yield
    except ApiError as exc:
        if exc.status not in statuses:
            raise


class Pace:
    """A bucket of tokens. What is small or urgent takes one and never waits: leases, statuses,
    sizes, Secrets. Children that are applied wait until there is one left for them."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._filled_at = burst, time.monotonic()
        self._line = asyncio.Lock()

    def take(self) -> None:
        self._fill()
        self._tokens -= 1

    async def wait_and_take(self) -> None:
        async with self._line:  # in the order in which they came
            while self._fill() < 1:
                await asyncio.sleep((1 - self._tokens) / self._rate)
            self._tokens -= 1

    def _fill(self) -> float:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return self._tokens


class Kube:
    """An authenticated session. Use it as an async context manager."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.pace = Pace()
        self.requests = 0
        """Number of requests made since the start, watches not included."""
        self.time: datetime | None = None
        """When the API server gave its last answer, by its own clock."""
        self._told_at = 0.0
        """The same by the monotonic clock."""

    @property
    def now(self) -> datetime:
        """By the API server's clock, once it has told: others read what is written by it, and this
        machine's may jump."""
        if self.time is None:
            return datetime.now(UTC)
        return self.time + timedelta(seconds=time.monotonic() - self._told_at)

    @classmethod
    async def connect(cls) -> Self:
        """Connect with the pod's service account, or else with the kubeconfig.

        Raises `ApiError` if there is neither.
        """
        settings = client.Configuration()
        try:
            config.load_incluster_config(settings)
        except config.ConfigException:
            try:
                await config.load_kube_config(client_configuration=settings)
            except (config.ConfigException, OSError) as exc:
                raise ApiError(0, "NoConfig", f"no cluster to talk to: {exc}") from exc
        return cls(client.ApiClient(settings))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    # --- objects ------------------------------------------------------------------------------

    async def apply(self, obj: Raw, *, dry_run: bool = False) -> Raw:
        """Apply on the server: the fields of `obj` become ours, all others stay.

        Waits for its turn, see `Pace`."""
        await self.pace.wait_and_take()
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        query |= {"dryRun": "All"} if dry_run else {}
        path = object_path(*name_of(obj))
        return await self._send("PATCH", path, query, obj, "application/apply-patch+yaml")

    async def apply_status(self, about: Raw, status: Raw) -> list[str]:
        """Apply the status of an object; do nothing if it no longer exists.

        Returns the fields that the API server dropped in silence, as those that its CRD lacks.
        """
        named = {part: about["metadata"][part] for part in ("namespace", "name")}
        body = {part: about[part] for part in ("apiVersion", "kind")} | {"metadata": named}
        path = f"{object_path(*name_of(about))}/status"
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        with tolerating(404):
            kept = await self.request(
                "PATCH", path, query, body | {"status": status}, "application/apply-patch+yaml"
            )
            found = differences(status, kept.get("status") or {}, "status")
            return [each.path for each in found if each.live is None]
        return []

    async def create(self, obj: Raw) -> Raw:
        meta = obj["metadata"]
        path = object_path(obj["apiVersion"], obj["kind"], meta["namespace"])
        return await self.request("POST", path, {"fieldManager": FIELD_MANAGER}, obj)

    async def replace(self, obj: Raw) -> Raw:
        """Replace an object if nobody has changed it since its resourceVersion. Otherwise the API
        server answers with status 409."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self.request("PUT", object_path(*name_of(obj)), query, obj)

    async def get(
        self, api_version: str, kind: str, namespace: str, name: str, *, in_turn: bool = False
    ) -> Raw | None:
        """Return the object, or None if it does not exist. With `in_turn` it waits, see `Pace`."""
        path = object_path(api_version, kind, namespace, name)
        with tolerating(404):
            if in_turn:
                await self.pace.wait_and_take()
                return await self._send("GET", path, None, None, "application/json")
            return await self.request("GET", path)
        return None

    async def exists(self, api_version: str, kind: str, namespace: str, name: str) -> bool:
        """Whether the object exists. Its content is not transferred."""
        path = object_path(api_version, kind, namespace, name)
        with tolerating(404):
            await self.request("GET", path, accept=_METADATA_ONLY)
            return True
        return False

    async def merge(
        self,
        api_version: str,
        kind: str,
        namespace: str,
        name: str,
        patch: Raw,
        *,
        dry_run: bool = False,
    ) -> Raw:
        """Change the fields that the patch names. Lists are replaced, others' entries too."""
        path = object_path(api_version, kind, namespace, name)
        query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return await self.request("PATCH", path, query, patch, "application/merge-patch+json")

    async def edit(
        self, api_version: str, kind: str, namespace: str, name: str, operations: Sequence[Raw]
    ) -> None:
        """Carry out the operations of a JSON patch (RFC 6902): all, or none."""
        path, query = (
            object_path(api_version, kind, namespace, name),
            {"fieldManager": FIELD_MANAGER},
        )
        await self.request("PATCH", path, query, operations, "application/json-patch+json")

    async def delete(
        self, api_version: str, kind: str, namespace: str, name: str, uid: str
    ) -> None:
        """Delete exactly this object; an object of the same name but another uid is left alone."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        path = object_path(api_version, kind, namespace, name)
        with tolerating(404, 409):  # gone, or another one by now
            await self.request("DELETE", path, None, options)

    async def can_list(self, api_version: str, kind: str, namespaces: Sequence[str]) -> bool:
        """Whether the kind exists and may be listed in each namespace or, if none is given, in all.

        Raises `ApiError` if the API server gives no answer.
        """
        with tolerating(403, 404):
            for namespace in namespaces or ("",):
                await self.request("GET", object_path(api_version, kind, namespace), {"limit": "1"})
            return True
        return False

    async def group_versions(self) -> list[str]:
        """Return all `group/version` that the cluster serves."""
        answer = await self.request("GET", "/apis")
        return [v["groupVersion"] for group in answer["groups"] for v in group["versions"]]

    async def version(self) -> tuple[str, str]:
        answer = await self.request("GET", "/version")
        return str(answer["major"]), str(answer["minor"])

    # --- HTTP ---------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Raw | Sequence[Raw] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Raw:
        """Send one request with a deadline, at once. Raises `ApiError`."""
        self.pace.take()
        return await self._send(method, path, query, body, content_type, accept)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Raw | Sequence[Raw] | None,
        content_type: str,
        accept: str = "application/json",
    ) -> Raw:
        self.requests += 1
        headers: dict[str, str] = {"Accept": accept, "Content-Type": content_type}
        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        try:
            await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            response = await self._api.call_api(
                method, url, headers, body, _request_timeout=REQUEST_TIMEOUT_S
            )
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            why = str(exc) or f"nothing within {REQUEST_TIMEOUT_S:g} s"
            raise ApiError(0, "Unreachable", f"the API server does not answer: {why}") from exc
        except config.ConfigException as exc:
            raise ApiError(0, "NoToken", f"no token for the API server: {exc}") from exc
        with contextlib.suppress(ValueError):  # a proxy may leave it out
            self.time = parsedate_to_datetime(response.headers.get("Date", ""))
            self._told_at = time.monotonic()
        if response.status >= 400:
            raise _refusal(response.status, data)
        try:
            answer: Raw = msgspec.json.decode(data, type=dict[str, Any])
        except UNREADABLE as exc:
            raise ApiError(0, "Garbled", f"this is not the API server's answer: {exc}") from exc
        return answer


def name_of(obj: Raw) -> tuple[str, str, str, str]:
    """Return API version, kind, namespace and name of an object."""
    meta = obj["metadata"]
    return obj["apiVersion"], obj["kind"], meta["namespace"], meta["name"]


def object_path(api_version: str, kind: str, namespace: str, name: str = "") -> str:
    """Return the REST path of an object, or of its collection in one namespace or in all."""
    prefix = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    place = ("namespaces", namespace) if namespace else ()
    # Some names come from annotations, which others may have written.
    parts: Iterable[str] = (prefix, *place, PLURALS[kind], quote(name, safe=""))
    return "/".join(filter(None, parts))


def _refusal(status: int, data: bytes) -> ApiError:
    try:
        said = msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE:  # from a proxy, say
        said = {"message": data[:200].decode(errors="replace")}
    message = str(said.get("message", ""))
    known = _REMEDIES.items()
    remedies = [remedy for (code, words), remedy in known if status == code and words in message]
    told = ". ".join((message.rstrip("."), *remedies)) if remedies else message
    error = ApiError(status, str(said.get("reason", "")), told)
    error.blames_object = not remedies
    return error


class Difference(NamedTuple):
    """One field of a rendering; `live` is None where the object has none."""

    path: str
    wanted: Any
    live: Any


def differences(wanted: Any, live: Any, path: str = "") -> Iterator[Difference]:
    """Yield the fields of `wanted` that `live` lacks or has otherwise.

    Fields that only `live` has are defaults, or other managers'. What is empty is not stored, and
    the API server makes texts of some numbers, and of quantities a form of its own: `1` of `1000m`.
    A list of another length differs as a whole.
    """
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        for name, value in wanted.items():
            yield from differences(value, live.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        for index, (value, there) in enumerate(zip(*map(_in_order, (wanted, live)), strict=True)):
            name = value.get("name", index) if isinstance(value, Mapping) else index
            yield from differences(value, there, f"{path}[{name}]")
    elif (wanted or live) and str(wanted) != str(live):
        with contextlib.suppress(ValueError):
            if _QUANTITY.search(path) and parse_quantity(wanted) == parse_quantity(str(live)):
                return
        yield Difference(path, wanted, live)


def _in_order(entries: list[Any]) -> list[Any]:
    """Those with names, by names: apply leaves what was there where it was, and new ones behind."""
    try:
        return sorted(entries, key=lambda entry: str(entry.get("mountPath") or entry["name"]))
    except (AttributeError, KeyError):
        return entries


_QUANTITY = re.compile(r"\b(?:resources\.(?:limits|requests)\..+|sizeLimit|divisor)$")
"""The path of a field that is one."""
