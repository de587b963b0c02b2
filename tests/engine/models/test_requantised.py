"""The real model in the mixtures of types that llama.cpp's quantiser makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.gguf_files import mixture, requantised
from benchmarks.quality import DATA, PACKED_CACHE, divergence, load, log_probabilities
from engine_kit.core import core_request, make_core, run
from gguf import GGMLQuantizationType as Kind
from model_kit.quantised import quantise
from model_kit.questions import WHOLE

from diptych_engine.models import build_model, load_weights
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_kernels.cpu_level import CpuLevel, machine_level
from diptych_kernels.packed_product import is_available

LAYERS, TOKENS = 30, 128
TOLERATED = 2e-3 if machine_level() is CpuLevel.AMX else 1e-4  # its products round both factors
"""Mean KL that packing may cost, beside the dequantised model in float32."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="nothing is packed on this processor"),
]


@pytest.mark.parametrize(
    "base", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS], ids=lambda kind: kind.name
)
def test_a_requantised_model_stays_packed_and_answers(
    smollm2: str, tmp_path: Path, base: Kind
) -> None:
    original = resolve_model(smollm2).path
    assert original is not None
    path = requantised(original, tmp_path / "model.gguf", mixture(base, LAYERS), quantise)
    source = resolve_model(path)
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    model = load(source, TOKENS)
    assert all(packable.linear.packed is not None for packable in model.packables)

    token_ids = tokenizer.encode((DATA / "alice.txt").read_text())[:TOKENS]
    plain = build_model(source.config, TOKENS, torch.float32, torch.device("cpu"))
    load_weights(plain.slots, source)
    wanted = log_probabilities(plain, source, token_ids, torch.float32, TOKENS)
    for prompt in (TOKENS, 0):
        found = log_probabilities(model, source, token_ids, PACKED_CACHE, prompt)
        assert float(divergence(wanted, found).mean()) < TOLERATED

    chat = tokenizer.render_chat([{"role": "user", "content": WHOLE.words}])
    prompt_ids = tokenizer.encode(chat, add_special_tokens=False)
    core = make_core(path, weight_packing="auto", max_model_len=128)
    try:
        outputs = run(core, core_request("a", prompt_ids, max_tokens=7))["a"]
    finally:
        core.close()
    answer = tokenizer.decode([token for each in outputs for token in each.new_token_ids])
    assert answer.startswith(WHOLE.answer)
