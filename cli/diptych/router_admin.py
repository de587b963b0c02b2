"""Asks the admin ports of routers and merges the answers, for `diptych` and `kubectl diptych`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from diptych_protocol import UNREADABLE

LIST_PATH: Final = "/admin/requests"
LOAD_PATH: Final = "/admin/load"
MAX_CHARS: Final = 200
"""Characters of a router's refusal that are told."""

T = TypeVar("T")
Get = Callable[[str], tuple[int, bytes]]
"""A function from a path to the status and the body of a router's answer. Raises `RouterError`."""


@dataclass(frozen=True, slots=True)
class Told(Generic[T]):
    """The answer of one router."""

    router: str
    """The pod's name."""
    known: T


class RouterError(Exception):
    """A router cannot be asked, or refuses. `str()` says why."""


class UnknownRequestError(RouterError):
    """No router has recorded a request of this id."""


class _Refusal(msgspec.Struct):
    message: str = ""


class _Refused(msgspec.Struct):
    error: _Refusal = msgspec.field(default_factory=_Refusal)


def path_of(request_id: str) -> str:
    return f"{LIST_PATH}/{quote(request_id, safe='')}/why"


def ask_all(
    routers: Iterable[tuple[str, Get]], path: str, kind: type[T]
) -> tuple[list[Told[T]], list[str]]:
    """Return the answers, and an error for each router that did not answer.

    Raises `UnknownRequestError` if none of them knows it, `RouterError` if none answers.
    """
    found: list[Told[T]] = []
    problems: list[str] = []
    unknown: str = ""
    for name, get in routers:
        try:
            status, body = get(path)
            if status == 200:
                found.append(Told(name, msgspec.json.decode(body, type=kind)))
            elif status == 404:
                unknown = message_of(body)[:MAX_CHARS]
            else:
                problems.append(f"{name}: HTTP {status}: {message_of(body)[:MAX_CHARS]}")
        except (RouterError, *UNREADABLE) as exc:
            problems.append(f"{name}: {exc}")
    if found:
        return found, problems
    if unknown:
        raise UnknownRequestError("; ".join([unknown, *problems]))
    raise RouterError("; ".join(problems) or "there is no router to ask")


def message_of(body: bytes) -> str:
    """Return the message of an error in the form of OpenAI's API; any other body as it is."""
    try:
        said = msgspec.json.decode(body, type=_Refused).error.message
    except UNREADABLE:
        said = ""
    return said or body.decode(errors="replace")
