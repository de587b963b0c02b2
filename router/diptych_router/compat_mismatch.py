"""Why no prefill engine of a router can lend KV to any of its decode engines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from diptych_protocol import EngineDescription
from diptych_protocol.kv_transfer_params import differences


def compat_mismatch(
    prefill: Sequence[EngineDescription], decode: Sequence[EngineDescription]
) -> str:
    """The differences of the pair that differs least; empty if some pair fits, or there is none."""
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
                    f"{source.engine_id} and {target.engine_id} cannot exchange KV "
                    f"({'; '.join(found)})"
                )
    return said
