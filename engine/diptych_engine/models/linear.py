"""A fused projection: its weight, and perhaps a packed copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from diptych_engine.models.packed import PackedMatrix

REFINED: Final = 16
"""The most likely tokens of each row, whose logits are computed again."""


SPAN: Final = 64
"""Logits that are looked at together."""


@dataclass(slots=True)
class Linear:
    """x [rows, in] -> [rows, out], by the packed copy if there is one.

    The first `num_decodes` of the rows are decodes.
    """

    weight: Tensor
    """[in, out]."""
    packed: PackedMatrix | None = None

    def product(self, x: Tensor, num_decodes: int) -> Tensor:
        """[rows, out] of x's type."""
        if self.packed is None:
            return x.mm(self.weight)
        return self.packed.product(x, num_decodes)

    def add_product_(self, sums: Tensor, x: Tensor, num_decodes: int) -> None:
        """sums [rows, out] += x @ weight."""
        if self.packed is None:
            sums.addmm_(x, self.weight)
        else:
            self.packed.add_product_(sums, x, num_decodes)


def refine_(logits: Tensor, x: Tensor, rows: Tensor) -> None:
    """Compute the largest logits again in x's type.

    The packed product rounds x to 8 bits: nearly equal logits would change places.

    logits: [n, vocabulary]. x: [n, hidden]. rows: [vocabulary, hidden].
    """
    best = largest(logits, min(REFINED, logits.shape[1]))
    logits.scatter_(1, best, rows[best].bmm(x[:, :, None]).squeeze(2))


def largest(logits: Tensor, count: int) -> Tensor:
    """[n, count] int64: the places of each row's largest logits, in any order.

    `topk` alone takes a millisecond for a row of 49,152. The largest ones lie in the spans with the
    largest maxima, which are quickly found.
    """
    rows, vocabulary = logits.shape
    if vocabulary % SPAN or vocabulary < SPAN * count:
        return logits.topk(count, sorted=False).indices
    spans = logits.view(rows, -1, SPAN)
    near = spans.amax(2).topk(count, sorted=False).indices
    candidates = spans.gather(1, near[..., None].expand(-1, -1, SPAN)).view(rows, -1)
    found = candidates.topk(count, sorted=False).indices
    return near.gather(1, found // SPAN) * SPAN + found % SPAN
