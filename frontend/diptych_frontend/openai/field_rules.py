"""Decides what becomes of the fields of a request that its struct does not have.

`RULES` of a struct lists those of the known APIs, with the reason why they are refused or ignored;
the table in docs/apis.md is written from it. Any other field is unknown. Client libraries add
fields to the messages of an answer, such as `index` and `parsed_arguments`, and send them back with
the next request: there an unknown field is left out. Elsewhere a service refuses it, or warns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import msgspec
from msgspec.inspect import (
    DictType,
    Field,
    ListType,
    LiteralType,
    StructType,
    Type,
    UnionType,
    type_info,
)

from diptych_protocol import InvalidRequestError

log = logging.getLogger(__name__)

CONVERSATIONS: Final = ("messages", "input")
"""The fields of requests that hold messages."""
MAX_LOGGED: Final = 8
UNKNOWN: Final = "nobody here knows it"
_UNPRINTED = re.compile(r"[^!-~]")
_STEPS: Final = re.compile(r"\[[^\]]*\]|[^.\[]+")


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What becomes of a known field that has no effect on the answer."""

    outcome: Literal["taken", "ignored", "refused"]
    """A field that is taken asks for nothing that a client would miss; its struct has it. One that
    is ignored is left out, with a warning."""
    why: str
    neutral: tuple[object, ...] = ()
    """Values, beside null, that ask for nothing: they are left out, without a warning."""


Rules = Mapping[str, FieldRule]


def refused(why: str, *neutral: object) -> FieldRule:
    return FieldRule("refused", why, neutral)


def ignored(why: str, *neutral: object) -> FieldRule:
    return FieldRule("ignored", why, neutral)


def taken(why: str) -> FieldRule:
    return FieldRule("taken", why)


@dataclass(slots=True)
class LeftOut:
    """Fields that were taken out of a body, by going through it and its types."""

    refuses_unknown: bool
    num_neutral: int = 0
    of_messages: list[str] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Where a field was -> why it has no effect. The client is told."""

    def __bool__(self) -> bool:
        return bool(self.num_neutral or self.of_messages or self.elsewhere)

    def __len__(self) -> int:
        """Return how many fields are counted as ignored."""
        return len(self.of_messages) + len(self.elsewhere)

    def sift(self, value: Any, info: Type, where: str = "", *, is_said: bool = False) -> None:
        """where: the value's place in the body. is_said: it is a part of messages."""
        if isinstance(value, list):
            for items in (arm for arm in _arms(info) if isinstance(arm, ListType)):
                for index, item in enumerate(value if _has_structs(items.item_type) else ()):
                    self.sift(item, items.item_type, f"{where}[{index}]", is_said=is_said)
        elif isinstance(value, dict) and (struct := _struct_of(value, info)) is not None:
            fields = _fields_of(struct.cls)
            for name in [*value]:
                path = f"{where}.{name}" if where else name
                if name in fields:
                    within = is_said or (not where and name in CONVERSATIONS)
                    self.sift(value[name], fields[name].type, path, is_said=within)
                elif name != struct.tag_field and not self._stays(
                    value[name], _rules_of(struct.cls).get(name), _printed(path), is_said
                ):
                    del value[name]

    def _stays(self, value: Any, rule: FieldRule | None, where: str, is_said: bool) -> bool:
        """Note a field that the struct has not. Return whether it stays, for want of a rule."""
        if rule is None:
            if is_said:
                self.of_messages.append(where)
            elif self.refuses_unknown:
                return True
            else:
                self.elsewhere[where] = UNKNOWN
        elif value is None or value in rule.neutral:
            self.num_neutral += 1
        elif rule.outcome == "refused":
            raise InvalidRequestError(
                f"{where} is not supported by this server: {rule.why}",
                param=re.split(r"[.\[]", where, maxsplit=1)[0],
            )
        else:
            self.elsewhere[where] = rule.why
        return False


def leave_out(body: Any, kind: type, *, refuses_unknown: bool) -> LeftOut:
    """Take the fields that have no effect out of a decoded body.

    kind: the struct that the body is to become. refuses_unknown: unknown fields outside of messages
    stay, so that whoever decodes the body refuses them. Raises `InvalidRequestError` for a field
    that is known and refused.
    """
    left_out = LeftOut(refuses_unknown)
    left_out.sift(body, _info_of(kind))
    if left_out.of_messages:
        log.debug("fields of messages that are not known: %s", left_out.of_messages[:MAX_LOGGED])
    return left_out


def choices_at(kind: type, path: str) -> list[str]:
    """Return the values that a field of a body may have, by its path; none if any may be right.

    path: as msgspec writes it, such as `messages[0].role`, without the body.
    """
    choices: list[str] = []
    infos: list[Type] = [_info_of(kind)]
    for step in _STEPS.findall(path):
        choices = [str(x.tag) for x in infos if isinstance(x, StructType) and x.tag_field == step]
        infos = [arm for info in infos for found in _within(info, step) for arm in _arms(found)]
    for info in infos:
        choices += map(str, info.values) if isinstance(info, LiteralType) else ()
    return list(dict.fromkeys(choices))


def _within(info: Type, step: str) -> list[Type]:
    """The types of what one step of a path leads to."""
    if isinstance(info, StructType):
        return [each.type for each in _fields_of(info.cls).values() if each.encode_name == step]
    if isinstance(info, ListType | DictType) and step.startswith("["):
        return [info.item_type if isinstance(info, ListType) else info.value_type]
    return []


def _printed(path: str) -> str:
    """The end of a path, as it may stand in a header."""
    return _UNPRINTED.sub("?", path[-64:])


_info_of: Final = cache(type_info)
"""It takes milliseconds the first time."""


@cache
def _fields_of(kind: type[msgspec.Struct]) -> dict[str, Field]:
    info = _info_of(kind)
    return {each.encode_name: each for each in info.fields} if isinstance(info, StructType) else {}


def _rules_of(kind: type) -> Rules:
    rules: Rules = getattr(kind, "RULES", {})
    return rules


def _has_structs(info: Type) -> bool:
    return any(
        isinstance(arm, StructType) or (isinstance(arm, ListType) and _has_structs(arm.item_type))
        for arm in _arms(info)
    )


def _struct_of(value: dict[str, Any], info: Type) -> StructType | None:
    """Return the struct that an object is to become; None if no struct has its tag."""
    for arm in _arms(info):
        if isinstance(arm, StructType) and (
            arm.tag_field is None or value.get(arm.tag_field) == arm.tag
        ):
            return arm
    return None


def _arms(info: Type) -> tuple[Type, ...]:
    return info.types if isinstance(info, UnionType) else (info,)
