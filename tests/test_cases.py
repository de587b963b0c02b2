"""A test of many cases tries them all, and says which one fails."""

from __future__ import annotations

import inspect

import pytest
from cases import each

tried: list[int] = []


@each("number, double", [(1, 2), pytest.param(2, 4, id="unread"), (3, 5), (4, 8)], ids="abcd")
def one_is_wrong(number: int, double: int) -> None:
    tried.append(number)
    assert double == 2 * number


@each("number", [(1, 2)])
async def one_that_is_awaited(number: tuple[int, int], other: object) -> None:
    assert number == other


def test_a_failure_names_its_case() -> None:
    tried.clear()
    with pytest.raises(AssertionError) as caught:
        one_is_wrong()
    assert (caught.value.__notes__, tried) == (["case c"], [1, 2, 3])


async def test_a_case_may_be_awaited_and_other_arguments_are_fixtures() -> None:
    assert [*inspect.signature(one_that_is_awaited).parameters] == ["other"]
    await one_that_is_awaited(other=(1, 2))
    with pytest.raises(AssertionError) as caught:
        await one_that_is_awaited(other=())
    assert caught.value.__notes__ == ["case (1, 2)"]
