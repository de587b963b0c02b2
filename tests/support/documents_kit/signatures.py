"""Holds a signature of ours beside the one that a document writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD = inspect.Parameter.KEYWORD_ONLY
REQUIRED = inspect.Parameter.empty


def written(text: str, names: Mapping[str, Any] | None = None) -> inspect.Signature:
    """The signature of `(a, b=1, *, c=None)`; `names` are what its defaults may refer to."""
    scope: dict[str, Any] = dict(names or {})
    exec(f"def function{text}: ...", scope)
    return inspect.signature(scope["function"])


def differences(document: inspect.Signature, ours: Callable[..., Any]) -> list[str]:
    """Why a call that the document allows would fail here, or mean something else.

    Ours may have further parameters, which have defaults and follow the document's, and a default
    where the document has none.
    """
    theirs, own = list(document.parameters.values()), inspect.signature(ours).parameters
    order = [name for name, each in own.items() if each.kind is POSITIONAL]
    found = []
    for index, each in enumerate(theirs):
        mine = own.get(each.name)
        if mine is None:
            found.append(f"{each.name} is missing")
            continue
        if each.kind is POSITIONAL and order[index : index + 1] != [each.name]:
            found.append(f"{each.name} is not at place {index} of {order}")
        if each.kind is KEYWORD and mine.kind not in (KEYWORD, POSITIONAL):
            found.append(f"{each.name} is {mine.kind.description}")
        if each.default is not REQUIRED and mine.default != each.default:
            found.append(f"{each.name} defaults to {mine.default!r}, not {each.default!r}")
    known = {each.name for each in theirs}
    found += [
        f"{name} is required, which the document does not know"
        for name, mine in own.items()
        if name not in known and mine.default is REQUIRED and mine.kind in (POSITIONAL, KEYWORD)
    ]
    return found
