"""Renders once a change, not once a pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import msgspec

from diptych_operator.api.base import Object, ServiceKey
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService, ObjectMeta, Spec
from diptych_operator.kube.cluster import Cluster
from diptych_operator.render import KeySets, render_revision, render_shared
from diptych_protocol.router_settings import Serving

T = TypeVar("T")

KEPT: Final = 8
"""Results of a service that are remembered: a rollout asks for few, in turns."""


class Renderings:
    """What was made of each service as it is now, until it changes or goes.

    The objects are kept as JSON, which takes a tenth of their memory, and each caller gets its own.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._made: dict[ServiceKey, tuple[ObjectMeta, Spec, dict[Hashable, Any]]] = {}

    def shared(self, service: InferenceService, keys: KeySets, serving: Serving) -> list[Object]:
        """See `render_shared`. Raises `SpecError`."""
        return self._objects(
            service, (keys, serving), lambda: render_shared(service, self.cluster, keys, serving)
        )

    def revision(
        self,
        service: InferenceService,
        name: str,
        keys: KeySets,
        counts: Counts,
        in_place: frozenset[str] = frozenset(),
    ) -> list[Object]:
        """See `render_revision`. Raises `SpecError`."""
        return self._objects(
            service,
            (name, keys, counts, in_place),
            lambda: render_revision(service, self.cluster, name, keys, counts, in_place),
        )

    def _objects(
        self, service: InferenceService, inputs: Hashable, make: Callable[[], list[Object]]
    ) -> list[Object]:
        made = self.once(service, inputs, lambda: msgspec.json.encode(make()))
        return msgspec.json.decode(made, type=list[dict[str, Any]])

    def once(self, service: InferenceService, inputs: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for this very service and these inputs."""
        meta, spec = service.metadata, service.spec
        key = meta.namespace, meta.name
        known = self._made.get(key)
        if known is None or known[:2] != (meta, spec):
            known = self._made[key] = (meta, spec, {})
        made = known[2]
        if inputs not in made:
            result = make()
            if len(made) >= KEPT:
                del made[next(iter(made))]
            made[inputs] = result
        found: T = made[inputs]
        return found

    def forget(self, key: ServiceKey) -> None:
        self._made.pop(key, None)
