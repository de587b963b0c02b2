"""A fused projection: its weight, and perhaps a packed copy of it for the tokens that it suits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych_engine.models.packed import PackedMatrix

REFINED: Final = 16
"""The most likely tokens of each row, whose logits are computed again."""


SPAN: Final = 64
"""Logits that are looked at together."""


@dataclass(slots=True)
class Linear:
    """x [rows, in] -> [rows, out]. The first `num_packed` rows go through the packed copy, if
    there is one."""

    weight: Tensor
    """[in, out]."""
    packed: PackedMatrix | None = None

    def product(self, x: Tensor, num_packed: int) -> Tensor:
        """[rows, out] of x's type."""
        packed = self.packed
        if packed is None or num_packed == 0:
            return x.mm(self.weight)
        if num_packed == len(x):
            return packed.product(x).to(x.dtype)
        out = x.new_empty(len(x), self.weight.shape[1])
        out[:num_packed] = packed.product(x[:num_packed])
        torch.mm(x[num_packed:], self.weight, out=out[num_packed:])
        return out

    def add_product_(self, sums: Tensor, x: Tensor, num_packed: int) -> None:
        """sums [rows, out] += x @ weight."""
        packed = self.packed
        if packed is None or num_packed == 0:
            sums.addmm_(x, self.weight)
        elif num_packed == len(x):
            sums.add_(packed.product(x))
        else:
            sums[:num_packed].add_(packed.product(x[:num_packed]))
            sums[num_packed:].addmm_(x[num_packed:], self.weight)


def refine_(logits: Tensor, x: Tensor, rows: Tensor) -> None:
    """Compute the largest logits again in x's type.

    Between large numbers bfloat16 has steps of 1/16: as logits they would be ties, or fall to
    either side when a few bits differ in x.

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
