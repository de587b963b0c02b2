"""Messages about new weights for a running engine, from a trainer (reinforcement learning)."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych_protocol.arrays import Array


class WeightTransferInitRequest(msgspec.Struct, omit_defaults=True):
    """Connects an engine to a sender of weights. `init_info` belongs to the backend."""

    init_info: dict[str, Any] = {}


class WeightTransferUpdateRequest(msgspec.Struct, omit_defaults=True):
    """Some of the new weights: their names and, in the same order, where they are."""

    names: list[str] = []
    arrays: list[Array] = []
    """The values themselves, as frames of the message."""
    update_info: dict[str, Any] = {}
    """For backends that transfer the values in another way."""
