"""The keys by which engines name the blocks of a request's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from diptych_protocol import EngineCoreRequest
from diptych_protocol.block_hashes import (
    ImageInPrompt,
    adapted,
    extend_block_hashes,
    image_key,
    salted,
    seen_in,
)
from diptych_router.engines.prefixes.hash_table import Keys
from diptych_router.engines.prefixes.known_prefixes import keys_of


class BlockNaming(NamedTuple):
    """What the names of a prompt's blocks at an engine depend on, besides the request."""

    block_size: int
    adapter: str = ""
    """Digest of the content of the request's adapter there, if it has one."""


def block_keys(request: EngineCoreRequest, tokens: Sequence[int], naming: BlockNaming) -> Keys:
    """Return the keys of the full blocks of a prompt, as an engine with this naming computes them.

    tokens: those of the prompt, and those that were generated since. A prompt of embeddings has no
    keys that a router could know.
    """
    salt, adapter = request.cache_salt, request.lora_request
    identity = salted(salt)
    if adapter is not None:
        identity = adapted(salt, adapter.lora_name, naming.adapter)
    images = [
        ImageInPrompt(image_key(feature.identifier, salt), at.offset, at.offset + at.length)
        for feature in request.mm_features or ()
        for at in (feature.mm_position,)
    ]
    hashes: list[bytes] = []
    extra = partial(seen_in, images) if images else None
    extend_block_hashes(hashes, tokens, naming.block_size, identity, extra)
    return keys_of(hashes)
