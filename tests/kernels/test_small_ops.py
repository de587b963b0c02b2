"""Norm, rotation, gate and cache write against their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych_kernels.rms_norm import rms_norm
from diptych_kernels.rope_kv_write import rope_kv_write
from diptych_kernels.rope_kv_write.reference import kv_write, rotate_
from diptych_kernels.silu_mul import silu_mul

pytestmark = pytest.mark.usefixtures("level")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    mean_square = x.double().square().mean(-1, keepdim=True)
    expected = x.double() / (mean_square + 1e-5).sqrt() * weight.double()
    actual = rms_norm(x, weight, 1e-5).double()
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("tokens", [1, 5])
def test_rotation_turns_each_pair_by_its_angle_in_place(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fused = torch.randn(tokens, 5, 6).to(dtype)
    before = fused.double().clone()
    angles = torch.randn(tokens, 1, 3)
    rotate_(fused[:, :3], torch.stack((angles.cos(), angles.sin()), -1))
    even, odd = before[:, :3, 0::2], before[:, :3, 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    expected = torch.stack(turned, -1).flatten(2)
    torch.testing.assert_close(
        fused[:, :3].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.equal(fused[:, 3:].double(), before[:, 3:])


@dtypes
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 14).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    actual = silu_mul(gate_up).double()
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_kv_write_touches_only_its_slots_of_its_layer() -> None:
    torch.manual_seed(0)
    cache = torch.zeros(5, 3, 2, 4, 2, 8)
    fused = torch.randn(3, 10, 8)
    keys_values = fused[:, 6:].view(3, 2, 2, 8)
    blocks, offsets = torch.tensor([4, 0, 4]), torch.tensor([3, 0, 1])
    kv_write(keys_values, cache[:, 1], blocks, offsets)
    expected = torch.zeros_like(cache)
    for token in range(3):
        expected[blocks[token], 1, :, offsets[token]] = keys_values[token]
    assert torch.equal(cache, expected)


kv_dtypes = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2],
    ids=str,
)


@kv_dtypes
def test_rope_kv_write_rotates_queries_and_stores_rotated_keys(
    dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query_heads, kv_heads, dim = 6, 2, 8
    cache = torch.zeros(5, 3, 2, 4, kv_heads, dim, dtype=kv_dtype)
    expected_cache = cache.clone()
    heads = torch.randn(3, query_heads + 2 * kv_heads, dim).to(dtype)
    expected = heads.clone()
    angles = torch.randn(3, 1, dim // 2)
    rotations = torch.stack((angles.cos(), angles.sin()), -1)
    blocks, offsets = torch.tensor([4, 0, 4]), torch.tensor([3, 0, 1])
    rotate_(expected[:, : query_heads + kv_heads], rotations)
    keys_values = expected[:, query_heads:].view(3, 2, kv_heads, dim)
    kv_write(keys_values, expected_cache[:, 1], blocks, offsets)
    rope_kv_write(heads, rotations, cache[:, 1], blocks, offsets)
    # Whether a product and a sum are rounded once or twice is each kernel's own affair.
    torch.testing.assert_close(heads[:, :query_heads], expected[:, :query_heads])
    torch.testing.assert_close(cache, expected_cache)


@kv_dtypes
@pytest.mark.parametrize(
    "names",
    [("bias",), ("query_norm", "key_norm"), ("bias", "query_norm", "key_norm")],
    ids=str,
)
@pytest.mark.parametrize("tokens", [3, 40])
def test_rope_kv_write_adds_the_bias_then_normalises_heads_then_rotates(
    tokens: int, names: tuple[str, ...], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query_heads, kv_heads, dim = 6, 2, 32
    num_heads, rotated = query_heads + 2 * kv_heads, query_heads + kv_heads
    sizes = {"bias": num_heads * dim, "query_norm": dim, "key_norm": dim}
    weights = {name: torch.randn(sizes[name]).to(dtype) for name in names}
    cache = torch.zeros(10, 3, 2, 4, kv_heads, dim, dtype=kv_dtype)
    heads = torch.randn(tokens, num_heads, dim).to(dtype)
    angles = torch.randn(tokens, 1, dim // 2)
    rotations = torch.stack((angles.cos(), angles.sin()), -1)
    blocks, offsets = torch.arange(tokens) // 4, torch.arange(tokens) % 4

    expected, expected_cache = heads.double(), cache.clone()
    if "bias" in weights:
        expected += weights["bias"].double().view(num_heads, dim)
    for name, own in (
        ("query_norm", expected[:, :query_heads]),
        ("key_norm", expected[:, query_heads:rotated]),
    ):
        if name in weights:
            mean_square = own.square().mean(-1, keepdim=True)
            own *= weights[name].double() / (mean_square + 1e-2).sqrt()
    expected = expected.float()
    rotate_(expected[:, :rotated], rotations)
    keys_values = expected[:, query_heads:].view(tokens, 2, kv_heads, dim)
    kv_write(keys_values, expected_cache[:, 1], blocks, offsets)

    rope_kv_write(heads, rotations, cache[:, 1], blocks, offsets, **weights, eps=1e-2)  # type: ignore[arg-type]
    tolerance: dict[str, Any] = {"atol": 2 * TOLERANCE[dtype], "rtol": 2 * TOLERANCE[dtype]}
    torch.testing.assert_close(
        heads[:, :query_heads].float(), expected[:, :query_heads], **tolerance
    )
    coarse: dict[str, Any] = {"atol": 2 * TOLERANCE[kv_dtype], "rtol": 2 * TOLERANCE[kv_dtype]}
    torch.testing.assert_close(cache, expected_cache, **coarse)
