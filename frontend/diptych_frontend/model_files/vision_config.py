"""The shape of a model's vision tower, and how images are prepared for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

MAX_VISION_SIZE: Final = 1 << 16
"""Larger than any dimension of a real vision tower."""
MAX_TILES_PER_EDGE: Final = 16
FILTERS: Final = (1, 2, 3)
"""Pillow's numbers of the resampling filters that processors name: Lanczos, bilinear, bicubic."""


class VisionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tower in the manner of SigLIP with a pixel-shuffling connector, under Hugging Face's names.

    An image becomes square tiles of `image_size` pixels, and each tile becomes `tokens_per_tile`
    rows that replace the embeddings of as many image tokens.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    """The pixels of a tile's edge."""
    patch_size: int
    scale_factor: int
    """The connector makes one row of a square of this many by this many patches."""
    image_token_id: int
    layer_norm_eps: float = 1e-6
    longest_edge: int = 0
    """Pixels to which the longer edge of an image is resized before it is cut into tiles."""
    splits: bool = True
    """A large image becomes several tiles and a small copy of the whole; others, one tile."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """For each channel, on a scale from 0 to 1."""
    resample: int = 1
    """One of `FILTERS`."""

    @property
    def patches_per_edge(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        return (self.patches_per_edge // self.scale_factor) ** 2

    def fault(self) -> str | None:
        """What is wrong with the numbers; None if nothing is."""
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "image_size", "patch_size", "scale_factor", "longest_edge",
        ):  # fmt: skip
            if not 1 <= getattr(self, name) <= MAX_VISION_SIZE:
                return f"{name} of the vision tower is {getattr(self, name)}"
        if self.hidden_size % self.num_attention_heads:
            return f"{self.num_attention_heads} heads do not divide the vision tower evenly"
        if self.image_size < self.patch_size or self.patches_per_edge % self.scale_factor:
            return (
                f"tiles of {self.image_size} pixels do not make squares of {self.scale_factor} by "
                f"{self.scale_factor} patches of {self.patch_size} pixels"
            )
        if self.longest_edge > MAX_TILES_PER_EDGE * self.image_size:
            return f"images of {self.longest_edge} pixels have too many tiles"
        if self.resample not in FILTERS:
            return f"the resampling filter {self.resample}"
        if min(self.std) <= 0 or self.layer_norm_eps <= 0:
            return "the standard deviations and layer_norm_eps of the vision tower must be positive"
        return None


class LongestEdge(msgspec.Struct):
    longest_edge: int


class HFVisionConfig(msgspec.Struct):
    """`vision_config` of config.json; other keys are ignored. Files omit defaults."""

    hidden_size: int = 1152
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6


class HFSeeingConfig(msgspec.Struct):
    """The keys of config.json beside its `text_config`."""

    vision_config: HFVisionConfig = msgspec.field(default_factory=HFVisionConfig)
    scale_factor: int = 2
    image_token_id: int = 128257


class HFImageProcessor(msgspec.Struct):
    """The part of preprocessor_config.json that is used."""

    size: LongestEdge | None = None
    max_image_size: LongestEdge | None = None
    do_image_splitting: bool = True
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: int = 1


def vision_from_hf(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionConfig:
    """Return the configuration from config.json and preprocessor_config.json (empty without).

    Raises `msgspec.ValidationError` for other types, and `ValueError` for what is not supported.
    """
    config = msgspec.convert(raw, HFSeeingConfig)
    tower = config.vision_config
    wanted = msgspec.convert(processor, HFImageProcessor)
    tile = tower.image_size
    if tower.hidden_act != "gelu_pytorch_tanh" or tower.num_channels != 3:
        raise ValueError(
            f"a vision tower with {tower.num_channels} channels and {tower.hidden_act!r}, not 3 "
            "and gelu_pytorch_tanh"
        )
    if wanted.max_image_size is not None and wanted.max_image_size.longest_edge != tile:
        raise ValueError(
            f"max_image_size {wanted.max_image_size.longest_edge} of preprocessor_config.json is "
            f"not the vision tower's image_size {tile}"
        )
    scales = wanted.do_rescale and abs(wanted.rescale_factor - 1 / 255) < 1e-6
    if not (wanted.do_resize and wanted.do_normalize and scales):
        raise ValueError("an image processor that does not resize, rescale by 1/255 and normalise")
    return VisionConfig(
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_hidden_layers=tower.num_hidden_layers,
        num_attention_heads=tower.num_attention_heads,
        image_size=tile,
        patch_size=tower.patch_size,
        scale_factor=config.scale_factor,
        image_token_id=config.image_token_id,
        layer_norm_eps=tower.layer_norm_eps,
        longest_edge=4 * tile if wanted.size is None else wanted.size.longest_edge,
        splits=wanted.do_image_splitting,
        mean=wanted.image_mean,
        std=wanted.image_std,
        resample=wanted.resample,
    )
