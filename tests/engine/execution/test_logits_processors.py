"""Functions of the operator's own change logits, by name and for the requests that name them."""

from __future__ import annotations

import pytest
from engine_kit.core import core_request, generate, make_core, run, tokens
from engine_kit.logits_processors import NAMES

from diptych_engine.execution.row_options import load_processors
from diptych_protocol import InvalidRequestError, SamplingParams

COUNT, REPEAT, FAIL, SHRINK = NAMES
PROMPT = [7, 8, 9]


def test_a_request_gets_what_its_functions_leave() -> None:
    core = make_core(logits_processors=NAMES)
    plain = generate(core, PROMPT, max_tokens=4)
    outputs = run(
        core,
        core_request("counts", PROMPT, max_tokens=4, logits_processors=[COUNT]),
        core_request("repeats", PROMPT, max_tokens=4, logits_processors=[COUNT, REPEAT]),
        core_request("plain", PROMPT, max_tokens=4),
    )
    assert tokens(outputs["counts"]) == [10, 11, 12, 13]
    assert tokens(outputs["repeats"]) == [7, 8, 9, 7], "the last one has the last word"
    assert tokens(outputs["plain"]) == plain


@pytest.mark.parametrize(("name", "words"), [(FAIL, "nothing suits me"), (SHRINK, "size")])
def test_a_function_that_fails_costs_its_request_and_no_other(name: str, words: str) -> None:
    core = make_core(logits_processors=NAMES)
    outputs = run(
        core,
        core_request("fails", PROMPT, max_tokens=4, logits_processors=[name]),
        core_request("counts", PROMPT, max_tokens=4, logits_processors=[COUNT]),
    )
    assert words in (outputs["fails"][-1].error or "")
    assert tokens(outputs["counts"]) == [10, 11, 12, 13]


def test_a_request_may_name_only_what_the_engine_has() -> None:
    """A client could otherwise have the engine run anything that is installed there."""
    core = make_core(logits_processors=[COUNT])
    for name in (REPEAT, "os:system"):
        [outputs] = run(core, core_request("r", PROMPT, logits_processors=[name])).values()
        assert "none of this engine's functions" in (outputs[-1].error or "")
        assert outputs[-1].error_param == "logits_processors"
    with pytest.raises(InvalidRequestError, match="at most 16 functions"):
        SamplingParams(logits_processors=[COUNT] * 17).check_processors([COUNT])


@pytest.mark.parametrize("name", ["no_such_module:f", "engine_kit.core:nothing", "os:getcwd"])
def test_an_engine_does_not_start_with_what_is_no_such_function(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="logits_processors"):
        load_processors([name])
