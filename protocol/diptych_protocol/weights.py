"""Messages that change what a running engine computes with: adapters, and new weights from a
trainer (reinforcement learning)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from diptych_protocol.arrays import Array


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """An adapter to load, or to answer with."""

    lora_name: str
    lora_int_id: int
    """Positive; names the adapter in `list_loras`, `remove_lora` and `pin_lora`."""
    lora_path: str = ""
    """A directory in PEFT's form: `adapter_config.json` and `adapter_model.safetensors`."""


CONFIGURED_FROM: Final = 1 << 30
"""The least id of an adapter of a configuration; lower ones are for those that come later."""


def numbered(modules: Mapping[str, str]) -> list[LoRARequest]:
    """Return the adapters of a configuration (name -> directory). Their ids follow from name and
    directory: in a rollout, routers and engines of different configurations mean the same."""
    adapters: dict[int, LoRARequest] = {}
    for name, path in modules.items():
        digest = hashlib.blake2b(f"{name}\0{path}".encode(), digest_size=8).digest()
        number = CONFIGURED_FROM + int.from_bytes(digest) % CONFIGURED_FROM
        while number in adapters:  # one in two thousand configurations of a thousand adapters
            number = CONFIGURED_FROM + (number + 1) % CONFIGURED_FROM
        adapters[number] = LoRARequest(name, number, path)
    return [*adapters.values()]


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
