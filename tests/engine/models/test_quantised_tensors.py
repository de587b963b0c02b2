"""FP8, AWQ, GPTQ and compressed-tensors: read as their makers wrote them, beside the same
arithmetic in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import foreign_device
from engine_kit.control import Owner
from engine_kit.core import core_request, run
from engine_kit.weights import model_of
from model_kit.families import published
from model_kit.quantised_folders import (
    AWQ,
    FORMATS,
    FP8,
    FUSED,
    GPTQ,
    INT4,
    INT8,
    Json,
    compressed,
    ints,
    packed_ints,
    save,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych_engine.models import CausalLM, build_model, check_weights, load_weights
from diptych_engine.models.quantised_tensors import unpacked
from diptych_engine.models.shard import WHOLE, Shard
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.model_files.quantization import quantization_from_hf
from diptych_kernels.cpu_level import CpuLevel, machine_level
from diptych_kernels.packed_product import is_available
from diptych_protocol import InvalidRequestError


def kinds(model: CausalLM) -> set[int | None]:
    """The kinds of tiles of the layer's matrices: bits of levels, 43 for 8-bit floats."""
    of_bytes = {320: 4, 512: 6, 576: 8}
    found: set[int | None] = set()
    for packable in model.packables:
        own = packable.linear.packed
        if "layers" in packable.published[0]:
            is_level = own is not None and own.tiles.dtype is torch.uint8
            found.add(None if own is None else of_bytes[own.tiles.shape[2]] if is_level else 43)
    return found


def first_of(owner: Owner) -> tuple[int, list[float]]:
    """The first token of an answer, and the log-probabilities of the likeliest."""
    asked = core_request("one", [1, 2, 3], max_tokens=1, logprobs=5)
    [output] = run(owner.core, asked)["one"]
    assert output.new_logprobs is not None
    return output.new_token_ids[0], output.new_logprobs.logprobs[0]


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_published_arithmetic(name: str, tmp_path: Path) -> None:
    """Packed or not, and none of them is rounded."""
    config, scheme, kind = FORMATS[name]
    path, values = save(tmp_path, config, scheme)
    source = resolve_model(path)
    plain = build_model(source.config, 16, torch.float32, torch.device("cpu"))
    load_weights(plain.slots, source)
    for each in ("mlp.down_proj", "mlp.up_proj", "self_attn.v_proj", "self_attn.o_proj"):
        full = f"model.layers.0.{each}.weight"
        torch.testing.assert_close(plain.slots[full].target, values[full], rtol=1e-6, atol=0)
    owner = Owner(model=path, weight_packing="auto")
    for (own, packed), (_, other) in zip(
        model_of(owner).named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(packed, other), own
    assert owner.core.description.compat["dtype"] == "bfloat16"
    if is_available() and is_available(torch.float8_e4m3fn):
        assert kinds(model_of(owner)) == {kind}
    unpacked_too = Owner(model=path, weight_packing="none", kv_cache_dtype="bfloat16")
    (token, found), (wanted, expected) = map(first_of, (owner, unpacked_too))
    # Products of levels round the other factor, and those of the matrix unit both; a longer answer
    # may come to a tie.
    assert token == wanted
    assert found == pytest.approx(expected, abs=0.4 if machine_level() is CpuLevel.AMX else 0.05)


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-4", "int4-zeros"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_share(name: str, rank: int, tmp_path: Path) -> None:
    config, scheme, _ = FORMATS[name]
    path, _ = save(tmp_path, config, scheme, num_attention_heads=4, num_key_value_heads=2)
    source = resolve_model(path)
    shard = Shard(rank, 2, lambda _: None)
    own, plain = (
        build_model(source.config, 16, torch.float32, torch.device("cpu"), shard) for _ in range(2)
    )
    load_weights(own.slots, source, packables=own.packables)
    load_weights(plain.slots, source)
    for (_, packed), (_, other) in zip(
        own.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(packed, other)


@pytest.mark.parametrize(
    ("name", "row_bytes"), [("fp8-blocks", 144), ("awq", 144), ("gptq-4", 80), ("gptq-sorted", 0)]
)
def test_a_gpu_has_the_same_values_as_packed(name: str, row_bytes: int, tmp_path: Path) -> None:
    """What cannot be packed takes memory as floats."""
    config, scheme, _ = FORMATS[name]
    source = resolve_model(save(tmp_path, config, scheme)[0])
    plain = build_model(source.config, 16, torch.float32, torch.device("cpu"))
    load_weights(plain.slots, source)
    own = build_model(source.config, 16, torch.float32, foreign_device.DEVICE, packs=True)
    load_weights(own.slots, source, packables=own.packables)
    for packable in own.packables:
        matrix = packable.linear.packed
        in_layer = "layers" in packable.published[0]
        assert (matrix.tiles.shape[2] if matrix else 0) == row_bytes * in_layer
        assert bool(packable.linear.weight.untyped_storage().nbytes()) == (matrix is None)
    for (_, packed), (_, other) in zip(
        own.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(packed.cpu(), other, rtol=1e-5, atol=1e-5)
    foreign_device.device.waits.clear()


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq-4", "int4"])
def test_matrices_that_a_family_stores_as_one_are_separate_here(name: str, tmp_path: Path) -> None:
    config, scheme, kind = FORMATS[name]
    path, values = save(tmp_path, config, scheme, FUSED, "phi3")
    model = model_of(Owner(model=path, weight_packing="auto"))
    source = resolve_model(path)
    plain = build_model(source.config, 16, torch.float32, torch.device("cpu"))
    load_weights(plain.slots, source)
    stored = values["model.layers.0.mlp.gate_up_proj.weight"]
    for part, rows in zip(("gate", "up"), stored.split(256), strict=True):
        own = plain.slots[f"model.layers.0.mlp.{part}_proj.weight"].target
        torch.testing.assert_close(own, rows, rtol=1e-6, atol=0)
    for (_, packed), (_, other) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(packed, other)
    if is_available() and is_available(torch.float8_e4m3fn):
        assert kinds(model) == {kind}


FAMILY_SIZES: Json = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 64,
    "shared_intermediate_size": 256,
}  # fmt: skip
"""Sizes that fill tiles, and for which there are kernels already."""


def quantised_family(family: str, folder: Path, name: str) -> Any:
    """Quantise the matrices of a family's layers, each expert by itself; transformers' model with
    the same values."""
    config, scheme, _ = FORMATS[name]
    model = published(family, folder, FAMILY_SIZES)
    generator, stored = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    own = dict(model.named_parameters())

    def replace(module: str, target: Tensor) -> None:
        rows, columns = target.shape
        tensors, values = scheme(rows, columns, generator)
        target.copy_(values)
        stored.update({f"{module}.{end}": each.contiguous() for end, each in tensors.items()})

    with torch.no_grad():
        for full, parameter in own.items():
            module, _, end = full.rpartition(".")
            if ".layers." not in full or parameter.dim() < 2 or module.endswith("mlp.gate"):
                continue
            if parameter.dim() == 2:
                del stored[full]
                replace(module, parameter)
                continue
            for number, expert in enumerate(parameter):
                parts = expert.chunk(2) if end == "gate_up_proj" else (expert,)
                names = ("gate_proj", "up_proj") if end == "gate_up_proj" else (end,)
                for part, rows in zip(names, parts, strict=True):
                    stored.pop(f"{module}.{number}.{part}.weight", None)
                    replace(f"{module}.{number}.{part}", rows)
    save_file(stored, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    return model


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mistral", "awq"),
        ("qwen2", "gptq-4"),
        ("qwen3", "fp8-blocks"),
        ("qwen3", "awq"),
        ("qwen3_moe", "fp8-blocks"),
        ("qwen3_moe", "gptq-4"),
        ("smollm3", "int4"),
        ("granite", "float-quantized"),
        ("granitemoehybrid", "int8"),
        ("gemma2", "gptq-4-zeros"),
        ("gemma3_text", "int4-zeros"),
    ],
)
def test_each_family_is_read_as_it_is_quantised(
    family: str, name: str, tmp_path: Path, lone_sequence: Callable[..., Any]
) -> None:
    model, token_ids = quantised_family(family, tmp_path, name), torch.arange(40)
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    source = resolve_model(str(tmp_path))
    plain = lone_sequence(source, 48)
    actual = plain.logits_in_chunks(token_ids.tolist(), [25, 14, 1])
    assert expected.std() > 0.5  # else the tolerance would prove nothing
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    packed = lone_sequence(source, 48, packs=True).model
    for (own, values), (_, other) in zip(
        packed.named_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert torch.equal(values, other), own
    if is_available() and is_available(torch.float8_e4m3fn):
        assert kinds(packed) == {FORMATS[name][2]}


def test_matrices_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    path, values = save(tmp_path, INT4, packed_ints(4))
    stored = load_file(tmp_path / "model.safetensors")
    module = "model.layers.0.mlp.down_proj"
    kept = {name: each for name, each in stored.items() if not name.startswith(module)}
    left = values[f"{module}.weight"].bfloat16()
    save_file(kept | {f"{module}.weight": left}, tmp_path / "model.safetensors")
    model = model_of(Owner(model=path))
    assert torch.equal(model.slots[f"{module}.weight"].target, left.float())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', not one of fp8"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2', not e4m3"),
        (FP8 | {"weight_block_size": [100, 128]}, "weight_block_size"),
        (AWQ | {"bits": 3}, "bits is 3, not 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', not gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (GPTQ | {"bits": 2}, "bits is 2, not 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', not gptq"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (GPTQ | {"dynamic": {"-:x": {}, "+:y": {"bits": 8}}}, r"bits of dynamic\['\+:y'\] is 8"),
        (compressed("pack-quantized", num_bits=3, type="int"), "num_bits of pack-quantized"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format is 'nvfp4"),
        (INT8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (INT8 | {"transform_config": {"config_groups": {"R3": {}}}}, "transform_config rotates"),
        (INT8 | {"config_groups": 1}, "config_groups"),
        ("fp8", "it is not an object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(config: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        quantization_from_hf({"quantization_config": config})
    assert refused.value.param == "model"
    assert "weightPacking" in str(refused.value)


@pytest.mark.parametrize(
    ("own", "group", "needs"),
    [
        ({"-:.*gate$": {}}, 64, "g_idx"),
        ({"-:.*gate$": {}, "down": {"bits": 4}}, 64, "g_idx"),
        ({"down": {"group_size": 32}}, 0, "g_idx"),
        ({"down": {"desc_act": False}}, 64, ""),
    ],
)
def test_only_what_patterns_change_is_left_to_the_tensors(
    own: dict[str, dict[str, Any]], group: int, needs: str
) -> None:
    config = GPTQ | {"desc_act": True, "dynamic": own}
    found = quantization_from_hf({"quantization_config": config})
    assert found is not None
    assert (found.group, found.needs) == (group, needs)


def test_a_router_whose_engines_are_others_refuses_nothing(tmp_path: Path) -> None:
    """It reads no weights."""
    save(tmp_path, {"quant_method": "bitsandbytes"}, ints)
    assert resolve_model(str(tmp_path), weights=False).config.vocab_size == 64
    with pytest.raises(InvalidRequestError, match="bitsandbytes"):
        resolve_model(str(tmp_path))


K = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("name", "end", "tensor", "said"),
    [
        ("int4", "weight_scale", None, "weight_scale is missing"),
        ("int4", "weight_packed", torch.zeros(64, 15, dtype=torch.int32), r"\[64, 15\], not \[64"),
        ("int4", "weight_g_idx", torch.zeros(128, dtype=torch.int32), "weight_g_idx sorts"),
        (
            "int8",
            "weight",
            torch.zeros(64, 128, dtype=torch.uint8),
            "weight has the type U8, not F8_E4M3 or I8",
        ),
        ("awq", "qzeros", torch.zeros(1, 8, dtype=torch.int32), r"\[1, 8\], not \[4, 8\]"),
        ("gptq-4", "scales", torch.zeros(3, 64).half(), "scales has 3 groups|qzeros has the shape"),
        ("gptq-sorted", "g_idx", torch.full((128,), 9, dtype=torch.int32), "g_idx names groups"),
        ("awq", "scales", torch.full((4, 64), torch.nan).half(), "numbers that are not finite"),
        ("fp8", "weight_scale", torch.full((), torch.inf), "numbers that are not finite"),
        ("fp8", "weight", torch.zeros(64, 128), "weight has the type F32, not F8_E4M3"),
        ("awq", "weight", torch.zeros(64, 128), "weight does not belong to awq"),
        ("int8-tensor", "weight_zero_point", torch.zeros(7).char(), r"has the shape \[7\], not"),
        ("fp8", "weight_scale", torch.zeros(7), r"weight_scale has the shape \[7\]"),
        ("fp8", "qweight", torch.zeros(7), "qweight does not belong to fp8"),
        ("fp8", "weight", torch.zeros(64, 128, dtype=torch.int8), "weight has the type I8, not F8"),
        ("int4", "weight_shape", torch.tensor([64, 128, 1]), r"\[3\], not \[2\]"),
        ("int4", "weight_shape", torch.tensor([-64, 1 << 40]), "weight_packed has the shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, end: str, tensor: Tensor | None, said: str, tmp_path: Path
) -> None:
    config, scheme, _ = FORMATS[name]
    path, _ = save(tmp_path, config, scheme)
    stored = {**load_file(tmp_path / "model.safetensors"), f"{K}.{end}": tensor}
    kept = {name: each for name, each in stored.items() if each is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=said) as refused:
        Owner(model=path)
    assert K in str(refused.value)


@pytest.mark.parametrize("name", ["k_proj.k_scale", "k_scale", "attn.v_scale", "kv_scale"])
def test_scales_of_kv_are_left_out(name: str, tmp_path: Path) -> None:
    """Wherever tools have put them."""
    save(tmp_path, *FORMATS["fp8"][:2])
    path = tmp_path / "model.safetensors"
    scale = {f"model.layers.0.self_attn.{name}": torch.ones(())}
    save_file(load_file(path) | scale, path)
    check_weights(resolve_model(str(tmp_path)), WHOLE)


ASYMMETRIC = compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=False)


@pytest.mark.parametrize(
    ("name", "config", "end", "said"),
    [
        ("gptq-4", GPTQ | {"group_size": 32}, "scales", "groups .* 32 inputs a group"),
        ("gptq-4", GPTQ | {"group_size": -1}, "scales", "4 groups for 256 inputs"),
        ("awq", AWQ | {"group_size": 128}, "scales", "groups .* 128 inputs a group"),
        ("int4", INT4 | {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 64}}}},
         "weight_scale", "groups .* 64 inputs a group"),
        ("int4", ASYMMETRIC, "weight_zero_point", "is missing"),
        ("gptq-4", GPTQ | {"desc_act": True}, "g_idx", "is missing"),
    ],
)  # fmt: skip
def test_files_that_are_not_as_their_configuration_says_are_refused_before_memory_is_taken(
    name: str, config: Json, end: str, said: str, tmp_path: Path
) -> None:
    """Their values would be others, and nobody would know."""
    save(tmp_path, config, FORMATS[name][1])
    path = tmp_path / "model.safetensors"
    stored = {name: each for name, each in load_file(path).items() if not name.endswith("g_idx")}
    save_file(stored, path)
    with pytest.raises(InvalidRequestError, match=rf"\.{end} .*{said}") as refused:
        check_weights(resolve_model(str(tmp_path)), WHOLE)
    assert refused.value.param == "model"


def test_groups_that_divide_no_matrix_are_those_that_g_idx_names(tmp_path: Path) -> None:
    config, scheme, _ = FORMATS["gptq-4"]
    path, _ = save(tmp_path, config | {"dynamic": {"+:.*k_proj": {"group_size": 43}}}, scheme)
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{K}.g_idx"] = (torch.arange(128) // 43).to(torch.int32)
    stored[f"{K}.scales"] = torch.ones(3, 64).half()
    stored[f"{K}.qzeros"] = torch.zeros(3, 8, dtype=torch.int32)
    save_file(stored, tmp_path / "model.safetensors")
    model = model_of(Owner(model=path))
    levels = unpacked(stored[f"{K}.qweight"].t(), 4)
    assert torch.equal(model.slots[f"{K}.weight"].target.sum(), (levels - 1).float().sum())
