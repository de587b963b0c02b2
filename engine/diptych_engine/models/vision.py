"""A vision tower in the manner of SigLIP, and the connector between it and a decoder.

The names of modules and parameters are those of the published tensors. N tiles, P patches of a
tile, C the tower's hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from diptych_frontend.model_files.vision_config import VisionConfig

TILES_AT_ONCE: Final = 8
"""A larger image is computed in parts, to limit the memory of the inner layers."""


class Embeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            3, config.hidden_size, config.patch_size, stride=config.patch_size
        )
        self.position_embedding = nn.Embedding(config.patches_per_edge**2, config.hidden_size)

    def forward(self, pixels: Tensor, places: Tensor) -> Tensor:
        """[N, 3, edge, edge] and the place of each patch -> [N, P, C]."""
        patches: Tensor = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        positions: Tensor = self.position_embedding(places)
        return patches + positions


class Attention(nn.Module):
    """Attention in which every patch of a tile sees all of them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self._heads = config.num_attention_heads
        self.q_proj, self.k_proj = nn.Linear(size, size), nn.Linear(size, size)
        self.v_proj, self.out_proj = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class Encoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))


class VisionModel(nn.Module):
    """Tiles to hidden states."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixels: Tensor, places: Tensor) -> Tensor:
        """[N, 3, edge, edge] -> [N, P, C]."""
        hidden = self.embeddings(pixels, places)
        for layer in self.encoder.layers:
            hidden = layer(hidden)
        out: Tensor = self.post_layernorm(hidden)
        return out


class Projection(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)
        return out


class Connector(nn.Module):
    """Joins squares of patches into one row each, and projects the rows to the decoder's hidden
    size."""

    def __init__(self, config: VisionConfig, outer: int) -> None:
        super().__init__()
        self._edge, self._factor = config.patches_per_edge, config.scale_factor
        self.modality_projection = Projection(config.hidden_size * config.scale_factor**2, outer)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, P, C] -> [N, tokens of a tile, hidden]."""
        factor, squares = self._factor, self._edge // self._factor
        split = patches.view(len(patches), squares, factor, squares, factor, -1)
        rows = split.transpose(2, 3).reshape(len(patches), squares * squares, -1)
        out: Tensor = self.modality_projection(rows)
        return out


class Sight(nn.Module):
    """Turns pixels into rows that replace the embeddings of image tokens."""

    def __init__(
        self, config: VisionConfig, outer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """The weights are undefined. outer: the decoder's hidden size."""
        super().__init__()
        with torch.device("meta"):  # undefined weights need not be initialised first
            self.vision_model = VisionModel(config)
            self.connector = Connector(config, outer)
        self.requires_grad_(False).to(dtype=dtype).to_empty(device=device)
        self._dtype = dtype
        self._places = patch_places(config.patches_per_edge).to(device)
        scale = [channel * 255 for channel in config.std]
        shift = [mean / std for mean, std in zip(config.mean, config.std, strict=True)]
        self._scale = torch.tensor(scale, device=device).view(3, 1, 1)
        self._shift = torch.tensor(shift, device=device).view(3, 1, 1)

    def forward(self, tiles: Tensor) -> Tensor:
        """[N, 3, edge, edge] uint8 -> [N * tokens of a tile, hidden] of the model's type."""
        parts = [self._encode(part) for part in torch.split(tiles, TILES_AT_ONCE)]
        return torch.cat(parts).flatten(0, 1)

    def _encode(self, tiles: Tensor) -> Tensor:
        pixels = (tiles.to(self._scale.device) / self._scale - self._shift).to(self._dtype)
        out: Tensor = self.connector(self.vision_model(pixels, self._places))
        return out


def patch_places(edge: int) -> Tensor:
    """Return [edge * edge] int64: the position embedding for each patch of a tile.

    The published models compute positions by comparing fractions in float32. Rounding moves some of
    them by one, and models are trained with that.
    """
    bounds = torch.arange(1 / edge, 1.0, 1 / edge)
    fractions = torch.arange(edge, dtype=torch.float32) * (1.0 / torch.tensor(edge))
    along = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), bounds, right=True)
    return (along[:, None] * edge + along).flatten()
