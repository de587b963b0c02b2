"""Models, and the demo's question, at every level of instructions that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.core import core_request, make_core, run
from model_kit.questions import DEMO

from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_kernels.cpu_level import CpuLevel, forced, machine_level
from diptych_protocol import InvalidRequestError

TEXT = Path(__file__).parents[3] / "README.md"


@pytest.fixture(scope="module")
def source(smollm2: str) -> ModelSource:
    return resolve_model(smollm2)


@pytest.fixture(scope="module")
def token_ids(source: ModelSource) -> list[int]:
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    return tokenizer.encode(TEXT.read_text())[:100]


@pytest.fixture(scope="module")
def exact(source: ModelSource, token_ids: list[int], lone_sequence: Callable[..., Any]) -> Any:
    with forced(CpuLevel.NONE):
        return lone_sequence(source, 112).logits_in_chunks(token_ids, [97, 1, 1, 1])


@pytest.mark.parametrize("packs", [False, True], ids=["float32", "packed"])
def test_a_model_gives_the_same_logits(
    level: CpuLevel,
    source: ModelSource,
    token_ids: list[int],
    exact: torch.Tensor,
    lone_sequence: Callable[..., Any],
    packs: bool,
) -> None:
    """Chunks and decodes, in torch alone and by the kernels of each level; where weights are packed
    or would be, keys and values are rounded."""
    sequence = lone_sequence(source, 112, packs=packs)
    packed = [packable.linear.packed is not None for packable in sequence.model.packables]
    assert set(packed) == {packs and level > CpuLevel.NONE}
    logits = sequence.logits_in_chunks(token_ids, [97, 1, 1, 1])
    distance = float((logits - exact).norm() / exact.norm())
    assert distance < (0.05 if packs else 1e-4)


def test_engines_of_all_levels_exchange_kv(level: CpuLevel, smollm2: str) -> None:
    """Where nothing is packed, too, keys and values are kept as packed engines keep them."""
    core = make_core(smollm2, weight_packing="auto", max_model_len=64, cpu_level=level.word)
    try:
        assert core.runner.kv_dtype_name == "bfloat16"  # type: ignore[attr-defined]
    finally:
        core.close()


def test_the_demo_question_is_answered(level: CpuLevel, smollm2: str, source: ModelSource) -> None:
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    chat = tokenizer.render_chat([{"role": "user", "content": DEMO.words}])
    prompt = tokenizer.encode(chat, add_special_tokens=False)
    core = make_core(smollm2, weight_packing="auto", max_model_len=128, cpu_level=level.word)
    try:
        outputs = run(core, core_request("a", prompt, max_tokens=7))["a"]
        assert core.stats().cpu_level == level.word
    finally:
        core.close()
    answer = tokenizer.decode([token for each in outputs for token in each.new_token_ids])
    assert answer.startswith(DEMO.answer)


def test_activations_of_8_bits_are_used_where_the_processor_multiplies_bytes(
    level: CpuLevel, smollm2: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere the log says so, and answers are as without."""
    core = make_core(
        smollm2, weight_packing="auto", max_model_len=64, cpu_level=level.word, activations="q8"
    )
    try:
        model = core.runner.model  # type: ignore[attr-defined]
        rounded = {packable.linear.input_bits for packable in model.packables}
        assert rounded == ({8} if level >= CpuLevel.VNNI else {16})
        assert ("activations q8 does nothing here" in caplog.text) == (level < CpuLevel.VNNI)
    finally:
        core.close()


def test_activations_of_8_bits_do_nothing_where_no_weights_are_packed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = make_core(weight_packing="none", max_model_len=64, activations="q8")
    core.close()
    assert "it needs packed weights of 4 to 8 bits" in caplog.text


@pytest.mark.skipif(machine_level() is CpuLevel.AMX, reason="this machine has all levels")
def test_a_level_that_the_machine_has_not_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"cpu_level is amx, but this machine has"
    ) as told:
        make_core(cpu_level="amx")
    assert told.value.param == "cpu_level"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cpu_level must be auto, none, avx2"):
        make_core(cpu_level="sse2")
