"""Keeps what lists and watches told of the objects of services. It performs no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from diptych_operator.api.base import Raw, ServiceKey

SERVICES, ROUTES, PODS = "services", "routes", "pods"
"""Names of indices; each other name is that of a kind of children."""
_Uid = str


class Indexed:
    """The objects of each kind, by the service that owns them."""

    def __init__(self, lists: Iterable[str]) -> None:
        """`lists`: the paths of the collections that have to be listed once."""
        self.is_whole = asyncio.Event()
        """Set once it holds what the cluster held at the start."""
        self._unlisted = set(lists)
        self._objects: dict[str, dict[ServiceKey, dict[_Uid, Raw]]] = {}
        self._keys: dict[str, dict[_Uid, ServiceKey]] = {}
        self._seen: dict[str, set[_Uid]] = {}
        """What the pages of a list have shown so far, by its path."""

    def keep(self, index: str, key: ServiceKey, raw: Raw) -> set[ServiceKey]:
        """Keep an object of a service, and return the services that this concerns: it may have been
        another one's."""
        uid = raw["metadata"]["uid"]
        former = self.drop(index, uid)
        self._objects.setdefault(index, {}).setdefault(key, {})[uid] = raw
        self._keys.setdefault(index, {})[uid] = key
        return former | {key}

    def drop(self, index: str, uid: _Uid) -> set[ServiceKey]:
        """Forget an object, and return the service that had it, if one had."""
        key = self._keys.get(index, {}).pop(uid, None)
        if key is None:
            return set()
        objects = self._objects[index]
        del objects[key][uid]
        if not objects[key]:
            del objects[key]
        return {key}

    def list_page(
        self, path: str, index: str, namespace: str, found: Sequence[tuple[ServiceKey, Raw]],
        *, is_first: bool, is_last: bool,
    ) -> set[ServiceKey]:  # fmt: skip
        """Keep a page of the list at `path`, and return the services that have lost objects.

        What the whole list did not show is gone: no watch told of it if the watch was broken then.
        `namespace`: the list's, or empty if it is of all.
        """
        if is_first:
            self._seen[path] = set()
        seen, lost = self._seen.setdefault(path, set()), set[ServiceKey]()
        for key, raw in found:
            lost |= self.keep(index, key, raw) - {key}
            seen.add(raw["metadata"]["uid"])
        if is_last:
            del self._seen[path]
            known = self._keys.get(index, {})
            for uid in [u for u, k in known.items() if namespace in ("", k[0]) and u not in seen]:
                lost |= self.drop(index, uid)
            self._unlisted.discard(path)
            if not self._unlisted:
                self.is_whole.set()
        return lost

    def service(self, key: ServiceKey) -> Raw | None:
        return next(iter(self._of(SERVICES, key)), None)

    def route(self, key: ServiceKey) -> Raw | None:
        return next(iter(self._of(ROUTES, key)), None)

    def service_keys(self) -> set[ServiceKey]:
        return set(self._objects.get(SERVICES, {}))

    def children(self, key: ServiceKey) -> list[Raw]:
        kinds = self._objects.keys() - {SERVICES, ROUTES, PODS}
        return [raw for kind in sorted(kinds) for raw in self._of(kind, key)]

    def pods(self, key: ServiceKey) -> list[Raw]:
        return list(self._of(PODS, key))

    def _of(self, index: str, key: ServiceKey) -> Iterable[Raw]:
        return self._objects.get(index, {}).get(key, {}).values()
