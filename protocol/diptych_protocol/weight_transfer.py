"""New weights for a running engine, sent by a trainer (reinforcement learning)."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych_protocol.arrays import Array


class WeightTransferInitRequest(msgspec.Struct, omit_defaults=True):
    """Opens the way for weights. `init_info` belongs to the backend."""

    init_info: dict[str, Any] = {}


class WeightTransferUpdateRequest(msgspec.Struct, omit_defaults=True):
    """Some of the new weights: their names and, side by side, where they are."""

    names: list[str] = []
    arrays: list[Array] = []
    """The values themselves, as frames of the message."""
    update_info: dict[str, Any] = {}
    """For backends that fetch the values by another way."""
