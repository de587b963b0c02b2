"""Names KV blocks by chained hashes of tokens, which engines and routers compute alike.

The hash of a block covers all tokens up to its end, and everything else that their KV depends on.
Chained block hashes are an idea of vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

Extra = Callable[[int, int], bytes]
"""A function from a range of tokens to what they stand for besides themselves."""
FIRST_DIGEST: Final = 1
"""The digest of a core without any cached block; see `next_digest`."""


def salted(cache_salt: str | None) -> str | None:
    """Return the identity of a sequence whose KV depends only on its tokens and a client's salt;
    None without a salt. Other identities begin differently, so that no salt can imitate one."""
    return None if cache_salt is None else "salt:" + cache_salt


def salt_of_tenant(tenant: str, cache_salt: str | None) -> str:
    """Return the salt of a request whose blocks only requests of the same tenant may find. Another
    tenant cannot obtain it by any salt of its own."""
    return json.dumps([tenant, cache_salt])


def adapted(cache_salt: str | None, name: str, digest: str) -> str:
    """Return the identity of a sequence that is computed with an adapter of this name
    and content."""
    return "lora:" + json.dumps([cache_salt, name, digest])


class ImageInPrompt(NamedTuple):
    """The part of an image in a block hash."""

    key: str
    """See `image_key`."""
    begin: int
    """The position in the prompt of the first token for it, including markers."""
    end: int
    """The position after the last one."""


def image_key(identifier: str, cache_salt: str | None) -> str:
    """Return the key of an image's features. Clients with different salts share no key."""
    return identifier if cache_salt is None else f"{identifier} {cache_salt}"


def seen_in(images: Sequence[ImageInPrompt], start: int, end: int) -> bytes:
    """Return what the tokens from `start` up to `end` contain of images: which ones, and where they
    begin relative to `start`."""
    seen = [
        f"{image.key}@{image.begin - start};"
        for image in images
        if image.begin < end and image.end > start
    ]
    return "".join(seen).encode()


def root_hash(identity: str | None) -> bytes:
    """Return the parent of a sequence's first block. identity: names everything besides tokens that
    its KV depends on. Sequences of different identities never share a block."""
    return hashlib.blake2b((identity or "").encode(), digest_size=16).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    identity: str | None,
    extra: Extra | None = None,
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet.

    extra: for a sequence with images.
    """
    first = len(hashes) * block_size
    if len(token_ids) - first < block_size:
        return
    parent = hashes[-1] if hashes else root_hash(identity)
    hashes += following_hashes(parent, token_ids, block_size, first, extra)


def following_hashes(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    first: int = 0,
    extra: Extra | None = None,
) -> list[bytes]:
    """Return the hashes of the full blocks from the token `first` on. parent: the hash of the block
    before, or the root."""
    end = len(token_ids) - (len(token_ids) - first) % block_size
    content = memoryview(array("q", token_ids[first:end])).cast("B")
    width = 8 * block_size
    hashes = []
    for place in range(first, end, block_size):
        hasher = hashlib.blake2b(parent, digest_size=16)
        hasher.update(content[(place - first) * 8 : (place - first) * 8 + width])
        if extra is not None:
            hasher.update(extra(place, place + block_size))
        parent = hasher.digest()
        hashes.append(parent)
    return hashes


def next_digest(digest: int, added: bytes, removed: bytes) -> int:
    """Return the digest of the blocks that a core has cached after some were added and others
    removed: one more than the sum of their keys, modulo 2^64, computed from the digest before.

    The core and the clients that follow it compute it alike. So they notice when they do not know
    of the same blocks, because something was lost or came from elsewhere. It guards against
    accidents, and is no signature.
    """
    return (digest + _sum(added) - _sum(removed)) % (1 << 64)


def _sum(keys: bytes) -> int:
    """The sum of keys of 8 bytes each; what remains of one that is cut off does not count."""
    return sum(array("Q", keys[: len(keys) // 8 * 8]))
