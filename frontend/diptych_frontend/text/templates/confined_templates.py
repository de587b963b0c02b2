"""Renders conversations by a model's chat template, in a process of its own: `python -m` of this
module.

A template is a program of the model's author. It may loop for ever, or make a text of a gigabyte in
one step, and be so when its constants are folded, before it is rendered.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any, Final, NoReturn

import msgspec

from diptych_frontend.confined.child import WorkBounds, serve
from diptych_frontend.confined.processes import ConfinedWork, WorkFailedError
from diptych_frontend.text.templates.chat_template import ChatTemplate
from diptych_protocol import InvalidRequestError

BOUNDS: Final = WorkBounds(
    memory_bytes=512 << 20, seconds=5, message_bytes=64 << 20, idle_seconds=3600
)
"""8,192 messages of a body of 4 MiB take 42 ms. The first chat after an hour waits for a process to
start; an idle one has 24 MB."""


class Refused(msgspec.Struct, array_like=True):
    """The head of an answer that is not the text."""

    why: str
    param: str | None


_work: Final = ConfinedWork("diptych_frontend.text.templates.confined_templates", BOUNDS)


def get_ready() -> None:
    """Start a process, so that the first chat need not wait for it."""
    _work.start()


class ConfinedTemplate:
    """A chat template whose source is run by another process only."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._known_by = pickle.dumps((source, bos_token, eos_token))

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """See `ChatTemplate.render`. Also raises `InvalidRequestError` for a source that is not a
        template, and for one that takes too much time or memory with these messages."""
        try:
            # What callers give may be more than JSON: calls have `Arguments`.
            asked = pickle.dumps((messages, options))
        except Exception as exc:  # objects decide themselves how this fails
            _refuse(f"messages that cannot be sent to a process: {exc}")
        try:
            head, text = _work.ask(self._known_by, asked)
        except WorkFailedError as exc:
            _refuse(f"the model's chat template fails with these messages: {exc}")
        if head:
            refused = msgspec.msgpack.decode(head, type=Refused)
            raise InvalidRequestError(refused.why, param=refused.param)
        return text.decode("utf-8", "surrogatepass")


def _refuse(why: str) -> NoReturn:
    raise InvalidRequestError(why, param="messages")


@functools.lru_cache(4)
def _known(template: bytes) -> ChatTemplate:
    return ChatTemplate(*pickle.loads(template))


def _answer(template: bytearray, asked: bytearray) -> tuple[bytes, memoryview]:
    messages, options = pickle.loads(asked)  # by our own owner
    try:
        text = _known(bytes(template)).render(messages, **options)
    except InvalidRequestError as exc:
        return msgspec.msgpack.encode(Refused(str(exc), exc.param)), memoryview(b"")
    return b"", memoryview(text.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    serve(_answer)
