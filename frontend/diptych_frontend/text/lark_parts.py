"""Finds parts of a Lark grammar that match no text, so that an answer could not continue or end.

llguidance compiles such grammars. So this module makes grammars from the parts and lets llguidance
find whether they match any text. Each literal matches a text exactly if all of them joined do.
Rules match texts exactly if they do with the empty text for each literal in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_LITERAL: Final = re.compile(
    r"""
    (?P<comment> //[^\n]* | \#[^\n]* )
  | (?P<embedded> %(?:json|regex|llguidance)\b\s* )
  | (?P<string> "(?:\\.|[^"\\\n])*"i? (?:\s*\.\.\s*"(?:\\.|[^"\\\n])*")? )
  | (?P<regex> /(?:\\.|[^/\\\n])+/[a-z]* )
  | (?P<special> <[^<>\s]+> )
    """,
    re.VERBOSE,
)
_STATEMENT: Final = re.compile(
    r"^[ \t]*(?:%(?P<directive>\w+)|[?!]*(?P<name>[A-Za-z_][\w-]*)[^:\n]*:)", re.MULTILINE
)
_NAME: Final = re.compile(r"[A-Za-z_][\w-]*")
_STAND_IN: Final = "LITERAL_{}_"
_EMPTY: Final = '""'
_START: Final = "start"


@dataclass(slots=True)
class _Grammar:
    rules: dict[str, str] = field(default_factory=dict)
    terminals: list[str] = field(default_factory=list)
    """Statements that terminals need."""
    literals: dict[str, str] = field(default_factory=dict)
    """The literals, by the names that stand for them in `rules`."""
    schemas: list[Any] = field(default_factory=list)

    def names_in(self, rule: str) -> list[str]:
        return _NAME.findall(self.rules.get(rule, ""))

    def used_rules(self) -> list[str]:
        used = {_START: None}
        queue = [_START]
        while queue:
            for name in self.names_in(queue.pop()):
                if name in self.rules and name not in used:
                    used[name] = None
                    queue.append(name)
        return list(used)

    def written(self, name: str) -> str:
        """A terminal as it stands in the grammar."""
        return self.literals.get(name, name)


def embedded_schemas(lark: str) -> list[Any]:
    """Return the JSON schemas that a grammar embeds."""
    return _read(lark).schemas


def part_without_text(lark: str, has_text: Callable[[str], bool]) -> str | None:
    """Return a rule or a terminal that is used and that matches no text; None if there is none.

    has_text: whether a grammar in Lark's notation matches any text.
    """
    grammar = _read(lark)
    used = grammar.used_rules()
    terminals = dict.fromkeys(
        name
        for rule in used
        for name in grammar.names_in(rule)
        if _is_terminal(name) and grammar.written(name)[0] != '"'
    )
    definitions = "\n".join(grammar.terminals)

    def have_texts(names: Sequence[str]) -> bool:
        joined = " ".join(grammar.written(name) for name in names)
        return has_text(f"start: JOINED_\nJOINED_: {joined}\n{definitions}\n")

    bad = _first_bad(list(terminals), have_texts)
    if bad is not None:
        return grammar.written(bad)
    bodies = "\n".join(f"{_renamed(rule)}: {_emptied(grammar.rules[rule])}" for rule in used)

    def rules_have_texts(names: Sequence[str]) -> bool:
        return has_text(f"start: {' '.join(map(_renamed, names))}\n{bodies}\n")

    return _first_bad(used, rules_have_texts)


def _first_bad(names: list[str], are_good: Callable[[Sequence[str]], bool]) -> str | None:
    """The first name with which the names before it are not good any more."""
    if not names or are_good(names):
        return None
    good, bad = 0, len(names)
    while bad - good > 1:
        middle = (good + bad) // 2
        if are_good(names[:middle]):
            good = middle
        else:
            bad = middle
    return names[good]


def _read(lark: str) -> _Grammar:
    grammar = _Grammar()
    text = _named_literals(lark, grammar)
    statements = list(_STATEMENT.finditer(text))
    ends = [statement.start() for statement in statements[1:]] + [len(text)]
    for statement, end in zip(statements, ends, strict=True):
        name = statement["name"]
        if name is not None and not _is_terminal(name):
            grammar.rules[name] = text[statement.end() : end].strip()
        elif name is not None or statement["directive"] == "import":
            whole = text[statement.start() : end]
            grammar.terminals.append(_NAME.sub(lambda m: grammar.written(m[0]), whole))
    return grammar


def _named_literals(lark: str, grammar: _Grammar) -> str:
    """The text with a name in the place of each literal."""
    pieces: list[str] = []
    position = 0
    while (match := _LITERAL.search(lark, position)) is not None:
        pieces.append(lark[position : match.start()])
        position = match.end()
        if match["comment"]:
            continue
        if match["embedded"]:
            value, position = json.JSONDecoder().raw_decode(lark, position)
            if match[0].startswith("%json"):
                grammar.schemas.append(value)
            if not match[0].startswith("%regex"):
                pieces.append(" " if match[0].startswith("%llguidance") else _EMPTY)
                continue
        elif match["special"]:
            pieces.append(_EMPTY)
            continue
        name = _STAND_IN.format(len(grammar.literals))
        grammar.literals[name] = lark[match.start() : position]
        pieces.append(f" {name} ")
    pieces.append(lark[position:])
    return "".join(pieces)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _renamed(rule: str) -> str:
    return "start_" if rule == _START else rule


def _emptied(body: str) -> str:
    """A rule in which each literal is the empty text."""
    return _NAME.sub(lambda m: _EMPTY if _is_terminal(m[0]) else _renamed(m[0]), body)
