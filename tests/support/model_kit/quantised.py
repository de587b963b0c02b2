"""Blocks of a GGUF file's quantised types, also of those that the `gguf` package reads only.

The levels are the nearest ones, without llama.cpp's search for the best scales. Block layouts:
ggml-common.h of ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import IQ4_NL
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]
CURVE: Final = np.array(IQ4_NL.kvalues, np.float32)


def quantise(values: Values, kind: Kind) -> Bytes:
    """[rows, columns] -> [rows, bytes], as llama.cpp's converter writes them."""
    own = _BLOCKS.get(kind)
    if own is None:
        plain: Bytes = gguf.quants.quantize(values, kind)
        return plain
    blocks = values.reshape(-1, gguf.GGML_QUANT_SIZES[kind][0])
    return own(blocks).reshape(len(values), -1)


def _half(numbers: Values) -> Bytes:
    return numbers.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _rounded_half(numbers: Values) -> Values:
    return numbers.astype(np.float16).astype(np.float32)


def _inverse(numbers: Values) -> Values:
    return np.divide(1, numbers, out=np.zeros_like(numbers), where=numbers != 0)


def _joined(parts: NDArray[Any]) -> Bytes:
    """[blocks, n, 2, size] levels of 4 bits -> [blocks, n * size]."""
    joined: Bytes = (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(parts), -1)
    return joined


def _with_minima(blocks: Values, largest: int) -> tuple[Bytes, Bytes]:
    """The factors of Q4_K and Q5_K, and the levels of 32 weights, 0 to `largest`."""
    x = blocks.reshape(-1, 8, 32)
    minimum = np.maximum(-x.min(2), 0)
    scale = (x.max(2) + minimum) / largest
    d, dm = (_rounded_half(each.max(1, keepdims=True) / 63) for each in (scale, minimum))
    scales, minima = (
        np.clip(np.round(each * _inverse(own)), 0, 63).astype(np.uint8)
        for each, own in ((scale, d), (minimum, dm))
    )
    own_scale, own_minimum = (d * scales)[..., None], (dm * minima)[..., None]
    levels = np.clip(np.round((x + own_minimum) * _inverse(own_scale)), 0, largest)
    packed = [
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
    ]
    return np.hstack([_half(d), _half(dm), *packed]), levels.astype(np.uint8)


def _q4_k(blocks: Values) -> Bytes:
    factors, levels = _with_minima(blocks, 15)
    return np.hstack([factors, _joined(levels.reshape(-1, 4, 2, 32))])


def _q5_k(blocks: Values) -> Bytes:
    factors, levels = _with_minima(blocks, 31)
    fifth = np.packbits(levels >> 4, axis=1, bitorder="little")[:, 0]
    return np.hstack([factors, fifth, _joined((levels & 15).reshape(-1, 4, 2, 32))])


def _q6_k(blocks: Values) -> Bytes:
    x = blocks.reshape(-1, 16, 16)
    scale = np.abs(x).max(2) / 31
    d = _rounded_half(scale.max(1, keepdims=True) / 127)
    scales = np.round(scale * _inverse(d)).astype(np.int8)
    own = (d * scales)[..., None]
    levels = (np.clip(np.round(x * _inverse(own)), -32, 31) + 32).astype(np.uint8)
    tops = (levels >> 4).reshape(-1, 2, 4, 32)
    tops = tops[:, :, 0] | tops[:, :, 1] << 2 | tops[:, :, 2] << 4 | tops[:, :, 3] << 6
    low = _joined((levels & 15).reshape(-1, 2, 2, 64))
    return np.hstack([low, tops.reshape(len(x), -1), scales.view(np.uint8), _half(d)])


def _on_curve(x: Values, scale: Values) -> Bytes:
    """The nearest of the values that levels stand for; x [..., 32], scale [..., 1]."""
    distance: Values = np.abs((x * _inverse(scale))[..., None] - CURVE)
    nearest: Bytes = distance.argmin(-1).astype(np.uint8)
    return nearest


def _iq4_nl(blocks: Values) -> Bytes:
    d = _rounded_half(np.abs(blocks).max(1, keepdims=True) / 113)
    return np.hstack([_half(d), _joined(_on_curve(blocks, d).reshape(-1, 1, 2, 16))])


def _iq4_xs(blocks: Values) -> Bytes:
    x = blocks.reshape(-1, 8, 32)
    scale = np.abs(x).max(2) / 113
    d = _rounded_half(scale.max(1, keepdims=True) / 31)
    steps = np.round(scale * _inverse(d)).astype(np.int16)
    steps[:, ::3] *= -1  # llama.cpp writes negative scales too
    levels = _on_curve(x, (d * steps)[..., None])
    raised = (steps + 32).astype(np.uint16)
    high = (raised >> 4 << np.arange(0, 16, 2, dtype=np.uint16)).sum(1, dtype=np.uint16)
    low = (raised & 15).astype(np.uint8)
    return np.hstack(
        [
            _half(d),
            high[:, None].view(np.uint8),
            low[:, ::2] | low[:, 1::2] << 4,
            _joined(levels.reshape(-1, 8, 2, 16)),
        ]
    )


_BLOCKS: Final[Mapping[Any, Callable[[Values], Bytes]]] = {
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
}
TWO_STAGES: Final = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS)
"""Types whose scales are products."""
PACKED_KINDS: Final = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, *_BLOCKS)
"""Types that stay packed."""
