"""Granite 4, the dense models. Those with Mamba layers or experts are refused."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec(
    "granitemoehybrid",
    position_embedding_type="rope",
    gguf_architecture=None,
    config_keys={"intermediate_size": "shared_intermediate_size"},
    config_needs={"layer_types": "all layers are Mamba's; the dense models name theirs"},
    config_defaults={"attention_multiplier": 1.0},
    parts={
        "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
        "shared_mlp.output_linear": ("mlp.down_proj",),
    },
)
