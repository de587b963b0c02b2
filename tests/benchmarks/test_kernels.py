"""What the kernel benchmarks count and compare; the measuring itself needs a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kernels import costs, limits, steps
from benchmarks.kernels.cases import Case, Sizes, Workload
from benchmarks.kernels.costs import LLAMA_3_8B, Cost, Model
from benchmarks.kernels.measure import measured
from benchmarks.kernels.steps import random_model, step_cases

TINY = Model(
    hidden=24, intermediate=40, heads=6, kv_heads=2, head_dim=8, layers=3, vocabulary=700,
    itemsize=4, block_size=4,
)  # fmt: skip
ON_CPU = Workload(TINY, torch.device("cpu"), torch.float32)
SIZES = Sizes(
    rows=(5,), decodes=((3, 18),), skews=((3, 18, 5),), prefills=((9, 0), (5, 6)), blocks=3,
    sampled=(4,), decode_steps=((3, 9),), prefill_steps=(7,), mixed_steps=((2, 9, 7),),
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def test_both_sides_of_every_case_compute_the_same() -> None:
    torch.manual_seed(0)
    seen = []
    for case in ON_CPU.cases(SIZES):
        assert case.torchs is not None
        torch.testing.assert_close(case.ours(), case.torchs())
        assert case.cost.bytes > 0
        seen.append(case.kernel)
    assert len(seen) == 14


@torch.inference_mode()
def test_steps_run_and_read_as_many_weights_as_are_counted() -> None:
    decode, prefill, mixed = step_cases(ON_CPU, SIZES)
    assert decode.ours().isfinite().all()
    assert decode.ours().shape == (3, TINY.vocabulary)
    assert prefill.ours().shape == (1, TINY.vocabulary)
    assert mixed.ours().isfinite().all()
    assert mixed.ours().shape == (3, TINY.vocabulary)
    parameters = dict(random_model(ON_CPU, 16).named_parameters())
    products = sum(p.numel() for p in parameters.values() if p.dim() == 2)
    embedding = TINY.vocabulary * TINY.hidden
    assert products == TINY.layers * costs.layer_weights(TINY) + 2 * embedding
    read = (products - embedding) * TINY.itemsize
    both = decode.cost.flops + prefill.cost.flops
    assert costs.mixed_step(TINY, [9] * 3, 7).flops == both
    attention = costs.decode_attention(TINY, [9] * 3).bytes
    assert decode.cost.bytes == read + TINY.layers * attention


def a_second(call: Callable[[], object]) -> tuple[float, float, float]:
    call()
    return 1.0, 1.0, 1.0


@torch.inference_mode()
def test_no_cache_is_kept_beside_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the largest are more than an H100 has."""
    caches: list[weakref.ref[Any]] = []
    make = steps.paged_cache

    def paged_cache(*args: Any) -> Any:
        assert not [cache for cache in caches if cache() is not None]
        layers, tables = make(*args)
        caches.append(weakref.ref(layers[0].untyped_storage()))
        return layers, tables

    monkeypatch.setattr(steps, "paged_cache", paged_cache)
    sizes = replace(SIZES, decode_steps=((3, 9), (2, 5)), prefill_steps=(7, 4), mixed_steps=())
    rows = list(measured(step_cases(ON_CPU, sizes), 1.0, 1.0, a_second))
    assert [row["size"] for row in rows] == ["3 x 9", "2 x 5", "7 tokens", "4 tokens"]
    assert not [row for row in rows if "error" in row]
    assert len(caches) == 4


def test_a_wrong_kernel_costs_its_own_row() -> None:
    right = torch.ones(3)

    def cases() -> Iterator[Case]:
        yield Case("wrong", "3", Cost(12), lambda: right, lambda: right + 1)
        yield Case("right", "3", Cost(12), lambda: right, lambda: right)
        raise RuntimeError("out of memory | of the device")

    rows = list(measured(cases(), 1.0, 1.0, a_second))
    assert [row["kernel"] for row in rows] == ["wrong", "right", "those after this"]
    assert ["error" in row for row in rows] == [True, False, True]
    assert rows[0]["error"].startswith("AssertionError: Tensor-likes are not close!")
    assert rows[2]["error"] == "RuntimeError: out of memory | of the device"


@pytest.mark.parametrize(("new", "prefix", "pairs"), [(1, 0, 1), (3, 0, 6), (1, 9, 10), (2, 5, 13)])
def test_prefill_counts_the_keys_that_each_query_sees(new: int, prefix: int, pairs: int) -> None:
    cost = costs.prefill_attention(TINY, new, prefix)
    assert cost.flops == pairs * 2 * 2 * TINY.heads * TINY.head_dim


def test_a_decode_is_a_prefill_of_one_token() -> None:
    assert costs.decode_attention(TINY, [10]) == costs.prefill_attention(TINY, 1, 9)


def test_a_block_of_llama_3_8b_has_two_mib() -> None:
    assert LLAMA_3_8B.block == 2 << 20


def test_the_slower_of_memory_and_products_is_the_limit() -> None:
    assert Cost(100, 10).seconds(bandwidth=10, rate=10) == 10
    assert Cost(10, 100).seconds(bandwidth=10, rate=10) == 10


def test_the_page_on_kernels_has_the_limits_that_are_computed() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    for line in limits.limits().splitlines()[2:]:
        assert line.rstrip("|").rstrip() in page
