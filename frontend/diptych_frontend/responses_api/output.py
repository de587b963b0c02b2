"""Builds the output items of a response, and the events that report them."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final, Literal

import msgspec

from diptych_frontend.openai.responses import encode
from diptych_frontend.responses_api.api_types import Status
from diptych_frontend.tool_calls.calls import ParsedCall


class _Typed(msgspec.Struct, tag_field="type"):
    """An item or a part of one."""


class OutputText(_Typed, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(_Typed, tag="reasoning_text"):
    text: str


class OutputMessage(_Typed, tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputReasoning(_Typed, tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[Any] = []


class OutputCall(_Typed, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = OutputMessage | OutputReasoning | OutputCall


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int = 0


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfPart(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any] = []


class TextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[Any] = []


class ReasoningDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(Event, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


OUTPUT_EVENTS: Final = (
    ItemAdded, PartAdded, TextDelta, TextDone, ReasoningDelta, ReasoningDone, ArgumentsDelta,
    ArgumentsDone, PartDone, ItemDone,
)  # fmt: skip


class NewIds:
    """Makes the ids of a response and of its items, which nobody can guess."""

    def __init__(self, secret: str = "") -> None:
        """secret: with the same one, they are the same again."""
        self._secret = (secret or secrets.token_hex(16)).encode()
        self._num_made = 0

    def new(self, kind: str, size: int = 12) -> str:
        """Return an id with so many bytes."""
        self._num_made += 1
        made = hashlib.blake2b(b"%d" % self._num_made, key=self._secret, digest_size=size)
        return f"{kind}_{made.hexdigest()}"


class Output:
    """The growing items of a response, of which one is open at a time."""

    def __init__(self, ids: NewIds) -> None:
        self._ids = ids
        self.done: list[OutputItem] = []
        self._open: OutputMessage | OutputReasoning | None = None
        self._pieces: list[str] = []
        """The text of the open item."""
        self._blanks = ""
        """Blanks that are an item only if something follows them."""
        self.num_events = 0

    def event(self, event: Event) -> bytes:
        """Return the event with the next sequence number."""
        event.sequence_number = self.num_events
        self.num_events += 1
        tag = str(event.__struct_config__.tag).encode()
        return b"event: " + tag + b"\ndata: " + encode(event) + b"\n\n"

    def add_reasoning(self, text: str) -> bytes:
        """Add more of the model's reasoning."""
        begin = b""
        if not isinstance(self._open, OutputReasoning):
            begin = self._begin(OutputReasoning(self._ids.new("rs"), [], "in_progress"))
        self._pieces.append(text)
        return begin + self.event(ReasoningDelta(delta=text, **self._place()))

    def add_text(self, text: str) -> bytes:
        """Add more of the answer's text."""
        begin = b""
        if not isinstance(self._open, OutputMessage):
            text = self._blanks + text
            if not text.strip():
                self._blanks = text
                return b""
            begin = self._begin(OutputMessage(self._ids.new("msg"), [], "in_progress"))
        self._pieces.append(text)
        return begin + self.event(TextDelta(delta=text, **self._place()))

    def add_call(self, call: ParsedCall) -> bytes:
        """Add a whole call."""
        before = self.close("completed")
        index = len(self.done)
        item = OutputCall(self._ids.new("fc"), self._ids.new("call"), call.name, "", "in_progress")
        added = self.event(ItemAdded(output_index=index, item=item))
        item.arguments, item.status = call.arguments, "completed"
        self.done.append(item)
        arguments = call.arguments
        events = (
            ArgumentsDelta(item_id=item.id, output_index=index, delta=arguments),
            ArgumentsDone(item_id=item.id, output_index=index, name=call.name, arguments=arguments),
            ItemDone(output_index=index, item=item),
        )
        return before + added + b"".join(map(self.event, events))

    def close(self, status: Status) -> bytes:
        """End the item that is open, if one is."""
        item, self._blanks = self._open, ""
        if item is None:
            return b""
        text, place = "".join(self._pieces), self._place()
        events: list[Event] = []
        if isinstance(item, OutputMessage):
            item.content = [OutputText(text)]
            events = [TextDone(text=text, **place), PartDone(part=item.content[0], **place)]
        else:
            item.content = [ReasoningText(text)]
            events = [ReasoningDone(text=text, **place), PartDone(part=item.content[0], **place)]
        item.status = status
        events.append(ItemDone(output_index=len(self.done), item=item))
        self.done.append(item)
        self._open = None
        self._pieces.clear()
        return b"".join(map(self.event, events))

    def _begin(self, item: OutputMessage | OutputReasoning) -> bytes:
        before = self.close("completed")
        self._open = item
        part = OutputText("") if isinstance(item, OutputMessage) else ReasoningText("")
        added = ItemAdded(output_index=len(self.done), item=item)
        return before + self.event(added) + self.event(PartAdded(part=part, **self._place()))

    def _place(self) -> dict[str, Any]:
        item_id = "" if self._open is None else self._open.id
        return {"item_id": item_id, "output_index": len(self.done)}
