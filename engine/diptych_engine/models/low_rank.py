"""Low-rank changes of a model's projections: LoRA (Hu et al., 2021) on fused weights.

Each row of a batch may use another adapter, or none. The rows of one adapter are gathered,
multiplied by its two thin matrices, and added to the output of the projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class LowRank:
    """Adds `x @ down @ up` to a fused projection.

    The fused parts are side by side in `down` and on a diagonal of blocks in `up`, so that two
    products compute all of them.
    """

    down: Tensor
    """[in, sum of the parts' ranks]."""
    up: Tensor
    """[sum of the parts' ranks, out]; it includes the adapter's scale."""


@dataclass(slots=True, frozen=True)
class AdapterRows:
    """One adapter's share of a step."""

    lora_int_id: int
    layers: Sequence[Mapping[str, LowRank]]
    """For each layer, by the name of the fused projection."""
    rows: Tensor | None
    """[n] int64: the step's tokens that use this adapter; None: all of them."""


def add_low_rank(
    out: Tensor, x: Tensor, adapters: Sequence[AdapterRows], layer: int, fused: str
) -> None:
    """Add the adapters' changes to `out` [tokens, out], a projection of `x` [tokens, in]."""
    for adapter in adapters:
        change = adapter.layers[layer].get(fused)
        if change is None:
            continue
        if adapter.rows is None:
            out.addmm_(x.mm(change.down), change.up)
        else:
            own = x.index_select(0, adapter.rows)
            out.index_add_(0, adapter.rows, own.mm(change.down).mm(change.up))
