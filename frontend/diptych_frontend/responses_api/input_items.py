"""Lists the input of a stored response, page by page: `GET /v1/responses/ID/input_items`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from diptych_frontend.responses_api.api_types import Item, Message
from diptych_protocol import InvalidRequestError

MAX_LIMIT: Final = 100
DEFAULT_LIMIT: Final = 20
_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class InputItems(msgspec.Struct, kw_only=True):
    """A page of input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(response_id: str, items: Sequence[Item], query: Mapping[str, str]) -> InputItems:
    """Return the items that a client asks for by `limit`, `order` and `after`, by default the
    newest first. Raises `InvalidRequestError` naming the parameter."""
    told = [_told(response_id, number, item) for number, item in enumerate(items)]
    if _one_of(query, "order", ("desc", "asc")) == "desc":
        told.reverse()
    begin = _begin(query.get("after"), [item["id"] for item in told])
    limit = _limit(query.get("limit"))
    shown = told[begin : begin + limit]
    return InputItems(
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(told) > begin + limit,
    )


def _told(response_id: str, number: int, item: Item) -> dict[str, Any]:
    """An item as plain values, with an id and with content in parts."""
    value: dict[str, Any] = msgspec.to_builtins(item)
    own = f"{_PREFIXES[value['type']]}_{response_id.removeprefix('resp_')}_{number}"
    value = {name: each for name, each in value.items() if each is not None} | {"id": own}
    if isinstance(item, Message):
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            value["content"] = [{"type": kind, "text": item.content}]
        value["status"] = item.status or "completed"
    return value


def _begin(after: str | None, ids: Sequence[str]) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise InvalidRequestError(f"after: there is no item {after[:100]!r}", param="after")
    return ids.index(after) + 1


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 5 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequestError(f"limit must be 1 to {MAX_LIMIT}", param="limit")
    return limit


def _one_of(query: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    """A parameter that has few values, of which the first is the default."""
    value = query.get(name, values[0])
    if value not in values:
        raise InvalidRequestError(f"{name} must be {' or '.join(values)}", param=name)
    return value
