"""Checks that the objects to which waiting pods refer exist. It reads only their metadata."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from diptych_operator.api.names import Owner
from diptych_operator.key_keeper import RECHECK_S
from diptych_operator.kube.children import REFUSAL_S
from diptych_operator.kube.client import ApiError, Kube
from diptych_operator.status.references import Reference, remedy

_Id = tuple[str, Reference]
"""The namespace, and what is looked for in it."""


class Referents:
    """Caches what it saw, so that pods that stay stuck cost few requests."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._seen: dict[_Id, tuple[bool, float]] = {}
        """Whether it was there, and until when that is believed."""

    async def missing(
        self, service: Owner, wanted: Collection[Reference]
    ) -> Mapping[Reference, str]:
        """Return the objects that do not exist, with the remedy for each."""
        namespace = service.metadata.namespace
        gone = [name for name in sorted(wanted) if not await self._is_there((namespace, name))]
        return {name: remedy(service, name) for name in gone}

    async def _is_there(self, what: _Id) -> bool:
        now = time.monotonic()
        self._seen = {each: seen for each, seen in self._seen.items() if seen[1] > now}
        if what in self._seen:
            return self._seen[what][0]
        namespace, (kind, name) = what
        try:
            there = await self._kube.exists("v1", kind, namespace, name)
        except ApiError as exc:
            if not exc.is_refusal:
                raise
            there = True  # nobody lets us look; the pod's own words have to do
        self._seen[what] = there, now + (RECHECK_S if there else REFUSAL_S)
        return there
