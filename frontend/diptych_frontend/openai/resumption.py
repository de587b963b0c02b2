"""The ids of a stream's events, and what a client that comes back with one gets.

An id says how many tokens were told so far, and has a digest of them, of the prompt and of the
parameters. So the tokens that engines kept are compared with what the client has, and a text never
goes on with another one. The answer's name in it is secret: whoever has it may go on.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from diptych_protocol import InvalidRequestError, KeptAnswer, RequestOutput, SamplingParams

RESUMABLE_HEADER: Final = "x-diptych-resumable"
"""The header of a client that wants ids, on its first request and when it comes back."""
LAST_ID_HEADER: Final = "last-event-id"

_ID: Final = re.compile(
    r"(?P<name>[0-9a-f]{32})\.(?P<told>[0-9]{1,9})\.(?P<digest>[0-9a-f]{16})"
    r"\.(?P<created>[0-9]{1,12})\.(?P<request_id>[\x21-\x7e]{1,128})"
)


class EventIds:
    """Gives the events of one answer their ids."""

    def __init__(self, name: str, created: int, request_id: str, asked: bytes) -> None:
        """asked: stands for the prompt and the parameters, see `asked_for`."""
        self.name, self.created, self.request_id = name, created, request_id
        self._digest = hashlib.blake2b(asked, digest_size=8)
        self._num_told = 0

    @classmethod
    def new(cls, created: int, request_id: str, asked: bytes) -> EventIds:
        """Return the ids of a new answer."""
        return cls(secrets.token_hex(16), created, request_id, asked)

    def saw(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the answer."""
        self._digest.update(array("i", token_ids).tobytes())
        self._num_told += len(token_ids)

    def marked(self, output: RequestOutput, event: bytes) -> bytes:
        """Return an output's event, if it has one, with its id."""
        self.saw(output.outputs[0].token_ids)
        return b"id: %b\n%b" % (self.last.encode(), event) if event else event

    @property
    def last(self) -> str:
        """The id of the event with the last token that was counted."""
        told, digest = self._num_told, self._digest.hexdigest()
        return f"{self.name}.{told}.{digest}.{self.created}.{self.request_id}"


def read_id(last_id: str, asked: bytes) -> tuple[EventIds, int]:
    """Return the ids of the answer that an id belongs to, and how many tokens its client has.

    Raises `InvalidRequestError` for an id that no event had.
    """
    read = _ID.fullmatch(last_id)
    if read is None:
        raise InvalidRequestError("Last-Event-ID is no id of an event here", param="Last-Event-ID")
    ids = EventIds(read["name"], int(read["created"]), read["request_id"], asked)
    return ids, int(read["told"])


def choose_kept(
    found: Collection[KeptAnswer], last_id: str, asked: bytes
) -> tuple[EventIds, KeptAnswer]:
    """Return the longest of the answers that begin with what the client has.

    Raises `InvalidRequestError`: 404 if that is on no engine any more, 409 if an answer to another
    request, or of other tokens, is there.
    """
    ids, num_told = read_id(last_id, asked)
    found = [kept for kept in found if len(kept.token_ids) >= num_told]
    if not found:
        raise not_kept()
    fitting = []
    for kept in found:
        ids, kept.num_told = read_id(last_id, asked)
        ids.saw(kept.token_ids[:num_told])
        if ids.last == last_id:
            fitting.append(kept)
    if not fitting:
        raise InvalidRequestError(
            "the rest that is there continues another request or another beginning; ask anew",
            param="Last-Event-ID",
            status=409,
            code="another_answer",
        )
    ids, _ = read_id(last_id, asked)
    return ids, max(fitting, key=lambda kept: (len(kept.token_ids), kept.finish_reason is not None))


def not_kept() -> InvalidRequestError:
    """Return the error for a client whose answer has no rest."""
    return InvalidRequestError(
        "no engine has the rest of this answer any more; ask for it anew",
        param="Last-Event-ID",
        status=404,
        code="answer_not_kept",
    )


def asked_for(prompt_token_ids: Sequence[int], params: SamplingParams) -> bytes:
    """Return what differs for different prompts and parameters."""
    prompt = array("i", prompt_token_ids).tobytes()
    return hashlib.blake2b(prompt + msgspec.msgpack.encode(params)).digest()
