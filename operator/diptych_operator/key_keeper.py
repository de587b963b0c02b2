"""Creates, finds and removes the Secrets of services. They are never listed or watched."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from diptych_operator.api.names import ROTATE_ANNOTATION
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.children import (
    REFUSAL_S,
    NotOursError,
    adopt_orphan,
    belongs_to,
    is_orphan_of,
    with_owner,
)
from diptych_operator.kube.client import ApiError, Kube
from diptych_operator.new_secrets import new_secrets
from diptych_operator.render.keys import admin_token, secret, secret_name

RECHECK_S = 300.0
"""How long it may take to notice that somebody deleted a Secret for which no pod waits."""
MOST_TRIES = 3
"""To make a Secret whose name is taken."""


_Id = tuple[str, str, str, str]
"""Namespace, name and uid of the service, name of the key set: a service that is deleted and made
anew gets new keys, because the old ones go with the old service."""


def _how_to_renew(service: InferenceService) -> str:
    meta = service.metadata
    return (
        f"`kubectl -n {meta.namespace} annotate infsvc {meta.name} "
        f'{ROTATE_ANNOTATION}="$(date +%s)" --overwrite`'
    )


class KeysLostError(Exception):
    """The Secret with the keys of running pods is gone or spoiled, and nobody else has them."""

    def __init__(self, service: InferenceService, keys: str, token: str) -> None:
        super().__init__(
            f"the Secret {secret_name(service, keys)} is gone, or not as it was made, and running "
            "pods have its keys: they serve on, but no new pod can join them; bring it back from a "
            f"backup, or ask for new keys: {_how_to_renew(service)}"
        )
        self.token = token
        """The admin token that was in it, if this process ever read it, else empty."""


class KeysHeldError(Exception):
    """Pods, of an earlier service for example, have a Secret of the name that is to be made anew.

    It is immutable: as long as a pod of a node has it, the node gives new pods the same content,
    whatever a new Secret of that name holds.
    """

    def __init__(self, service: InferenceService, keys: str, holders: Collection[str]) -> None:
        super().__init__(
            f"pods have an earlier Secret {secret_name(service, keys)} ({len(holders)}, such as "
            f"{min(holders)}), and their nodes would give it to new pods: these start when those "
            f"have ended, or at once with keys of another name: {_how_to_renew(service)}"
        )


@dataclass(frozen=True, slots=True)
class _Known:
    token: str
    checked_at: float


class KeyKeeper:
    """Keeps track of the Secrets by service and name of the key set."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[_Id, _Known] = {}
        self._removed: set[_Id] = set()

    async def ensure(
        self, service: InferenceService, keys: str, *, in_use: bool, holders: Collection[str] = (),
        doubted: bool = False,
    ) -> str:  # fmt: skip
        """Create the key set if it does not exist, and return its admin token.

        `in_use`: running pods have these keys. `doubted`: a node may be waiting for them. Raises
        `KeysLostError` if they are in use and nobody else has them, `KeysHeldError` if only
        `holders`, pods that are to go, have some of this name, `NotOursError`, `ApiError`.
        """
        token, tries = await self._read(service, keys, doubted=doubted), 0
        while token is None:
            if in_use:
                # New keys of this name would cut new pods off from old ones without an error.
                known = self._known.get(_id(service, keys))
                raise KeysLostError(service, keys, known.token if known else "")
            if holders:
                raise KeysHeldError(service, keys, holders)
            self._removed.discard(_id(service, keys))
            try:
                await self._kube.create(with_owner(secret(service, keys, new_secrets()), service))
            except ApiError as exc:
                tries += 1
                if exc.status != 409 or tries == MOST_TRIES:
                    raise
                await self._remove_spoiled(service, keys)
            token = await self._read(service, keys)
        return token

    async def token(self, service: InferenceService, keys: str) -> str | None:
        """Return a key set's admin token; None if there is none. Raises as `ensure` does."""
        gone = not keys or _id(service, keys) in self._removed
        return None if gone else await self._read(service, keys)

    async def remove_once(self, service: InferenceService, keys: str) -> None:
        """Delete a key set that nobody holds any more. Only the first call asks the API server."""
        if _id(service, keys) in self._removed:
            return
        name, namespace = secret_name(service, keys), service.metadata.namespace
        raw = await self._kube.get("v1", "Secret", namespace, name)
        if raw is not None and belongs_to(raw, service):
            await self._kube.delete("v1", "Secret", namespace, name, raw["metadata"]["uid"])
        self._known.pop(_id(service, keys), None)
        self._removed.add(_id(service, keys))

    async def _remove_spoiled(self, service: InferenceService, keys: str) -> None:
        """Make room for a Secret whose name one has that is ours and of no use to anybody."""
        name, namespace = secret_name(service, keys), service.metadata.namespace
        raw = await self._kube.get("v1", "Secret", namespace, name)
        if raw is not None and belongs_to(raw, service) and admin_token(raw) is None:
            await self._kube.delete("v1", "Secret", namespace, name, raw["metadata"]["uid"])

    def forget(self, key: tuple[str, str]) -> None:
        for known in [k for k in self._known if k[:2] == key]:
            del self._known[known]
        self._removed = {removed for removed in self._removed if removed[:2] != key}

    async def _read(
        self, service: InferenceService, keys: str, *, doubted: bool = False
    ) -> str | None:
        known = self._known.get(_id(service, keys))
        believed_s = REFUSAL_S if doubted else RECHECK_S
        if known is not None and time.monotonic() - known.checked_at < believed_s:
            return known.token
        name = secret_name(service, keys)
        raw = await self._kube.get("v1", "Secret", service.metadata.namespace, name)
        if raw is None:
            return None
        if is_orphan_of(raw, service):
            await adopt_orphan(self._kube, raw, service)
        elif not belongs_to(raw, service):
            raise NotOursError("Secret", name)
        token = admin_token(raw)
        if token is not None:
            self._known[_id(service, keys)] = _Known(token, time.monotonic())
        return token


def _id(service: InferenceService, keys: str) -> _Id:
    meta = service.metadata
    return meta.namespace, meta.name, meta.uid, keys
