"""Tiny random models of each family give the logits of their Hugging Face class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_kit.families import CONFIGS, SIZES, config_of, published

from diptych_engine.models import build_model, load_weights
from diptych_frontend.model_files.families import FAMILIES
from diptych_frontend.model_files.model_config import config_from_hf
from diptych_frontend.model_files.model_source import resolve_model
from diptych_protocol import InvalidRequestError

NUM_TOKENS = 70


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, token ids, expected logits) of one family."""
    folder = tmp_path_factory.mktemp("model")
    model = published(request.param, folder)
    token_ids = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    return folder, token_ids.tolist(), expected


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([NUM_TOKENS], id="whole"),
        pytest.param([1, 15, 30, 24], id="chunks"),
        pytest.param([32] + [1] * (NUM_TOKENS - 32), id="prefill and decodes"),
    ],
)
def test_logits_equal_transformers(
    family: Any, sizes: list[int], lone_sequence: Callable[..., Any]
) -> None:
    folder, token_ids, expected = family
    actual = lone_sequence(resolve_model(str(folder)), 96).logits_in_chunks(token_ids, sizes)
    assert expected.std() > 0.5  # else the tolerance would prove nothing
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_a_sequence_that_is_handed_over_goes_on(
    family: Any, lone_sequence: Callable[..., Any]
) -> None:
    """The other engine keeps the blocks in other places."""
    folder, token_ids, expected = family
    first, second = (lone_sequence(resolve_model(str(folder)), 96) for _ in range(2))
    first.logits(token_ids[:40])
    second.blocks = first.blocks[::-1].copy()
    second.cache[second.blocks] = first.cache[first.blocks]
    actual = second.logits(token_ids[40:], 40)
    torch.testing.assert_close(actual, expected[40:], atol=1e-3, rtol=1e-3)


def test_every_family_is_compared() -> None:
    """Those that see are compared in `test_models_that_see.py`."""
    blind = {name for name, family in FAMILIES.items() if not family.sees}
    assert {config_of(name).model_type for name in CONFIGS} == blind


NEW = ("SmolLM3Config", "GraniteConfig", "Phi3Config", "Gemma2Config", "Gemma3TextConfig",
       "GptOssConfig")  # fmt: skip
"""Their defaults differ from Llama's."""


@pytest.mark.parametrize("kind", NEW)
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(kind: str) -> None:
    raw = getattr(transformers, kind)().to_dict()
    whole = config_from_hf(raw, {}, {})
    for key in raw.keys() - {"bos_token_id", "eos_token_id", "num_local_experts", "layer_types"}:
        if key == "num_key_value_heads" or (kind == "GptOssConfig" and key == "rope_parameters"):
            continue  # such a file's tensors do not fit; gpt-oss is never without YaRN's numbers
        with suppress(InvalidRequestError):
            rest = {other: value for other, value in raw.items() if other != key}
            assert config_from_hf(rest, {}, {}) == whole, key


def test_a_length_of_training_beside_the_rule_of_rope_is_the_one_that_counts() -> None:
    raw = config_of("phi3 long rope").to_dict()
    other = raw | {
        "rope_parameters": raw["rope_parameters"] | {"original_max_position_embeddings": 9}
    }
    assert config_from_hf(other, {}, {}) == config_from_hf(raw, {}, {})


def test_norms_in_16_bits_lose_nothing_in_float32(
    tmp_path: Path, lone_sequence: Callable[..., Any]
) -> None:
    """Gemma's are stored less one, which 16 bits hold better than the sum."""
    published("gemma3_text", tmp_path).bfloat16().save_pretrained(tmp_path)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.arange(40)[None]).logits[0]
    actual = lone_sequence(resolve_model(str(tmp_path)), 48).logits(list(range(40)))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "granite"])
def test_embeddings_in_bfloat16_are_scaled_as_transformers_does(
    name: str,
    tmp_path: Path,
    lone_sequence: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma's factor is rounded too. The layers add nothing here."""
    model = published(name, tmp_path, {"num_hidden_layers": 1}).bfloat16()
    source, token_ids = resolve_model(str(tmp_path)), torch.arange(40)
    with torch.inference_mode():
        expected = model.model(token_ids[None], output_hidden_states=True).hidden_states[0][0]
    sequence = lone_sequence(source, 48)
    own = build_model(source.config, 48, torch.bfloat16, torch.device("cpu"))
    load_weights(own.slots, source)
    for linear in (each.linear for each in own.packables if "layers" in each.published[0]):
        linear.weight.zero_()
    monkeypatch.setattr(own, "logits", lambda hidden: hidden)
    sequence.model, sequence.cache = own, sequence.cache.bfloat16()
    actual = sequence.logits(token_ids.tolist()).float() * source.config.residual_scale
    torch.testing.assert_close(
        actual, expected.float(), atol=0, rtol=0.0 if "gemma" in name else 0.01
    )


def test_weights_in_shards(tmp_path: Path, lone_sequence: Callable[..., Any]) -> None:
    model = published("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.inference_mode():
        expected = model(torch.arange(10)[None]).logits[0]
    actual = lone_sequence(resolve_model(str(tmp_path)), 16).logits(list(range(10)))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
