"""The tokens of a batch are those that its answers tell."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych_frontend.batches_api.api_types import BatchUsage, InputDetails, OutputDetails
from diptych_frontend.batches_api.journal import Told, added

BEFORE = BatchUsage(1, InputDetails(1), 1, OutputDetails(1), 2)


def told(response: Any) -> Told:
    return msgspec.convert({"custom_id": "a", "response": response}, Told)


@pytest.mark.parametrize(
    ("usage", "after"),
    [
        (
            {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
             "prompt_tokens_details": {"cached_tokens": 4}},
            BatchUsage(6, InputDetails(5), 4, OutputDetails(1), 10),
        ),
        (
            {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3,
             "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 8},
            BatchUsage(6, InputDetails(5), 4, OutputDetails(3), 10),
        ),
        (
            {"prompt_tokens": 5, "total_tokens": 5},
            BatchUsage(6, InputDetails(1), 1, OutputDetails(1), 7),
        ),
        (None, BEFORE),
    ],
)  # fmt: skip
def test_each_route_tells_its_usage_in_its_own_words(usage: Any, after: BatchUsage) -> None:
    assert added(BEFORE, told({"status_code": 200, "body": {"usage": usage}})) == after


@pytest.mark.parametrize("response", [None, {"status_code": 400, "body": {"error": {}}}])
def test_what_was_not_answered_has_no_usage(response: Any) -> None:
    assert added(BEFORE, told(response)) == BEFORE
