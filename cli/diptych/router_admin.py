"""What both commands ask of the admin ports of routers, and how they put the answers together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from diptych_protocol import UNREADABLE

LIST_PATH: Final = "/admin/requests"

T = TypeVar("T")
Get = Callable[[str], tuple[int, bytes]]
"""From a path to the status and the body of a router's answer. Raises `RouterError`."""


class RouterError(Exception):
    """A router cannot be asked, or refuses; `str()` says why."""


class UnknownRequestError(RouterError):
    """The routers remember no request of this id."""


class _Refusal(msgspec.Struct):
    message: str = ""


class _Refused(msgspec.Struct):
    error: _Refusal = msgspec.field(default_factory=_Refusal)


def path_of(request_id: str) -> str:
    return f"{LIST_PATH}/{quote(request_id, safe='')}/why"


def ask_all(
    routers: Iterable[tuple[str, Get]], path: str, kind: type[T]
) -> tuple[list[tuple[str, T]], list[str]]:
    """The answers by the routers' names, and what is wrong with routers that did not answer.

    Raises `UnknownRequestError` if all that answer know nothing of it, `RouterError` if none does.
    """
    found: list[tuple[str, T]] = []
    problems: list[str] = []
    unknown: str = ""
    for name, get in routers:
        try:
            status, body = get(path)
            if status == 200:
                found.append((name, msgspec.json.decode(body, type=kind)))
            elif status == 404:
                unknown = _message(body)
            else:
                problems.append(f"{name}: HTTP {status}: {_message(body)}")
        except (RouterError, *UNREADABLE) as exc:
            problems.append(f"{name}: {exc}")
    if found:
        return found, problems
    if unknown:
        raise UnknownRequestError("; ".join([unknown, *problems]))
    raise RouterError("; ".join(problems) or "there is no router to ask")


def _message(body: bytes) -> str:
    try:
        said = msgspec.json.decode(body, type=_Refused).error.message
    except UNREADABLE:
        said = ""
    return said or body[:200].decode(errors="replace")
