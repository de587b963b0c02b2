"""Compares the descriptions of engines: which can exchange KV, and how they lend it."""

from __future__ import annotations

from collections.abc import Sequence

from diptych_protocol import EngineDescription, KVTransferParams
from diptych_protocol.kv_transfer_params import differences


def compat_mismatch(
    prefill: Sequence[EngineDescription], decode: Sequence[EngineDescription]
) -> str:
    """Return how the pair that differs least differs; empty if one fits, or there is none."""
    closest: list[str] = []
    said = ""
    for source in prefill:
        for target in decode:
            found = differences(source.compat, target.compat, "in prefill", "in decode")
            if not found:
                return ""
            if not said or len(found) < len(closest):
                closest = found
                said = (
                    f"{source.shown_name} and {target.shown_name} cannot exchange KV "
                    f"({'; '.join(found)})"
                )
    return said


def common_to_leases(about: EngineDescription, fingerprint: str) -> KVTransferParams:
    """Return the parameters that all leases of an engine have in common."""
    return KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id=about.engine_id,
        remote_host=about.kv_transfer_host,
        remote_port=about.kv_transfer_port,
        epoch=about.epoch,
        compat=fingerprint,
        remote_block_size=about.block_size,
        proof=about.kv_transfer_proof,
    )
