"""Stores answers that clients asked to keep, in the memory of this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych_frontend.responses_api.api_types import Item

MAX_STORED_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    """The body that the client got."""
    items: Sequence[Item]
    """The whole conversation including the answer."""
    num_input: int
    """The number of items before the answer."""
    size: int
    """Size in bytes, with the whole conversation."""


class ResponseStore:
    """Responses by tenant and id. When it is full, the tenant that uses most of it loses its
    oldest.

    Several threads may use it.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes: dict[str, int] = {}
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._lock = threading.Lock()

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Store a response, replacing one with the same id."""
        with self._lock:
            self._drop(tenant, response_id)
            self._of.setdefault(tenant, OrderedDict())[response_id] = response
            self._bytes[tenant] = self._bytes.get(tenant, 0) + response.size
            while sum(self._bytes.values()) > self._max_bytes:
                largest = max(self._bytes, key=lambda each: self._bytes[each])
                self._drop(largest, next(iter(self._of[largest])))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if it does not exist or belongs to another tenant."""
        with self._lock:
            kept = self._of.get(tenant)
            return None if kept is None else kept.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; True if it existed."""
        with self._lock:
            return self._drop(tenant, response_id)

    def _drop(self, tenant: str, response_id: str) -> bool:
        kept = self._of.get(tenant)
        if kept is None or response_id not in kept:
            return False
        self._bytes[tenant] -= kept.pop(response_id).size
        if not kept:
            del self._of[tenant], self._bytes[tenant]
        return True
