"""Tests of many small cases. On the import path of the tests."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest


def each(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    ids: Iterable[object] | Callable[[Any], object] = repr,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `pytest.mark.parametrize`, for cases that take less time than pytest does for a test: they
    are one, and share its other fixtures. A failure names its case."""
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    values = [_values(row, len(given)) for row in rows]
    told = ["-".join(str(ids(x)) for x in each) for each in values] if callable(ids) else [*ids]
    cases = [(name, dict(zip(given, x, strict=True))) for name, x in zip(told, values, strict=True)]
    assert cases, "it would test nothing"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        rest = [x for x in signature.parameters.values() if x.name not in given]
        assert len(rest) == len(signature.parameters) - len(given), "a test takes all its values"

        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            for name, case in cases:
                with _case(name):
                    test(*args, **fixtures, **case)

        @functools.wraps(test)
        async def run_async(*args: Any, **fixtures: Any) -> None:
            for name, case in cases:
                with _case(name):
                    await test(*args, **fixtures, **case)

        tries = run_async if inspect.iscoroutinefunction(test) else run
        vars(tries)["__signature__"] = signature.replace(parameters=rest)
        return tries

    return decorate


def _values(row: Any, count: int) -> Sequence[Any]:
    if isinstance(row, type(pytest.param())):
        assert not row.marks, "a case with a mark is a test of its own"
        return row.values
    return [row] if count == 1 else row


@contextlib.contextmanager
def _case(name: object) -> Iterator[None]:
    try:
        yield
    except BaseException as exc:
        exc.add_note(f"case {name!s:.1000}")
        raise
