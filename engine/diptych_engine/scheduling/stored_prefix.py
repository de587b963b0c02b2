"""The source of a prefix whose KV this engine has on disk."""

from __future__ import annotations

from diptych_protocol import KVTransferParams


class StoredPrefix(KVTransferParams):
    """No engine has to be asked."""
