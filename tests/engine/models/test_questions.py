"""No test, nor the demo, expects words of the real model that a near tie decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from model_kit.questions import MARGIN, QUESTIONS, Question

from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_protocol import EngineConfig

MAX_TOKENS = 128


@pytest.fixture(scope="module")
def source(smollm2: str) -> ModelSource:
    return resolve_model(smollm2)


@pytest.fixture(scope="module")
def sequence(source: ModelSource, lone_sequence: Callable[..., Any]) -> Any:
    """The model in float32, which `test_model_smollm2.py` compares with that of transformers."""
    return lone_sequence(source, MAX_TOKENS)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.words)
def test_each_token_of_an_expected_answer_leads_by_a_margin(
    sequence: Any, smollm2: str, question: Question
) -> None:
    renderer = InputProcessor.of(EngineConfig(smollm2)).renderer
    words = question.words
    prompt = (
        renderer.render_chat([{"role": "user", "content": words}])
        if question.chat
        else renderer.render_prompt(words)
    )["prompt_token_ids"]
    answer = renderer.render_prompt(question.answer)["prompt_token_ids"]
    margins: dict[str, float] = {}
    logits = sequence.logits([*prompt, *answer])[len(prompt) - 1 :]
    for token, row in zip(answer, logits, strict=False):
        (first, second), (best, _) = row.topk(2)
        assert renderer.decode([int(best)]) == renderer.decode([token]), margins
        margins[renderer.decode([token])] = float(first - second)
    if question.ends:
        first, second = logits[-1].topk(2).values
        assert int(logits[-1].argmax()) in renderer.get_tokenizer().eos_token_ids
        margins["the end"] = float(first - second)
    assert min(margins.values()) > MARGIN, margins
