"""Quantised matrices of safetensors, as FP8, AWQ, GPTQ and compressed-tensors store them.

A matrix is several tensors: numbers, scales, and perhaps zero points. Here they become floats of 8
bits, or levels around one zero, both of which products read as they are: nothing is rounded. A
matrix that has no such form is computed in floats.

Layouts: AutoAWQ's `gemm`, AutoGPTQ's and GPTQModel's, compressed-tensors' `pack-quantized`,
`int-quantized` and `float-quantized`, and DeepSeek's blockwise FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from diptych_engine.models.groups import Floats, Groups
from diptych_engine.models.stored_parts import WHOLE, Piece, ReadOnce, StoredTensor
from diptych_frontend.model_files.quantization import Quantization
from diptych_kernels.native.tile_layout import GROUP
from diptych_protocol import InvalidRequestError

FLOATS: Final = ("F64", "F32", "BF16", "F16")
TYPES: Final = {
    "weight": ("F8_E4M3", "I8"), "weight_scale": FLOATS, "weight_scale_inv": FLOATS,
    "weight_packed": ("I32",), "weight_shape": ("I64", "I32"), "weight_zero_point": ("I32", "I8"),
    "weight_g_idx": ("I32",), "qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS,
    "g_idx": ("I32", "I64"),
}  # fmt: skip
"""How the names of a matrix's tensors end, and which types they may have."""
WORDS: Final = {"qweight", "qzeros", "scales"}
ENDS: Final[Mapping[str, set[str]]] = {
    "fp8": {"weight", "weight_scale", "weight_scale_inv"},
    "awq": WORDS,
    "gptq": WORDS | {"g_idx"},
    "compressed-tensors": {
        "weight", "weight_scale", "weight_packed", "weight_shape", "weight_zero_point",
        "weight_g_idx",
    },
}  # fmt: skip
"""Those of each method."""
UNUSED: Final = {
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale", "k_scale",
    "v_scale", "kv_scale",
}  # fmt: skip
"""They say how products and KV might be rounded beside, and are not."""
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of 8 columns is in an int32."""
CENTRES: Final = {4: 8, 8: 128}
"""Sizes of levels around one zero, in bits, and the level that stands for 0."""
WORD: Final = 32
ONE: Final = ((), (1,))
"""Shapes of what a whole matrix shares."""


@dataclass(slots=True, frozen=True)
class _Levels:
    """The values `(level - zero) * scale`."""

    levels: Tensor
    """[out, in] int16."""
    zeros: Tensor
    """[out, groups] int16."""
    scale: Tensor
    """[out, groups] float32."""
    group_of: Tensor | None = None
    """[in]: the group of each column, if they are not in order."""

    def values(self) -> Tensor:
        if self.group_of is not None:
            zeros, scale = self.zeros[:, self.group_of], self.scale[:, self.group_of]
            return (self.levels - zeros).float().mul_(scale)
        groups = self._around_zero().float().mul_(self.scale[..., None])
        return groups.view(self.levels.shape)

    def _around_zero(self) -> Tensor:
        return self.levels.view(*self.scale.shape, -1) - self.zeros[..., None]

    def groups(self) -> Groups | None:
        """The same with one zero for all, so that float16 holds the offsets, too."""
        columns, count = self.levels.shape[1], self.scale.shape[1]
        if self.group_of is not None or columns // count % GROUP:
            return None
        levels = self._around_zero().view(self.levels.shape)
        low, high = int(levels.min()), int(levels.max())
        for bits, centre in CENTRES.items():
            exact = torch.equal((self.scale * centre).half().float(), self.scale * centre)
            exact = exact and torch.equal(self.scale.half().float(), self.scale)
            if exact and -centre <= low and high < centre:
                scale = self.scale.repeat_interleave(columns // GROUP // count, 1)
                return Groups((levels + centre).to(torch.uint8), scale, scale * -centre, bits)
        return None


@dataclass(slots=True, frozen=True)
class QuantisedTensor:
    """A matrix of several tensors; see `loader.Stored`."""

    quantization: Quantization
    module: str
    parts: Mapping[str, StoredTensor]
    """By the ends of their names."""
    piece: Piece = WHOLE
    """Which of the rows."""
    whole: ReadOnce = field(default_factory=ReadOnce)

    @property
    def recipe(self) -> object:
        parts = [(end, part.recipe) for end, part in sorted(self.parts.items())]
        return self.quantization, self.module, parts, self.piece

    @property
    def nbytes(self) -> int:
        whole = sum(part.nbytes for part in self.parts.values())
        return whole * self.shape[0] // max(1, self.whole_shape[0])

    @property
    def is_packable(self) -> bool:
        return self.shape[1] % GROUP == 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape_in(self.whole_shape)

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Raises `InvalidRequestError`, naming a tensor, if there is none, or it does not fit."""
        for end, part in sorted(self.parts.items()):
            if end not in ENDS[self.quantization.method]:
                raise self._unusable(end, f"does not belong to {self.quantization.method}")
            is_fp8 = self.quantization.method == "fp8" and end == "weight"
            known = ("F8_E4M3",) if is_fp8 else TYPES[end]
            if part.dtype not in known:
                raise self._unusable(end, f"has the type {part.dtype}, not {' or '.join(known)}")
        if self.quantization.needs:
            self._stored(self.quantization.needs)
        if self._is_float:
            rows, columns = self._sizes("weight")
            scale = self._scale_end
            allowed: tuple[tuple[int, ...], ...] = (
                *ONE, (rows,), (rows, 1), self._blocks(rows, columns)
            )  # fmt: skip
            self._expect(scale, *allowed)
            return rows, columns
        if self.quantization.method in ("awq", "gptq"):
            return self._shape_of_words()
        return self._shape_of_compressed()

    def at(self, piece: Piece) -> QuantisedTensor:
        self.whole.expect(self.module)
        return replace(self, piece=piece)

    def part(self) -> Floats | Groups | Tensor:
        whole = self.whole.get(self.module, self._whole)
        if isinstance(whole, Tensor):
            return self.piece.of(whole)
        if not self.piece.index:
            return whole
        return whole.rows(self.piece.of(torch.arange(self.whole_shape[0])))

    def _whole(self) -> Floats | Groups | Tensor:
        """With all its rows; float32 if it cannot be packed."""
        if not self._is_float:
            levels = self._levels()
            groups = levels.groups() if self.is_packable else None
            return levels.values() if groups is None else groups
        if self.is_packable:
            return Floats(self._read("weight"), self._scale_for(GROUP))
        return self._read("weight").float().mul_(self._scale_for(1))

    # --- 8-bit floats -------------------------------------------------------------------------

    @property
    def _is_float(self) -> bool:
        return "weight" in self.parts and self.parts["weight"].dtype == "F8_E4M3"

    @property
    def _scale_end(self) -> str:
        return "weight_scale_inv" if "weight_scale_inv" in self.parts else "weight_scale"

    def _blocks(self, rows: int, columns: int) -> tuple[int, int]:
        high, wide = self.quantization.block
        return -(-rows // high), -(-columns // wide)

    def _scale_for(self, span: int) -> Tensor:
        """[out, in / span] float32."""
        rows, columns = self.whole_shape
        scale = self._scales(self._scale_end)
        blocks = self._blocks(rows, columns)
        if tuple(scale.shape) == blocks and blocks[0] != rows:
            high, wide = self.quantization.block
            scale = scale.repeat_interleave(high, 0)[:rows]
            return scale.repeat_interleave(wide // span, 1)[:, : columns // span].contiguous()
        return scale.reshape(-1, 1).expand(rows, columns // span).contiguous()

    # --- levels -------------------------------------------------------------------------------

    def _shape_of_words(self) -> tuple[int, int]:
        """Several numbers in each int32, of inputs (GPTQ) or outputs (AWQ)."""
        of_word = WORD // self.quantization.bits
        high, wide = self._sizes("qweight")
        is_awq = self.quantization.method == "awq"
        columns, rows = (high, wide * of_word) if is_awq else (high * of_word, wide)
        groups, _ = self._sizes("scales")
        self._expect_groups("scales", groups, columns, may_cut="g_idx" in self.parts)
        self._expect("scales", (groups, rows))
        self._expect("qzeros", (groups, -(-rows // of_word)))
        if "g_idx" in self.parts:
            self._expect("g_idx", (columns,))
        return rows, columns

    def _shape_of_compressed(self) -> tuple[int, int]:
        if "weight_packed" in self.parts:
            self._expect("weight_shape", (2,))
            rows, columns = (int(size) for size in self._read("weight_shape"))
            self._expect("weight_packed", (rows, -(-columns * self.quantization.bits // WORD)))
        else:
            rows, columns = self._sizes("weight")
        if "weight_g_idx" in self.parts:
            raise self._unusable("weight_g_idx", "sorts the inputs by activations (actorder)")
        packs = "weight_packed" in self.parts
        if not packs and self._stored("weight_scale").shape in ONE:
            if "weight_zero_point" in self.parts:
                self._expect("weight_zero_point", *ONE)
            return rows, columns
        _, groups = self._sizes("weight_scale")
        self._expect_groups("weight_scale", groups, columns)
        self._expect("weight_scale", (rows, groups))
        if "weight_zero_point" in self.parts:
            high = -(-rows * self.quantization.bits // WORD) if packs else rows
            self._expect("weight_zero_point", (high, groups))
        return rows, columns

    def _levels(self) -> _Levels:
        match self.quantization.method:
            case "awq":
                return self._awq()
            case "gptq":
                return self._gptq()
            case _:
                return self._compressed()

    def _awq(self) -> _Levels:
        order = torch.tensor(AWQ_ORDER)
        levels, zeros = (
            unpacked(words, 4).view(*words.shape, len(order))[..., order].flatten(-2).t()
            for words in map(self._read, ("qweight", "qzeros"))
        )
        scale = self._scales("scales").t()
        return _Levels(levels.contiguous(), zeros.contiguous(), scale.contiguous())

    def _gptq(self) -> _Levels:
        bits = self.quantization.bits
        levels = unpacked(self._read("qweight").t(), bits)
        # It was taken from whole words: a zero point of 0 has borrowed from the next.
        shift = sum(self.quantization.zero_shift << bit for bit in range(0, WORD, bits))
        zeros = unpacked(self._read("qzeros") + shift, bits).t()[: levels.shape[0]].contiguous()
        scale = self._scales("scales").t().contiguous()
        group_of = None
        if "g_idx" in self.parts:
            group_of = self._read("g_idx").long()
            in_order = torch.arange(len(group_of)) // -(-len(group_of) // scale.shape[1])
            if len(group_of) % scale.shape[1] or not torch.equal(group_of, in_order):
                if not 0 <= int(group_of.min()) <= int(group_of.max()) < scale.shape[1]:
                    raise self._unusable("g_idx", "names groups that are not there")
                return _Levels(levels, zeros, scale, group_of)
        return _Levels(levels, zeros, scale)

    def _compressed(self) -> _Levels:
        rows, columns = self.whole_shape
        scale, bits = self._scales("weight_scale"), self.quantization.bits
        if scale.dim() <= 1:
            scale = scale.reshape(1, 1).expand(rows, 1).contiguous()
        packs = "weight_packed" in self.parts
        middle = 1 << (bits - 1) if packs else 0
        zeros = torch.full(scale.shape, middle, dtype=torch.int16)
        if "weight_zero_point" in self.parts:
            stored = self._read("weight_zero_point")
            if packs:
                zeros = unpacked(stored.t(), bits).t()[:rows].contiguous()
            else:
                zeros = stored.to(torch.int16).reshape(-1, scale.shape[1]).expand_as(scale)
        if packs:
            levels = unpacked(self._read("weight_packed"), bits)[:, :columns].contiguous()
        else:
            levels = self._read("weight").to(torch.int16)
        return _Levels(levels, zeros, scale)

    # --- tensors ------------------------------------------------------------------------------

    def _read(self, end: str) -> Tensor:
        return self._stored(end).values()

    def _scales(self, end: str) -> Tensor:
        scales = self._read(end).float()
        if not scales.isfinite().all():
            raise self._unusable(end, "has numbers that are not finite")
        return scales

    def _stored(self, end: str) -> StoredTensor:
        found = self.parts.get(end)
        if found is None:
            raise self._unusable(end, "is missing")
        return found

    def _sizes(self, end: str) -> tuple[int, int]:
        shape = self._stored(end).shape
        if len(shape) != 2:
            raise self._unusable(end, f"has the shape {list(shape)}, which is no matrix")
        return shape[0], shape[1]

    def _expect(self, end: str, *shapes: tuple[int, ...]) -> None:
        found = self._stored(end).shape
        if found not in shapes:
            known = " or ".join(str(list(shape)) for shape in shapes)
            raise self._unusable(end, f"has the shape {list(found)}, not {known}")

    def _expect_groups(self, end: str, groups: int, columns: int, *, may_cut: bool = False) -> None:
        """may_cut: the last group may have fewer columns than the others."""
        size = self.quantization.group
        wanted = -(-columns // size) if size > 0 else 1 if size else groups
        if not groups or groups != wanted or (columns % groups and not may_cut):
            said = f", and config.json says {size} inputs a group" if size > 0 else ""
            raise self._unusable(end, f"has {groups} groups for {columns} inputs{said}")

    def _unusable(self, end: str, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"model weights: tensor {self.module}.{end} {what}; download it again, or take the "
            "model's unquantised files",
            param="model",
        )


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 -> [..., n * 32 / bits] int16: the lowest bits of a word come first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).to(torch.int16)


def gather_quantised(
    stored: Mapping[str, StoredTensor], quantization: Quantization
) -> Iterator[tuple[str, StoredTensor | QuantisedTensor]]:
    """Yield the tensors of a quantised model by the names that they would have if it were not;
    some are several in the files."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, end = name.rpartition(".")
        if end in TYPES:
            modules.setdefault(module, {})[end] = tensor
        elif end not in UNUSED:
            yield name, tensor
    for module, parts in modules.items():
        plain = parts.get("weight")
        if plain is not None and plain.dtype in FLOATS and len(parts) == 1:
            yield f"{module}.weight", plain
        else:
            yield f"{module}.weight", QuantisedTensor(quantization, module, parts)
