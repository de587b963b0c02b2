"""A request's adapter, and its meaning for the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from diptych_protocol.block_hashes import adapted, salted


@dataclass(slots=True, frozen=True, weakref_slot=True, eq=False)
class Adapter:
    """An adapter whose files are valid. All requests that use it hold the same object."""

    lora_int_id: int
    name: str
    path: str
    digest: str
    """Digest of the files' content, which is equal on all engines with the same adapter."""


class UsesAdapter(Protocol):
    @property
    def adapter(self) -> Adapter | None: ...


def busy_adapters(requests: Iterable[UsesAdapter]) -> set[int]:
    """Return the ids of the adapters of some requests."""
    return {adapter.lora_int_id for request in requests if (adapter := request.adapter) is not None}


def cache_identity(cache_salt: str | None, adapter: Adapter | None) -> str | None:
    """Return the identity of everything besides tokens that a sequence's KV depends on; None if
    there is nothing.

    A client that chooses a salt must be able neither to read the KV of an adapter nor to poison it.
    So a salt alone and a salt with an adapter never give the same identity.
    """
    if adapter is not None:
        return adapted(cache_salt, adapter.name, adapter.digest)
    return salted(cache_salt)
