"""Divides a model's layers into groups of one size, each with KV blocks of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diptych_engine.scheduling.kv_groups import ONE_GROUP, KVGroups
from diptych_frontend.model_files.model_source import ModelConfig
from diptych_kv_transfer.memory.layout import KVGroup

MAX_GROUPS: Final = 8
"""A step prepares attention for each group. Gemma 3 has seven."""
MOST_PLACES: Final = 1.25
"""Groups may have places for this many times the layers. What is empty in the last group of a
window costs memory in short contexts, which windows save in longer ones."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which layers of a model share KV blocks."""

    windows: tuple[int | None, ...]
    """The window of each group; groups without one come first."""
    num_layers: int
    """How many layers each group has place for."""
    places: tuple[tuple[int, int], ...]
    """The group of each layer, and its place among the group's layers."""

    def kv_groups(self, block_size: int, step_tokens: int) -> KVGroups:
        """Return what the groups keep of a request."""
        if self.windows == (None,):
            return ONE_GROUP
        groups = tuple(KVGroup(block_size, window) for window in self.windows)
        return KVGroups(groups, step_tokens)

    @property
    def group_of(self) -> tuple[int, ...]:
        """The group of each layer."""
        return tuple(group for group, _ in self.places)


def one_group(model: ModelConfig) -> LayerGroups:
    """Return all layers as a group that keeps all."""
    places = tuple((0, layer) for layer in range(model.num_hidden_layers))
    return LayerGroups((None,), len(places), places)


def divided(model: ModelConfig) -> LayerGroups:
    """Return groups of the layers of one window each, or one group if they would waste memory.

    A group has as many layers as the rarest window (vLLM divides them in the same way).
    """
    kinds: dict[int | None, list[int]] = {}
    for layer in range(model.num_hidden_layers):
        kinds.setdefault(_narrow(model, layer), []).append(layer)
    size = min(map(len, kinds.values()))
    groups = list(_cut(kinds, size))
    num_places = len(groups) * size
    if len(groups) > MAX_GROUPS or num_places > MOST_PLACES * model.num_hidden_layers:
        return one_group(model)
    place_of = {
        layer: (number, place)
        for number, (_, layers) in enumerate(groups)
        for place, layer in enumerate(layers)
    }
    places = tuple(place_of[layer] for layer in sorted(place_of))
    return LayerGroups(tuple(window for window, _ in groups), size, places)


def _narrow(model: ModelConfig, layer: int) -> int | None:
    """A layer's window, unless all contexts fit in it."""
    window = model.window_of(layer)
    return window if window is not None and window < model.max_position_embeddings else None


def _cut(kinds: dict[int | None, list[int]], size: int) -> Iterator[tuple[int | None, list[int]]]:
    for window in sorted(kinds, key=lambda window: window or 0):
        layers = kinds[window]
        for first in range(0, len(layers), size):
            yield window, layers[first : first + size]
