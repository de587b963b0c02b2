"""Reads an adapter in the form that Hugging Face's PEFT saves: a configuration and safetensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from diptych_engine.models.interface import Projection
from diptych_frontend.model_files.ordinary import require_ordinary
from diptych_protocol import UNREADABLE, InvalidRequestError

CONFIG_FILE: Final = "adapter_config.json"
TENSOR_FILE: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 16 << 20
MAX_FACTOR: Final = torch.finfo(torch.float32).max
TENSOR_NAME: Final = re.compile(
    r"base_model\.model\.model\.(?:text_model\.)?layers\.(\d+)\.([\w.]+)\.lora_(A|B)\.weight"
)
"""The names of tensors. In a model with vision, the decoder is its `text_model`."""


class PeftConfig(msgspec.Struct):
    """The part of adapter_config.json that is used; other keys are ignored.

    The names of the tensors show which modules are adapted.
    """

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def check(self, max_rank: int) -> None:
        """Raise `InvalidRequestError` for what is not plain LoRA, or too large."""
        for ok, complaint in (
            (self.peft_type == "LORA", f"peft_type {self.peft_type!r} is not LORA"),
            (1 <= self.r <= max_rank, f"rank {self.r} is not in 1..{max_rank} (max_lora_rank)"),
            (abs(self.lora_alpha) <= MAX_FACTOR, f"lora_alpha {self.lora_alpha:g} is no float32"),
            (not self.use_dora, "DoRA is not supported"),
            (not self.fan_in_fan_out, "fan_in_fan_out is not supported"),
            (self.bias == "none", f"bias {self.bias!r} is not supported"),
            (not self.modules_to_save, "modules_to_save is not supported"),
            (not self.rank_pattern, "rank_pattern is not supported"),
            (not self.alpha_pattern, "alpha_pattern is not supported"),
        ):
            if not ok:
                raise InvalidRequestError(complaint)

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(slots=True, frozen=True)
class PeftAdapter:
    scale: float
    pairs: dict[tuple[int, str], tuple[Tensor, Tensor]]
    """(layer, module) -> A [rank, in] and B [out, rank], as they are in the file."""
    digest: str
    """Digest of the bytes of both files."""


def read_peft(
    path: str, projections: Mapping[str, Projection], num_layers: int, max_rank: int
) -> PeftAdapter:
    """Read and validate an adapter for a model of these projections.

    Raises `InvalidRequestError`, naming the path and what is wrong with it.
    """
    folder = Path(path)
    try:
        config_bytes = _read(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
        config = msgspec.json.decode(config_bytes, type=PeftConfig)
        config.check(max_rank)
        sizes = [sum(projection.slot.shape) for projection in projections.values()]
        most = num_layers * sum(sizes) * config.r * torch.float32.itemsize + MAX_HEADER_BYTES
        tensor_bytes = _read(folder / TENSOR_FILE, most)
        pairs = _pair(safetensors.torch.load(tensor_bytes), projections, num_layers, config.r)
    except (OSError, ValueError, SafetensorError, *UNREADABLE) as exc:
        raise InvalidRequestError(f"adapter {path}: {exc}", param="lora_path") from exc
    content = hashlib.blake2b(config_bytes, digest_size=16)
    content.update(tensor_bytes)
    return PeftAdapter(config.scale, pairs, content.hexdigest())


def _read(path: Path, most: int) -> bytes:
    """All of a file that must not be larger than `most` bytes."""
    require_ordinary(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    return content


def _pair(
    tensors: Mapping[str, Tensor], projections: Mapping[str, Projection], num_layers: int, rank: int
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        if match is None or match[2] not in projections or int(match[1]) >= num_layers:
            raise ValueError(f"tensor {name} has no place in this model")
        projection = projections[match[2]]
        num_outputs, num_inputs = projection.slot.shape
        shape = (rank, num_inputs) if match[3] == "A" else (num_outputs, rank)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not floats {list(shape)}"
            )
        if not tensor.float().isfinite().all():
            raise ValueError(f"tensor {name} has values that are no finite numbers")
        halves.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    for (layer, module), sides in halves.items():
        if len(sides) != 2:
            raise ValueError(f"layer {layer}, {module}: lora_A and lora_B belong together")
    if not halves:
        raise ValueError("there are no tensors in it")
    return {place: (sides["A"], sides["B"]) for place, sides in halves.items()}
