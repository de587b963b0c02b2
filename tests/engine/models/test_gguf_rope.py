"""GGUF files with scaled RoPE give the logits of transformers' own class with the same rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
import transformers  # its classes are imported when they are used
from gguf import GGUFWriter
from model_kit.gguf import HEAD_DIM, SIZES, random_tensors, save_gguf, unquantised

from diptych_frontend.model_files.gguf_header import read_header
from diptych_frontend.model_files.model_source import resolve_model
from diptych_protocol import InvalidRequestError

TRAINED: Final = 32
TOKENS: Final = [7 * position % 64 for position in range(100)]
LLAMA3: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}


def config_of(rule: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        **SIZES, rms_norm_eps=1e-6, rope_parameters={"rope_theta": 10000.0, **rule}
    )


def logits_of(rule: dict[str, Any]) -> torch.Tensor:
    """As transformers computes them."""
    model = transformers.LlamaForCausalLM(config_of(rule)).eval()
    model.load_state_dict(random_tensors())
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def add_divisors(writer: GGUFWriter, kept: int = HEAD_DIM // 2) -> None:
    """What llama.cpp's converter makes of the rule of Llama 3.1."""
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        config_of(LLAMA3), device=torch.device("cpu")
    )
    writer.add_tensor("rope_freqs.weight", (frequencies / scaled)[:kept].numpy())


def add_linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def add_nameless(writer: GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 4.0)


def add_yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(TRAINED)


def add_own_yarn(writer: GGUFWriter) -> None:
    add_yarn(writer)
    writer.add_rope_scaling_attn_factors(0.5)
    writer.add_rope_scaling_yarn_beta_fast(8.0)
    writer.add_rope_scaling_yarn_beta_slow(0.5)


@pytest.mark.parametrize(
    ("add", "rule"),
    [
        pytest.param(add_divisors, LLAMA3, id="llama3"),
        pytest.param(add_linear, {"rope_type": "linear", "factor": 4.0}, id="linear"),
        pytest.param(add_nameless, {"rope_type": "linear", "factor": 4.0}, id="old linear"),
        pytest.param(add_yarn, YARN, id="yarn"),
        pytest.param(
            add_own_yarn,
            YARN | {"beta_fast": 8, "beta_slow": 0.5, "attention_factor": 0.5 * 1.138629},
            id="yarn of its own kind",
        ),
    ],
)
def test_logits_equal_transformers(
    add: Callable[[GGUFWriter], None],
    rule: dict[str, Any],
    tmp_path: Path,
    lone_sequence: Callable[..., Any],
) -> None:
    uri = save_gguf(tmp_path / "model.gguf", unquantised, add)
    actual = lone_sequence(resolve_model(uri), 128).logits(TOKENS)
    expected = logits_of(rule)
    assert (expected - logits_of({"rope_type": "default"})).abs().max() > 0.1
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def add_divisors_and_yarn(writer: GGUFWriter) -> None:
    add_yarn(writer)
    add_divisors(writer)


def add_few_divisors(writer: GGUFWriter) -> None:
    add_divisors(writer, kept=4)


def add_extrapolation(writer: GGUFWriter) -> None:
    add_yarn(writer)
    writer.add_rope_scaling_yarn_ext_factor(0.5)


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (add_divisors_and_yarn, "yarn beside the tensor rope_freqs.weight"),
        (add_few_divisors, "rope_freqs.weight has 4 values, not 8"),
        (add_extrapolation, "yarn_ext_factor"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused_by_name(
    add: Callable[[GGUFWriter], None], says: str, tmp_path: Path
) -> None:
    uri = save_gguf(tmp_path / "model.gguf", unquantised, add)
    with pytest.raises(InvalidRequestError, match=says):
        resolve_model(uri)


def test_divisors_are_not_read_where_only_the_header_is(tmp_path: Path) -> None:
    path = Path(save_gguf(tmp_path / "model.gguf", unquantised, add_divisors))
    divisors = read_header(path).raw_tensors[0]
    path.write_bytes(path.read_bytes()[: divisors.offset + 8])
    assert resolve_model(str(path), weights=False).config.head_dim == HEAD_DIM
    with pytest.raises(InvalidRequestError, match=r"rope_freqs\.weight ends after the file"):
        resolve_model(str(path))
