"""The small Triton kernels against their references.

Kernels compute in float32 and round once, so they may differ from a float32 reference by one unit
in the last place of the output's dtype, plus float32 noise of sums in another order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych_kernels.block_copy import reference as block_copy_reference
from diptych_kernels.block_copy import triton as block_copy
from diptych_kernels.rms_norm import reference as rms_norm_reference
from diptych_kernels.rms_norm import triton as rms_norm
from diptych_kernels.rope_kv_write import reference as rope_kv_write_reference
from diptych_kernels.rope_kv_write import triton as rope_kv_write
from diptych_kernels.rope_kv_write.reference import FLOAT8
from diptych_kernels.silu_mul import reference as silu_mul_reference
from diptych_kernels.silu_mul import triton as silu_mul

EPS = 1e-5
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


def check(actual: Tensor, expected: Tensor) -> None:
    """`expected` is float32, of the same inputs."""
    last_place = torch.finfo(actual.dtype).eps
    tolerance = max(2 * last_place, 2e-6)
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (2, 1500), (1, 5000)], ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(device, dtype)
    weight = torch.randn(shape[1]).to(device, dtype)
    expected = rms_norm_reference.rms_norm(x.float(), weight.float(), EPS)
    check(rms_norm.rms_norm(x, weight, EPS), expected)


def test_rms_norm_of_heads_that_are_part_of_a_fused_projection(device: torch.device) -> None:
    torch.manual_seed(0)
    fused = torch.randn(5, 7, 24, device=device)
    weight = torch.randn(24, device=device)
    expected = rms_norm_reference.rms_norm(fused[:, 2:5], weight, EPS)
    check(rms_norm.rms_norm(fused[:, 2:5], weight, EPS), expected)


@dtypes
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 7), (2, 1536), (5, 1025)])
def test_silu_mul(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * n).to(device, dtype)
    check(silu_mul.silu_mul(gate_up), silu_mul_reference.silu_mul(gate_up.float()))


def angles(num_tokens: int, head_dim: int, device: torch.device) -> Tensor:
    """Random rotations, [tokens, 1, head_dim / 2, 2]."""
    turns = torch.randn(num_tokens, 1, head_dim // 2, device=device)
    return torch.stack((turns.cos(), turns.sin()), -1)


class Cache:
    """One layer of a cache of three, and five new tokens with their slots."""

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
    ) -> None:
        torch.manual_seed(0)
        shape = (6, 3, 2, block_size, kv_heads, head_dim)
        self.expected = torch.zeros(shape).to(device, dtype)
        self.actual = self.expected.clone()
        slots = torch.randperm(6 * block_size, device=device)[:5]
        self.slots = slots // block_size, slots % block_size

    def check(self) -> None:
        """The two caches agree, in every slot of every layer."""
        last_place = torch.finfo(self.actual.dtype).eps
        tolerance = 0.0 if self.actual.dtype is FLOAT8 else max(2 * last_place, 2e-6)
        torch.testing.assert_close(
            self.actual.float(), self.expected.float(), atol=tolerance, rtol=tolerance
        )


shapes = pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_size"), [(1, 2, 8), (3, 64, 16), (2, 6, 32), (5, 24, 1)]
)


def float8_numbers(*shape: int, device: torch.device) -> Tensor:
    """Random float32 numbers that 8 bits can hold.

    Rounding to 8 bits is the hardware's affair, and the interpreter of Triton 3.7 does it wrongly
    where it carries into the exponent.
    """
    return torch.randn(shape).to(FLOAT8).float().to(device)


def test_float8_cache_divides_by_the_scale_and_stops_at_the_largest_number(
    device: torch.device,
) -> None:
    cache = Cache(3, 64, FLOAT8, 16, device)
    heads = float8_numbers(5, 7, 64, device=device)
    heads[0, -1, :2] = torch.tensor([1e4, -1e4], device=device)  # of a value, which does not turn
    rotations = torch.tensor([1.0, 0.0], device=device).repeat(5, 1, 32, 1)
    arguments = rotations, cache.expected[:, 1], *cache.slots, 0.25
    rope_kv_write_reference.rope_kv_write(heads.clone(), *arguments)
    rope_kv_write.rope_kv_write(heads, rotations, cache.actual[:, 1], *cache.slots, 0.25)
    cache.check()
    low, high = cache.expected.float().aminmax()
    assert (low.item(), high.item()) == (-448.0, 448.0)


@dtypes
@shapes
@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
def test_rope_kv_write(
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    float8: bool,
    device: torch.device,
) -> None:
    cache = Cache(kv_heads, head_dim, FLOAT8 if float8 else dtype, block_size, device)
    query_heads = 3 * kv_heads
    rotations = angles(5, head_dim, device)
    heads = torch.randn(5, query_heads + 2 * kv_heads, head_dim).to(device, dtype)
    if float8:
        # Turned by right angles, such numbers stay such numbers.
        heads = float8_numbers(*heads.shape, device=device).to(dtype)
        rotations = torch.tensor([0.0, -1.0], device=device).expand_as(rotations).contiguous()
    expected = heads.clone()
    arguments = *cache.slots, 0.5
    rope_kv_write_reference.rope_kv_write(expected, rotations, cache.expected[:, 1], *arguments)
    rope_kv_write.rope_kv_write(heads, rotations, cache.actual[:, 1], *arguments)
    check(heads[:, :query_heads], expected[:, :query_heads])
    cache.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 1, 1, 3), (3, 2, 16, 3, 64)], ids=str)
def test_blocks_travel_through_a_staging_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    source = torch.randn(9, *shape).to(device, dtype)
    ids = torch.tensor([7, 0, 3, 8], device=device)
    staging = torch.zeros(4, *shape).to(device, dtype)
    block_copy.gather_blocks(source, ids, staging)
    assert torch.equal(staging.float(), source.float()[ids])
    target = torch.zeros(9, *shape).to(device, dtype)
    expected = target.clone()
    there = torch.tensor([1, 8, 0, 2], device=device)
    block_copy_reference.scatter_blocks(staging, expected, there)
    block_copy.scatter_blocks(staging, target, there)
    assert torch.equal(target.float(), expected.float())
    assert torch.equal(target.float()[there], source.float()[ids])
