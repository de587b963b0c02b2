"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.types import Scope

from diptych_frontend.anthropic.answers import MessageWriter
from diptych_frontend.anthropic.api_types import CountTokensRequest, MessagesRequest
from diptych_frontend.anthropic.conversation import TranslatedChat, as_chat
from diptych_frontend.openai.chat import ChatApi
from diptych_frontend.openai.exchange import header
from diptych_frontend.openai.generation import Sound
from diptych_frontend.openai.responses import AnswerWriter
from diptych_protocol import InvalidRequestError, Renderer

VERSIONS: Final = ("2023-06-01", "2026-10-21")
"""The supported versions of the API. The newer one removes three things: fields for sampling, which
stay available here, and two uses of blocks that were never offered here."""


def check_version(scope: Scope) -> None:
    """Raise `InvalidRequestError` for a client that uses another version of the API."""
    version = header(scope, b"anthropic-version")
    if version is not None and version not in VERSIONS:
        raise InvalidRequestError(
            f"anthropic-version: this server speaks {' and '.join(VERSIONS)}, not {version[:40]!r}"
        )


class MessagesApi:
    """The `Api` of /v1/messages, which translates to and from chats."""

    body_type = MessagesRequest
    image_word = b'"image'
    prompt_field = "messages"

    def __init__(self, chat: ChatApi) -> None:
        self._chat = chat
        self.params, self.render, self.options = chat.params, chat.render, chat.options

    def request(self, body: MessagesRequest, scope: Scope) -> TranslatedChat:
        return _as_chat(self._chat, body, scope)

    def writer(
        self, sound: Sound[MessagesRequest, TranslatedChat], request_id: str, created: int
    ) -> AnswerWriter:
        [prompt] = sound.prompts
        parts = self._chat.parts(sound.request, prompt)
        body = sound.body
        return MessageWriter(f"msg_{request_id}", body.model, body.max_tokens, parts)


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


def counted(
    chat: ChatApi, renderer: Renderer, body: CountTokensRequest, scope: Scope
) -> TokenCount:
    """Count the tokens of a prompt. Raises `InvalidRequestError`."""
    [prompt] = chat.render(_as_chat(chat, body, scope), renderer)
    return TokenCount(len(prompt["prompt_token_ids"]))


def _as_chat(chat: ChatApi, body: CountTokensRequest, scope: Scope) -> TranslatedChat:
    check_version(scope)
    return chat.request(as_chat(body), scope)
