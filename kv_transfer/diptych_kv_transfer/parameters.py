"""Describes engines and leases in `kv_transfer_params`, and reads that, without I/O."""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from diptych_kv_transfer.tables.load import LeaseRef
from diptych_kv_transfer.tables.messages import Hello
from diptych_protocol import KVTransferParams, fingerprint


def describe_engine(me: Hello, host: str, port: int, lease_seconds: float) -> KVTransferParams:
    """Return the fields that are the same in all leases of the engine that listens at `host`."""
    return KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id=me.engine_id,
        remote_host=host,
        remote_port=port,
        remote_block_size=me.geometry.get("block_size"),
        tp_size=me.geometry.get("tensor_parallel_size", 1),
        lease_seconds=lease_seconds,
        epoch=me.epoch,
        compat=fingerprint(me.compat),
    )


def describe_lease(
    engine: KVTransferParams,
    *,
    request_id: str,
    lease_id: str,
    block_ids: list[int],
    num_tokens: int,
    digest: str,
    first_token_ids: list[int],
) -> KVTransferParams:
    """Return what a decode engine needs in order to fetch these blocks. It is not signed yet.

    Args:
        engine: what `describe_engine` returns for the engine that lends.
        num_tokens: number of tokens whose KV the blocks hold.
        digest: what `digest_of` returns for these tokens.
        first_token_ids: tokens that were sampled after them.
    """
    return msgspec.structs.replace(
        engine,
        remote_request_id=request_id,
        remote_block_ids=[block_ids],
        remote_num_tokens=num_tokens,
        lease_id=lease_id,
        first_token_ids=first_token_ids,
        tokens_digest=digest,
    )


def lease_of(params: KVTransferParams, default_seconds: float) -> LeaseRef:
    """Return the lease that verified `do_remote_prefill` parameters name.

    `default_seconds`: its length, if they do not name one.
    """
    return LeaseRef(
        lease_id=params.lease_id or "",
        address=(params.remote_host or "", params.remote_port or 0),
        engine_id=params.remote_engine_id or "",
        epoch=params.epoch or "",
        seconds=params.lease_seconds or default_seconds,
        num_ranks=params.tp_size,
    )


def digest_of(token_ids: list[int], cache_salt: str | None) -> str:
    """Return the digest of the tokens and the salt that a lease is for.

    An engine's salt names everything else that the KV depends on: the adapter, embeddings, and the
    client's own salt. The digest includes the number of tokens, to separate them from the salt.
    """
    content = hashlib.blake2b(array("q", [len(token_ids), *token_ids]).tobytes(), digest_size=16)
    content.update((cache_salt or "").encode())
    return content.hexdigest()
