"""Names a LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


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
