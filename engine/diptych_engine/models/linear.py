"""A fused projection: its weight, plain or packed; and the gate between those of an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych_engine.models.packed import PackedMatrix
from diptych_frontend.model_files.family_spec import Gate
from diptych_kernels.native.tile_layout import WORD_BITS
from diptych_kernels.silu_mul import silu_mul

LIMIT: Final = 7.0
SLOPE: Final = 1.702
"""The constants of gpt-oss's gate."""


@dataclass(slots=True)
class Linear:
    """x [rows, in] -> [rows, out], with the packed matrix if there is one.

    The first `num_decodes` of the rows are decodes.
    """

    weight: Tensor
    """[in, out]. Without memory while `packed` replaces it; views of it stay valid."""
    packed: PackedMatrix | None = None
    input_bits: int = WORD_BITS
    """What products with a packed matrix round x to on a CPU: 16 bits or 8."""

    def release(self) -> None:
        """Have no memory until the weight is packed or unpacked; views of it stay valid."""
        self.weight.untyped_storage().resize_(0)

    @property
    def memory(self) -> Tensor:
        """The tensor with which products are computed."""
        return self.weight if self.packed is None else self.packed.tiles

    def values(self) -> Tensor:
        """Return [in, out]: the weight, or a copy of it made from the packed matrix."""
        return self.weight if self.packed is None else self.packed.values().t()

    def pack(self, packed: PackedMatrix) -> None:
        """Use this packed matrix from now on."""
        self.packed = packed
        self.release()

    def unpack(self) -> None:
        """Use the plain weight from now on. If memory runs out, it stays packed."""
        if not self.weight.untyped_storage().nbytes():
            self.weight.untyped_storage().resize_(self.weight.nbytes)
        if self.packed is not None:
            self.weight.copy_(self.packed.values().t())
        self.packed = None

    def columns(self, numbers: Tensor) -> Tensor:
        """[n] int64 -> [n, in]: of an output matrix, the embeddings of tokens."""
        if self.packed is None:
            return self.weight.t().index_select(0, numbers)
        return self.packed.rows(numbers)

    def product(self, x: Tensor, num_decodes: int) -> Tensor:
        """Return [rows, out] of x's type."""
        if self.packed is None:
            return x.mm(self.weight)
        return self.packed.product(x, num_decodes, self.input_bits)

    def add_product_(self, sums: Tensor, x: Tensor, num_decodes: int) -> None:
        """sums [rows, out] += x @ weight."""
        if self.packed is None:
            sums.addmm_(x, self.weight)
        else:
            self.packed.add_product_(sums, x, num_decodes, self.input_bits)


def gated(gate_up: Tensor, kind: Gate) -> Tensor:
    """`gate_up` [tokens, 2 n] holds the gate in its first half -> [tokens, n]."""
    if kind == "silu":
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if kind == "clamped":
        gate = gate.clamp(max=LIMIT)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(up.clamp(-LIMIT, LIMIT).add_(1.0))
    assert_never(kind)
