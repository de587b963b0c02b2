"""Packed weights: what they compute, and which tensors are packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_kit.core import core_request, run
from engine_kit.core import make_core as make_exact_core
from gguf import GGMLQuantizationType as Kind
from model_kit.gguf import first_layers, quantised, save_gguf, save_lora
from model_kit.quantised import PACKED_KINDS, TWO_STAGES, quantise
from torch import Tensor

from diptych_engine.control.core import EngineCore
from diptych_engine.models import StepInputs, build_model, load_weights
from diptych_engine.models.groups import Groups, read_groups
from diptych_engine.models.interface import WeightSlot
from diptych_engine.models.linear import Linear
from diptych_engine.models.loader import fill, share_of
from diptych_engine.models.low_rank import AdapterRows
from diptych_engine.models.packed import PackedMatrix
from diptych_engine.models.shard import Shard, Span
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.native.tile_layout import group_bytes
from diptych_kernels.packed_product import is_available
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_protocol import InvalidRequestError, LoRARequest

ROUNDING = 1e-4
"""How far rounding inputs to 16 bits may move a result, relative to its norm."""
SCALES = 2.0**-10
"""How far rounding a type's two stages of scales to one of float16 may move a matrix."""
KINDS = pytest.mark.parametrize("kind", PACKED_KINDS, ids=lambda kind: kind.name)


def groups_of(values: Tensor, kind: Kind) -> Groups:
    raw = quantise(values.numpy(), kind)
    groups = read_groups(raw.reshape(-1), kind, tuple(values.shape))
    assert groups is not None
    return groups


def packed(*parts: Groups) -> PackedMatrix:
    matrix = PackedMatrix.of(parts)
    assert matrix is not None
    return matrix


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


needs_kernel = pytest.mark.skipif(not is_available(), reason="nothing is packed here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def values_in_file(values: Tensor, kind: Kind) -> Tensor:
    """As the package of GGUF's makers reads them."""
    raw = quantise(values.numpy(), kind)
    return torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))


@KINDS
def test_values_are_those_of_the_file(kind: Kind) -> None:
    values = torch.randn(48, 512, generator=torch.Generator().manual_seed(1))
    assert torch.equal(groups_of(values, kind).values(), values_in_file(values, kind))


@KINDS
@needs_kernel
def test_packing_loses_nothing_but_the_second_stage_of_scales(kind: Kind) -> None:
    """Factors are float16 in the file, and times 8 and 128 they still are: also the largest and
    smallest. Those of two stages are rounded."""
    values = torch.randn(48, 2048, generator=torch.Generator().manual_seed(10))
    values.view(48, 8, 256).mul_(torch.logspace(-7, 3.9, 8)[:, None])
    parts = groups_of(values[:16], kind), groups_of(values[16:], kind)
    expected = torch.cat([part.values() for part in parts])
    actual = packed(*parts).values()
    if kind not in TWO_STAGES:
        assert torch.equal(actual, expected)
    for own, wanted in zip(actual.split(256, 1), expected.split(256, 1), strict=True):
        assert float((own - wanted).norm()) <= SCALES * float(wanted.norm())


@pytest.mark.one_in(4, "kind")
@KINDS
@pytest.mark.parametrize("rows", [1, 5, 64, 130])
@needs_kernel
def test_a_product_is_that_of_the_files_own_values(kind: Kind, rows: int) -> None:
    """The weights are several tensors below each other; beside a reference in float64."""
    generator = torch.Generator().manual_seed(rows)
    columns = 256 * int(torch.randint(1, 6, (), generator=generator))
    weights = [torch.randn(n, columns, generator=generator) for n in (1040, 64, 32)]
    x = torch.randn(rows, columns, generator=generator)
    weight = torch.cat([values_in_file(part, kind) for part in weights]).double()
    product = packed(*(groups_of(part, kind) for part in weights)).product(x, rows)
    near = ROUNDING + SCALES * (kind in TWO_STAGES)
    assert float((product - x.double() @ weight.t()).norm() / product.norm()) < near


@pytest.mark.parametrize(
    ("kinds", "bits"),
    [
        pytest.param([Kind.Q4_K, Kind.Q6_K], 6, id="a value's in Q4_K_M"),
        pytest.param([Kind.Q5_0, Kind.Q8_0], 8, id="a value's beside widths that no K-quant has"),
        pytest.param([Kind.Q4_K, Kind.IQ4_NL, Kind.Q5_1], 8, id="curve"),
        pytest.param([Kind.Q4_K, Kind.Q4_0], 4, id="one"),
    ],
)
@needs_kernel
def test_tensors_of_several_types_share_the_smallest_tiles_that_hold_them(
    kinds: list[Kind], bits: int
) -> None:
    generator = torch.Generator().manual_seed(11)
    weights = [torch.randn(32, 512, generator=generator) for _ in kinds]
    matrix = packed(*map(groups_of, weights, kinds))
    assert matrix.tiles.shape[2] == group_bytes(bits)
    wanted = torch.cat([values_in_file(*each) for each in zip(weights, kinds, strict=True)])
    assert distance(matrix.values(), wanted) < SCALES
    x = torch.randn(3, 512, generator=generator)
    assert distance(matrix.product(x, 3), x @ wanted.t()) < ROUNDING + SCALES


@needs_kernel
def test_a_row_gets_the_same_bits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = packed(groups_of(torch.randn(320, 192, generator=generator), Kind.Q4_1))
    x = torch.randn(130, 192, generator=generator)
    together = matrix.product(x, len(x))
    for size in (1, 3, 4, 17, 64):
        assert torch.equal(matrix.product(x[:size], size), together[:size])
        assert torch.equal(matrix.product(x[-size:], size), together[-size:])


@needs_kernel
def test_a_linear_adds_what_it_computes() -> None:
    generator = torch.Generator().manual_seed(4)
    groups = groups_of(torch.randn(64, 32, generator=generator), Kind.Q4_0)
    x, sums = (torch.randn(5, n, generator=generator) for n in (32, 64))
    for linear in (Linear(groups.values().t()), Linear(groups.values().t(), packed(groups))):
        added = sums.clone()
        linear.add_product_(added, x, 5)
        torch.testing.assert_close(added, sums + linear.product(x, 5))


@pytest.mark.parametrize(
    ("shapes", "kinds"),
    [
        pytest.param([(24, 32)], [Kind.Q4_0], id="rows"),
        pytest.param([(16, 256), (16, 256)], [Kind.Q6_K, Kind.Q8_0], id="bits-and-span"),
    ],
)
def test_what_the_kernel_cannot_take_is_not_packed(
    shapes: list[tuple[int, int]], kinds: list[Kind]
) -> None:
    parts = [groups_of(torch.ones(shape), kind) for shape, kind in zip(shapes, kinds, strict=True)]
    assert PackedMatrix.of(parts) is None


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_factors_that_float16_cannot_hold_are_not_packed(kind: Kind) -> None:
    """The file's scale fits, but not 8 or 128 times as much."""
    assert PackedMatrix.of([groups_of(torch.full((16, 32), 7e4), kind)]) is None


@pytest.mark.parametrize(
    ("target", "slot"),
    [
        pytest.param((64, 128), {}, id="whole"),
        pytest.param((64, 128), {"rotary_dim": 16}, id="reordered"),
        pytest.param((32, 128), {"rotary_dim": 16, "rows": Span(32, 32, 64)}, id="rows"),
        pytest.param((64, 64), {"columns": Span(64, 64, 128)}, id="columns"),
    ],
)
def test_a_ranks_share_of_groups_is_that_of_the_values(
    target: tuple[int, int], slot: dict[str, Any]
) -> None:
    groups = groups_of(torch.randn(64, 128, generator=torch.Generator().manual_seed(5)), Kind.Q4_1)
    place = WeightSlot(torch.empty(target), **slot)
    fill(place, groups.values(), "tensor", reorder=True)
    own = share_of(groups, place, reorder=True)
    assert own is not None
    assert torch.equal(own.values(), place.target)


def test_a_share_that_cuts_groups_in_two_is_not_packed() -> None:
    groups = groups_of(torch.ones(16, 96), Kind.Q4_0)
    slot = WeightSlot(torch.empty(16, 48), columns=Span(48, 48, 96))
    assert share_of(groups, slot, reorder=False) is None


def test_the_shares_of_ranks_add_up(model: str) -> None:
    source = resolve_model(model)

    def linear(shard: Shard) -> Linear:
        own = build_model(source.config, 16, torch.float32, torch.device("cpu"), shard)
        load_weights(own.slots, source, packables=own.packables)
        return next(p.linear for p in own.packables if "down_proj" in p.published[0])

    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(6))
    halves = [
        linear(Shard(rank, 2, lambda _: None)).product(x[:, rank * 64 : rank * 64 + 64], 3)
        for rank in range(2)
    ]
    assert distance(halves[0] + halves[1], x @ linear(Shard()).values()) < ROUNDING


@pytest.mark.parametrize(
    ("kind_of", "plain"),
    [
        pytest.param(quantised, [], id="all-packed"),
        pytest.param(
            lambda name: Kind.F16 if "up_proj" in name else quantised(name),
            ["mlp.gate_proj", "mlp.up_proj"], id="a-part-is-no-group",
        ),
        pytest.param(
            lambda name: Kind.Q8_0 if "q_proj" in name else quantised(name),
            [], id="parts-differ",
        ),
    ],
)  # fmt: skip
@needs_kernel
def test_a_projection_is_packed_if_all_of_its_tensors_can_be(
    tmp_path: Path, kind_of: Callable[[str], Kind], plain: list[str]
) -> None:
    source = resolve_model(save_gguf(tmp_path / "model.gguf", kind_of))
    model = build_model(source.config, 16, torch.float32, torch.device("cpu"))
    load_weights(model.slots, source, packables=model.packables)
    names = {name for p in model.packables if p.linear.packed is None for name in p.published}
    assert names == {f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in plain}
    unpacked = build_model(source.config, 16, torch.float32, torch.device("cpu"))
    load_weights(unpacked.slots, source)
    for (name, own), (_, expected) in zip(
        model.named_parameters(), unpacked.named_parameters(), strict=True
    ):
        assert torch.equal(own, expected), name


def make_core(model: str, **options: Any) -> EngineCore:
    return make_exact_core(model, **{"weight_packing": "auto", **options})


def answers(core: EngineCore, *requests: Any) -> dict[str, list[int]]:
    outputs = run(core, *requests)
    return {name: [t for o in own for t in o.new_token_ids] for name, own in outputs.items()}


def prompts() -> dict[str, list[int]]:
    generator = np.random.default_rng(7)
    return {f"r{n}": generator.integers(0, 64, n).tolist() for n in (1, 17, 40, 70)}


@pytest.mark.parametrize("activations", ["auto", "q8"])
def test_an_answer_is_the_same_in_any_company(
    smollm2: str, activations: str, tmp_path: Path
) -> None:
    """Alone; in a batch of chunks; with so few blocks that KV is lost and computed again; and
    continued behind what another engine generated. By layers of the real model, whose heads fill
    vectors."""
    whole = resolve_model(smollm2).path
    assert whole is not None
    model = first_layers(whole, 3, tmp_path / "short.gguf")

    def core(**options: Any) -> EngineCore:
        # Generated tokens in the cache must not stand in for a prompt's.
        own = {"enable_prefix_caching": False, "activations": activations}
        return make_core(model, **own, **options)

    asked = prompts()
    alone: dict[str, list[int]] = {}
    engine, other = core(), core()
    for name, prompt in asked.items():
        alone |= answers(engine, core_request(name, prompt, max_tokens=14))

    crowded = core(num_blocks=11, max_num_batched_tokens=24)
    requests = [core_request(name, prompt, max_tokens=14) for name, prompt in asked.items()]
    assert answers(crowded, *requests) == alone
    assert crowded.scheduler.stats.num_preemptions > 0

    for name, prompt in asked.items():
        rest = core_request(name, prompt, max_tokens=14, generated_token_ids=alone[name][:9])
        assert answers(other, rest)[name] == alone[name][9:]


@torch.inference_mode()
def forward(core: EngineCore, size: int, adapters: Sequence[AdapterRows]) -> Tensor:
    """The hidden states of so many decodes, each the first token of its own block."""
    zeros, places = torch.zeros(size, dtype=torch.int64), torch.arange(size)
    attention = AttentionMetadata(
        query_starts=np.arange(size + 1), context_lens=np.ones(size, np.int64),
        block_tables=np.arange(size)[:, None], num_decodes=size, block_size=16,
    )  # fmt: skip
    inputs = StepInputs(places, zeros, places, zeros, attention, adapters)
    hidden: Tensor = core.runner.forward(inputs, [])  # type: ignore[attr-defined]
    return hidden


def test_an_adapter_adds_the_same_to_packed_projections(model: str, tmp_path: Path) -> None:
    """One row of the batch wants it; the others are as without."""
    adapter = LoRARequest("tuned", 1, save_lora(tmp_path))
    core, plain = make_core(model), make_exact_core(model)
    hidden = {}
    for name, own in (("packed", core), ("plain", plain)):
        own.call("add_lora", [adapter])
        loras = own.runner.loras  # type: ignore[attr-defined]
        rows = torch.tensor([1])
        hidden[name] = [forward(own, 3, adapters) for adapters in ((), (loras.rows(1, rows),))]
    without, tuned = hidden["packed"]
    assert torch.equal(without[[0, 2]], tuned[[0, 2]])
    change, expected = (b[1] - a[1] for a, b in hidden.values())
    assert distance(change, expected) < 5e-3  # keys and values are bfloat16
    assert float(expected.norm()) > 0.1 * float(hidden["plain"][0][1].norm())


def test_nothing_is_packed_unless_the_configuration_allows_it(model: str) -> None:
    packables = make_exact_core(model).runner.model.packables  # type: ignore[attr-defined]
    assert not any(packable.linear.packed for packable in packables)
    with pytest.raises(InvalidRequestError, match="weight_packing"):
        make_core(model, weight_packing="int3")
