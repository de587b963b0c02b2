"""The real model's tokenizer, loaded once for all front-end tests."""

from __future__ import annotations

import pytest

from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.text.renderer import TextRenderer
from diptych_frontend.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_source(smollm2: str) -> ModelSource:
    return resolve_model(smollm2)


@pytest.fixture(scope="session")
def text_renderer(model_source: ModelSource) -> TextRenderer:
    return TextRenderer(model_source)


@pytest.fixture(scope="session")
def tokenizer(text_renderer: TextRenderer) -> Tokenizer:
    assert text_renderer.tokenizer is not None
    return text_renderer.tokenizer
