"""docs/from-vllm.md says what the code does."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import msgspec
import pytest
from cases import each
from from_vllm_page import NEWER, PAGE, page

from diptych_engine.as_vllm import MODULES
from diptych_protocol import EngineClient, EngineCoreRequestType, FinishReason, SamplingParams


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tests/support/from_vllm_page.py"


def test_the_page_s_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


@each("module", MODULES)
def test_each_name_can_be_imported(module: str) -> None:
    found: Any = import_module(f"diptych_engine.as_vllm.{module}".rstrip("."))
    for name in MODULES[module]:
        assert getattr(found, name) is not None


@pytest.mark.parametrize("name", NEWER)
def test_what_is_newer_is_here_or_is_not(name: str) -> None:
    assert hasattr(EngineClient, name) is NEWER[name][0]


def test_what_is_said_of_the_wire_is_so() -> None:
    assert not hasattr(FinishReason, "REPETITION")
    assert not hasattr(EngineCoreRequestType, "WAKEUP")
    with pytest.raises(msgspec.ValidationError, match="_all_stop_token_ids"):
        msgspec.convert({"_all_stop_token_ids": [2]}, SamplingParams)
