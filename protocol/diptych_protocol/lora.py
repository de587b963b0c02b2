"""Names a LoRA adapter."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """An adapter to load, or to answer with."""

    lora_name: str
    lora_int_id: int
    """Positive; names the adapter in `list_loras`, `remove_lora` and `pin_lora`."""
    lora_path: str = ""
    """A directory in PEFT's form: `adapter_config.json` and `adapter_model.safetensors`."""
