"""The ids of a stream's events, and what a client that comes back with one gets.

An id says how many tokens were told so far, and has a digest of them, of the prompt and of the
parameters. So the tokens that engines kept are compared with what the client has, and a text never
goes on with another one. The answer's name in it is secret: whoever has it may go on.

An output may have several events. An id in their midst also says how many tokens the output had,
and how many of its events the client has. The answer's writer reads the tokens before it again,
perhaps in other pieces, so how many events they had is in the id, too.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from diptych_protocol import (
    InvalidRequestError,
    KeptAnswer,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)

RESUMABLE_HEADER: Final = "x-diptych-resumable"
"""The header of a client that wants ids, on its first request and when it comes back."""
LAST_ID_HEADER: Final = "last-event-id"

_ID: Final = re.compile(
    r"(?P<name>[0-9a-f]{32})\.(?P<told>[0-9]{1,9})\.(?P<digest>[0-9a-f]{16})"
    r"\.(?P<begun>[0-9]{1,9})\.(?P<had>[0-9]{1,9})\.(?P<events>[0-9]{1,9})"
    r"\.(?P<cached>[0-9]{1,9})\.(?P<created>[0-9]{1,12})\.(?P<request_id>[\x21-\x7e]{1,128})"
)


class EventIds:
    """Gives the events of one answer their ids."""

    def __init__(self, name: str, created: int, request_id: str, asked: bytes) -> None:
        """asked: stands for the prompt and the parameters, see `asked_for`."""
        self.name, self.created, self.request_id = name, created, request_id
        self.num_cached_tokens = 0
        """Those of the prompt."""
        self.num_events = 0
        """Those of the outputs so far."""
        self.num_had = 0
        """So many of the next events are at the client already."""
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

    def digest(self, token_ids: Sequence[int] = ()) -> str:
        """Return the digest of what was counted and of these tokens."""
        digest = self._digest.copy()
        digest.update(array("i", token_ids).tobytes())
        return digest.hexdigest()

    def marked(self, events: bytes, output: RequestOutput | None = None) -> bytes:
        """Return the events of an output, or those at the end, with ids, without those that the
        client has."""
        num_tokens = 0
        if output is not None:
            token_ids = output.outputs[0].token_ids
            self.num_cached_tokens, num_tokens = output.num_cached_tokens, len(token_ids)
            self.saw(token_ids)
        *each, _ = events.split(b"\n\n")
        if not each:
            return b""
        first = f"{self.name}.{self._num_told}.{self.digest()}"
        last = f"{self.num_cached_tokens}.{self.created}.{self.request_id}"
        marked = []
        for number, event in enumerate(each, 1):
            place = f"{num_tokens}.{number}.{self.num_events}"
            if output is not None and number == len(each):
                place = f"0.0.{self.num_events + number}"
            if number > self.num_had:
                marked.append(b"id: %b\n%b\n\n" % (f"{first}.{place}.{last}".encode(), event))
        self.num_events += len(each)
        self.num_had = 0
        return b"".join(marked)


def read_id(last_id: str, asked: bytes) -> tuple[EventIds, re.Match[str]]:
    """Return the ids with which the answer of an id goes on, and the parts of the id.

    Raises `InvalidRequestError` for an id that no event had.
    """
    read = _ID.fullmatch(last_id)
    if read is None:
        raise InvalidRequestError("Last-Event-ID is no id of an event here", param="Last-Event-ID")
    ids = EventIds(read["name"], int(read["created"]), read["request_id"], asked)
    ids.num_cached_tokens, ids.num_events = int(read["cached"]), int(read["events"])
    ids.num_had = int(read["had"])
    return ids, read


def choose_kept(
    found: Collection[KeptAnswer], last_id: str, asked: bytes
) -> tuple[EventIds, KeptAnswer]:
    """Return the longest of the answers that begin with what the client has.

    Raises `InvalidRequestError`: 404 if that is on no engine any more, 409 if an answer to another
    request, or of other tokens, is there.
    """
    ids, read = read_id(last_id, asked)
    num_told = int(read["told"])
    found = [kept for kept in found if len(kept.token_ids) >= num_told]
    if not found:
        raise not_kept()
    fitting = [x for x in found if ids.digest(x.token_ids[:num_told]) == read["digest"]]
    if not fitting:
        raise InvalidRequestError(
            "the rest that is there continues another request or another beginning; ask anew",
            param="Last-Event-ID",
            status=409,
            code="another_answer",
        )
    kept = max(fitting, key=lambda x: (len(x.token_ids), x.finish_reason is not None, x.is_unpaid))
    kept.num_told = max(num_told - int(read["begun"]), 0)
    kept.num_cached_tokens = ids.num_cached_tokens
    return ids, kept


def not_kept() -> InvalidRequestError:
    """Return the error for a client whose answer has no rest."""
    return InvalidRequestError(
        "no engine has the rest of this answer any more; ask for it anew",
        param="Last-Event-ID",
        status=404,
        code="answer_not_kept",
    )


def asked_for(prompt: TokensPrompt, adapter: LoRARequest | None, params: SamplingParams) -> bytes:
    """Return what differs for different prompts, images, adapters and parameters."""
    tokens = array("i", prompt["prompt_token_ids"]).tobytes()
    more = [each.identifier for each in prompt.get("mm_features", ())]
    if adapter is not None:
        more.append(adapter.lora_name)
    content = (
        tokens + msgspec.msgpack.encode(params) + (msgspec.msgpack.encode(more) if more else b"")
    )
    return hashlib.blake2b(content).digest()
