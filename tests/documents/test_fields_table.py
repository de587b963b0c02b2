"""Every field that the official clients and vLLM can send is known, or in docs/apis.md."""

from __future__ import annotations

from typing import Any

import pytest
from fields_table import BEGIN, PAGE, known_fields, page
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from diptych_frontend.anthropic.api_types import CountTokensRequest, MessagesRequest
from diptych_frontend.openai.api_types import ChatCompletionRequest, CompletionRequest
from diptych_frontend.openai.embeddings import EmbeddingRequest
from diptych_frontend.responses_api.api_types import ResponsesRequest

HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of Anthropic's client that are headers."""
OF_VLLM = (
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "prompt_logprobs", "allowed_token_ids", "bad_words", "add_special_tokens", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
    "guided_decoding_backend", "guided_whitespace_pattern", "structured_outputs", "priority",
    "request_id", "logits_processors", "return_tokens_as_token_ids", "return_token_ids",
    "cache_salt", "kv_transfer_params", "vllm_xargs",
)  # fmt: skip
CHATS_OF_VLLM = (
    "include_reasoning", "add_generation_prompt", "continue_final_message", "documents",
    "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "echo",
    "thinking_token_budget",
)  # fmt: skip


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


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_every_field_of_vllm_is_known(kind: Any) -> None:
    assert not {*OF_VLLM} - known_fields(kind)
    assert not {*CHATS_OF_VLLM} - known_fields(ChatCompletionRequest)
