"""Every field that the official clients and vLLM can send is known, or in docs/apis.md."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fields_table import BEGIN, PAGE, known_fields, page
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from vllm_kit.environment import ENVIRONMENT, START_S, VENV, needs_vllm

from diptych_frontend.anthropic.api_types import CountTokensRequest, MessagesRequest
from diptych_frontend.openai.api_types import ChatCompletionRequest, CompletionRequest
from diptych_frontend.openai.embeddings import EmbeddingRequest
from diptych_frontend.responses_api.api_types import ResponsesRequest

HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of Anthropic's client that are headers."""
PRINTS = Path(__file__).parents[1] / "support" / "vllm_kit" / "print_fields.py"
FIELDS = PRINTS.with_name("fields.json")
OF_VLLM: dict[str, Any] = json.loads(FIELDS.read_text())
KINDS: dict[str, type[msgspec.Struct]] = {
    "ChatCompletionRequest": ChatCompletionRequest,
    "CompletionRequest": CompletionRequest,
    "ResponsesRequest": ResponsesRequest,
    "EmbeddingCompletionRequest": EmbeddingRequest,
    "AnthropicMessagesRequest": MessagesRequest,
    "AnthropicCountTokensRequest": CountTokensRequest,
}


def test_the_table_is_up_to_date() -> None:
    assert BEGIN in PAGE.read_text()
    assert PAGE.read_text() == page(), "run python tests/support/fields_table.py"


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
        (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
    ],
)
def test_every_field_of_openais_client_is_known(params: Any, kind: Any) -> None:
    assert not {*params.__annotations__} - known_fields(kind)


def test_every_field_of_anthropics_client_is_known() -> None:
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta

    for params, kind in (
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (beta.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    ):
        assert not {*params.__annotations__} - known_fields(kind) - HEADERS


def printed() -> dict[str, Any]:
    """What the vLLM that is installed says itself."""
    done = subprocess.run(
        [VENV / "bin" / "python", PRINTS], env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE, check=True, timeout=START_S,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(
    "ask",
    [lambda: OF_VLLM, pytest.param(printed, marks=[*needs_vllm, pytest.mark.timeout(START_S)])],
)
def test_every_field_of_vllm_is_known(ask: Callable[[], dict[str, Any]]) -> None:
    told = ask()
    assert told["fields"].keys() == KINDS.keys()
    for name, fields in told["fields"].items():
        assert not {*fields.split()} - known_fields(KINDS[name]), name
    if told["version"] == OF_VLLM["version"]:
        assert told == OF_VLLM, f"write what {PRINTS} prints into {FIELDS}"
