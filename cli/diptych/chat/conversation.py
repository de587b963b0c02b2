"""The messages of a conversation, and its next turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import httpx

from diptych.answer_stream import stream_chat
from diptych.api_service import Service

TIMEOUT: Final = httpx.Timeout(connect=5.0, read=120.0, write=10.0, pool=5.0)
Message = dict[str, Any]
"""A message as in the API: `role`, and `content` that is a text or a list of parts."""


class Conversation:
    """A conversation. The service stores none, so each turn sends all of it."""

    def __init__(self, service: Service, options: dict[str, Any], system: str | None) -> None:
        self._service = service
        self._body = {"model": service.model, **options}
        self.system = system or ""
        """The system message; empty: none."""
        self.turns: list[Message] = []
        self.images: list[str] = []
        """Data URLs that go with the next message."""

    @property
    def messages(self) -> list[Message]:
        """All messages, as they are sent."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns]

    def replace(self, messages: Sequence[Message]) -> None:
        """Continue another conversation, whose first message may be the system's."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else ""
        self.turns = list(messages[1:] if has_system else messages)
        self.images = []

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns, self.images = [], []

    async def say(self, text: str, show: Callable[[str], None]) -> None:
        """Send a message and show the answer as it arrives.

        A turn that fails or is cut short leaves no trace in the conversation. Raises `AnswerError`.
        """
        asked = {"role": "user", "content": _content(text, self.images)}
        self.images = []
        answer: list[str] = []
        body = self._body | {"messages": [*self.messages, asked]}
        async with (
            httpx.AsyncClient(timeout=TIMEOUT, **self._service.client) as client,
            aclosing(stream_chat(client, self._service.url, body)) as pieces,
        ):
            async for piece in pieces:
                answer.append(piece.text)
                show(piece.text)
        self.turns += [asked, {"role": "assistant", "content": "".join(answer)}]


def _content(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}} for url in images
    ]
    return [*parts, {"type": "text", "text": text}]
