"""Which versions of vLLM the connector was tested with."""

from __future__ import annotations

import re
from typing import Final

from diptych_protocol import InvalidRequestError

TESTED: Final = ("0.32", "0.33")
"""The tested versions. vLLM promises nothing about the methods of a connector: another version may
call other methods, or none, and answer from blocks that nobody filled."""


def series_of(found: str) -> str:
    """Return the tested version that a version of vLLM is: `0.32` for `0.32.1+cpu`.

    Raises `InvalidRequestError` for one that was not tested.
    """
    numbers = re.match(r"\d+\.\d+(?=\.|\+|$)", found)
    if numbers is None or numbers.group() not in TESTED:
        raise InvalidRequestError(
            f"the Diptych connector was tested with vLLM {', '.join(TESTED)}, and this is vLLM "
            f"{found}: install a tested version",
            param="vllm",
        )
    return numbers.group()
