"""The header by which testers choose a revision."""

from __future__ import annotations

import pytest

from diptych_frontend.openai.exchange import Exchange, prompt_options
from diptych_protocol import InvalidRequestError, PromptOptions


def options(*headers: tuple[bytes, bytes]) -> PromptOptions:
    return prompt_options({"headers": list(headers)}, Exchange("r"), None, None)


async def test_it_goes_along_with_the_request() -> None:
    assert options()["trace_headers"] is None
    for side in ("canary", "stable"):
        chosen = options((b"x-diptych-revision", side.encode()))
        assert chosen["trace_headers"] == {"x-diptych-revision": side}


async def test_any_other_value_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must be canary or stable, not 'cannary'"):
        options((b"x-diptych-revision", b"cannary"))
