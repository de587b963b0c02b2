"""Renders conversations by a model's chat template, in a process: `python -m` of this module.

A template is a program by the model's author. It may loop for ever, or make a gigabyte of text in
one step, even while its constants are folded, before it is rendered.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from diptych_frontend.confined.processes import ConfinedWork, WorkBounds, WorkFailedError, serve
from diptych_protocol import InvalidRequestError

if TYPE_CHECKING:
    from diptych_frontend.text.templates.chat_template import ChatTemplate

BOUNDS: Final = WorkBounds(
    memory_bytes=512 << 20, seconds=5, message_bytes=64 << 20, idle_seconds=3600
)
"""8,192 messages of a body of 4 MiB take 42 ms. An idle process has 24 MB; after an hour without
chats it ends, and the next chat waits for a new one."""


class Arguments(dict[str, Any]):
    """The arguments of a call: an object for templates that use one, and JSON for those that insert
    it into text."""

    def __init__(self, arguments: dict[str, Any], written: str) -> None:
        """written: the JSON that the client sent."""
        super().__init__(arguments)
        self._written = written

    def __str__(self) -> str:
        return self._written

    def __add__(self, after: object) -> str:
        return self._written + after if isinstance(after, str) else NotImplemented

    def __radd__(self, before: object) -> str:
        return before + self._written if isinstance(before, str) else NotImplemented


class TemplateRefusal(msgspec.Struct, array_like=True):
    """The head of an answer that is not the text."""

    why: str
    param: str | None


_work: Final = ConfinedWork("diptych_frontend.text.templates.confined_templates", BOUNDS)


def get_ready() -> None:
    """Start a process, so that the first chat need not wait for it."""
    _work.start()


class ConfinedTemplate:
    """A chat template whose source is run in another process only."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._known_by = json.dumps((source, bos_token, eos_token)).encode()

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """See `ChatTemplate.render`. Also raises `InvalidRequestError` for a source that is not a
        template, and for one that takes too much time or memory with these messages."""
        try:
            asked = json.dumps((messages, _written(messages), options)).encode()
        except (TypeError, ValueError, RecursionError) as exc:
            _refuse(f"messages that are not JSON: {exc}")
        try:
            head, text = _work.ask(self._known_by, asked)
        except WorkFailedError as exc:
            _refuse(f"the model's chat template fails with these messages: {exc}")
        if head:
            refused = msgspec.msgpack.decode(head, type=TemplateRefusal)
            raise InvalidRequestError(refused.why, param=refused.param)
        return text.decode("utf-8", "surrogatepass")


def _written(messages: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """The JSON of each call's arguments, by message and call: it does not travel with the object
    that they are, too."""
    return [
        (at, number, str(function["arguments"]))
        for at, message in enumerate(messages)
        if isinstance(message, dict) and isinstance(calls := message.get("tool_calls"), list)
        for number, call in enumerate(calls)
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict)
        if isinstance(function.get("arguments"), Arguments)
    ]


def _refuse(why: str) -> NoReturn:
    raise InvalidRequestError(why, param="messages")


@functools.lru_cache(4)
def _known(template: bytes) -> ChatTemplate:
    # Only this process needs Jinja.
    from diptych_frontend.text.templates.chat_template import ChatTemplate

    return ChatTemplate(*json.loads(template))


def _answer(template: bytearray, asked: bytearray) -> tuple[bytes, memoryview]:
    messages, written, options = json.loads(asked)
    for message, call, text in written:
        function = messages[message]["tool_calls"][call]["function"]
        function["arguments"] = Arguments(function["arguments"], text)
    try:
        text = _known(bytes(template)).render(messages, **options)
    except InvalidRequestError as exc:
        return msgspec.msgpack.encode(TemplateRefusal(str(exc), exc.param)), memoryview(b"")
    return b"", memoryview(text.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    serve(_answer)
