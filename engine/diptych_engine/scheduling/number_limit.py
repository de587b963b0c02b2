"""Limits the numbers of an answer in JSON, because nothing in a schema limits their digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

MAX_DIGITS: Final = 24
"""After this many digits in a row, a number must continue with something else if its form allows
that. All integers of 64 bits have fewer digits, and 17 identify a float of 64 bits exactly."""
_BEGINS_WITH_DIGIT: Final = r"[0-9](?s:.)*"
_QUOTE, _BACKSLASH, _ZERO, _NINE = b'"\\09'


@dataclass(frozen=True, slots=True)
class Digits:
    """The tokens of a vocabulary that consist of digits."""

    tokens: LLTokenizer
    first: NDArray[np.uint8]
    """One bit for each token, the lowest of a byte first: those that begin with a digit."""

    @classmethod
    def of(cls, tokens: LLTokenizer) -> Digits:
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_regex(_BEGINS_WITH_DIGIT), log_level=0)
        return cls(tokens, np.frombuffer(matcher.compute_bitmask(), np.uint8))


class NumberLimit:
    """Follows one answer in JSON."""

    def __init__(self, digits: Digits) -> None:
        self._digits = digits
        self._run = 0
        """Digits in a row, outside of strings."""
        self._in_string = self._escaped = False

    def take(self, token: int) -> None:
        for byte in self._digits.tokens.decode_bytes([token]):
            if self._in_string:
                self._in_string = self._escaped or byte != _QUOTE
                self._escaped = byte == _BACKSLASH and not self._escaped
            else:
                self._in_string = byte == _QUOTE
                self._run = self._run + 1 if _ZERO <= byte <= _NINE else 0

    def without_more(self, allowed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the tokens that may come next, given those that the answer's form allows."""
        if self._run < MAX_DIGITS:
            return allowed
        others = allowed & ~self._digits.first
        return others if others.any() else allowed
