"""Low-rank changes of a model's projections: LoRA (Hu et al., 2021) on fused weights.

The rows of a batch may each want another adapter, or none. The rows of one adapter are gathered,
multiplied by its two thin matrices, and added to what the projection itself made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class LowRank:
    """Adds `x @ down @ up` to a fused projection.

    The fused parts lie side by side in `down` and on a diagonal of blocks in `up`, so that all of
    them take two products.
    """

    down: Tensor
    """[in, ranks of the parts together]."""
    up: Tensor
    """[ranks of the parts together, out]; the adapter's scale is in it."""


@dataclass(slots=True, frozen=True)
class AdapterRows:
    """One adapter's share of a step."""

    lora_int_id: int
    layers: Sequence[Mapping[str, LowRank]]
    """Per layer, by the name of the fused projection."""
    rows: Tensor | None
    """[n] int64: the step's tokens that want this adapter; None: all of them."""


def add_low_rank(
    out: Tensor, x: Tensor, adapters: Sequence[AdapterRows], layer: int, fused: str
) -> None:
    """Change `out` [tokens, out], a projection of `x` [tokens, in], as the adapters want it."""
    for adapter in adapters:
        change = adapter.layers[layer].get(fused)
        if change is None:
            continue
        if adapter.rows is None:
            out.addmm_(x.mm(change.down), change.up)
        else:
            own = x.index_select(0, adapter.rows)
            out.index_add_(0, adapter.rows, own.mm(change.down).mm(change.up))
