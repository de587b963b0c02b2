"""Messages that change what a running engine computes with: adapters, and new weights from a
trainer (reinforcement learning)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from diptych_protocol.arrays import Array


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """An adapter to load, or to answer with."""

    lora_name: str
    lora_int_id: int
    """Positive; names the adapter in `list_loras`, `remove_lora` and `pin_lora`."""
    lora_path: str = ""
    """A directory in PEFT's form: `adapter_config.json` and `adapter_model.safetensors`."""


def numbered(modules: Mapping[str, str]) -> list[LoRARequest]:
    """Return the adapters of a configuration (name -> directory), with the ids 1, 2, 3…"""
    return [
        LoRARequest(name, index, path)
        for index, (name, path) in enumerate(modules.items(), start=1)
    ]


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
