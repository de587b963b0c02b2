"""The order of a step's tokens: generated ones first and each for itself, then prompts."""

from __future__ import annotations

import pytest

from diptych_engine.execution.batch_rows import order_of
from diptych_engine.scheduling.request import Request, ScheduledRequest
from diptych_protocol import SamplingParams

PROMPT = 5


def share(name: str, start: int, count: int, *, samples: bool = True) -> ScheduledRequest:
    request = Request(
        request_id=name, client=b"", params=SamplingParams(), token_ids=[0] * (start + count),
        num_prompt_tokens=PROMPT, eos_token_id=None, max_total_tokens=99, seed=0,
    )  # fmt: skip
    return ScheduledRequest(request, start, count, samples)


@pytest.mark.parametrize(
    ("planned", "decodes", "chunks"),
    [
        pytest.param(
            [("a", 7, 1), ("b", 5, 1)], [("a", 7, True), ("b", 5, True)], [], id="decodes"
        ),
        pytest.param([("a", 0, 5)], [], [("a", 0, 5, True)], id="a prompt"),
        pytest.param([("a", 4, 1)], [], [("a", 4, 1, True)], id="the last token of a prompt"),
        pytest.param(
            [("a", 0, 5), ("b", 6, 1)], [("b", 6, True)], [("a", 0, 5, True)], id="both"
        ),
        pytest.param(
            [("a", 5, 3)], [("a", 5, False), ("a", 6, False), ("a", 7, True)], [], id="again"
        ),
        pytest.param(
            [("a", 2, 5)], [("a", 5, False), ("a", 6, True)], [("a", 2, 3, False)],
            id="a prompt and what followed it",
        ),
    ],
)  # fmt: skip
def test_what_a_token_is_decides_how_it_is_computed(
    planned: list[tuple[str, int, int]],
    decodes: list[tuple[str, int, bool]],
    chunks: list[tuple[str, int, int, bool]],
) -> None:
    shares, num_decodes = order_of([share(*given) for given in planned])
    actual = [(s.request.request_id, s.start, s.num_tokens, s.samples) for s in shares]
    assert actual[:num_decodes] == [(name, start, 1, last) for name, start, last in decodes]
    assert actual[num_decodes:] == chunks


def test_shares_that_are_all_decodes_are_left_as_they_are() -> None:
    planned = [share("a", 7, 1), share("b", 5, 1)]
    assert order_of(planned)[0] is planned
