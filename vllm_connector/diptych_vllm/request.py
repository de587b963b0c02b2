"""What the scheduler half knows of one of vLLM's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_kv_transfer.parameters import digest_of


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that vLLM's scheduler has just admitted."""

    request_id: str
    token_ids: list[int] | None
    """The prompt. None if it has embeddings, because no tokens identify its KV."""
    num_tokens: int
    """Length of the prompt."""
    identity: str | None
    """Everything but the tokens that the KV depends on; see `identity_of`."""
    params: Any
    """The client's `kv_transfer_params`, not validated."""
    rejected: bool = False
    """Whether vLLM's front-end has refused it, or it has failed: this only reports its end."""

    @property
    def digest(self) -> str:
        """The digest of a lease of the whole prompt's KV; empty if no lease can have it."""
        return self.digest_of_first(self.num_tokens)

    def digest_of_first(self, num_tokens: int) -> str:
        """Return the digest of a lease of the KV of the prompt's first `num_tokens` tokens. If the
        prompt has fewer, no lease has this digest."""
        if self.token_ids is None:
            return ""
        return digest_of(self.token_ids[:num_tokens], self.identity)


def identity_of(salt: str | None, lora: str | None, images: Sequence[str]) -> str | None:
    """Return the identity of everything besides tokens that the KV depends on: the client's salt,
    the adapter, and the images (their hashes, in order). None: nothing else."""
    if salt is None and lora is None and not images:
        return None
    return msgspec.json.encode([salt, lora, list(images)]).decode()
