"""Finds which bytes of an answer's text each of its tokens is, and where in the text it begins.

Text is decoded once. A token may have only a part of a character, so the tokens up to the end of a
character are taken together, and share the bytes of the text that they have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diptych_frontend.text.detokenizer import REPLACEMENT
from diptych_protocol import CompletionOutput, Logprob


class AnswerToken(NamedTuple):
    token_id: int
    candidates: dict[int, Logprob]
    said: bytes
    """Its part of the answer. All parts joined are the answer's text in UTF-8, but for bytes that
    are not UTF-8, which the text shows as U+FFFD."""
    offset: int
    """The position in the text of the character in which it begins."""


class AnswerTokens:
    """The tokens of one answer, output by output. A token is told once its text is: a character
    whose end is missing, or the possible beginning of a stop string, holds it back."""

    def __init__(self) -> None:
        self._text = ""
        """The text that belongs to no token yet."""
        self._begin = 0
        """Where that begins in the answer, in characters."""
        self._held: list[tuple[int, dict[int, Logprob], int]] = []
        """The tokens that were not told yet: id, candidates, and where their text ends."""

    def push(self, output: CompletionOutput) -> list[AnswerToken]:
        """Return the tokens whose text is known now."""
        rows, ends = output.logprobs or (), output.text_ends
        if rows and ends is None:  # the answer has no text
            shown = zip(output.token_ids, rows, strict=True)
            return [AnswerToken(token, row, b"", 0) for token, row in shown]
        if ends is not None:
            self._held += zip(output.token_ids, rows, ends, strict=True)
        self._text += output.text
        told: list[AnswerToken] = []
        first, begin, known = 0, self._begin, self._begin + len(self._text)
        for number, (_, _, end) in enumerate(self._held, 1):
            if end > known:
                break
            if end > begin:
                told += self._shares(first, number, begin, end)
                first, begin = number, end
        if output.finished and first < len(self._held):
            # A stop string may have cut off the last part of their text.
            told += self._shares(first, len(self._held), begin, known)
            first, begin = len(self._held), known
        del self._held[:first]
        self._text, self._begin = self._text[begin - self._begin :], begin
        return told

    def _shares(self, first: int, last: int, begin: int, end: int) -> list[AnswerToken]:
        """What these of the held tokens have of the text that they have made together."""
        held = self._held[first:last]
        text = self._text[begin - self._begin : end - self._begin]
        parts = parts_of(text, [row[token].token_bytes or b"" for token, row, _ in held])
        told, characters = [], 0
        for (token, row, _), part in zip(held, parts, strict=True):
            is_inside = part[:1] != b"" and is_continuation(part[0])
            offset = min(max(begin + characters - is_inside, begin), end)
            told.append(AnswerToken(token, row, part, offset))
            characters += sum(not is_continuation(byte) for byte in part)
        return told


def is_continuation(byte: int) -> bool:
    """Whether a byte of UTF-8 belongs to a character that an earlier one has begun."""
    return byte & 0xC0 == 0x80


def parts_of(text: str, tokens: Sequence[bytes]) -> list[bytes]:
    """Return what each of the tokens has of the text that they have made together."""
    said, written = text.encode(), b"".join(tokens)
    if written.endswith(said):  # a decoder may leave a sentence's first space out
        begin = len(written) - len(said)
    elif written.startswith(said):
        begin = 0
    elif REPLACEMENT in text:  # some of the bytes are not UTF-8
        begin, said = 0, _shown_as(text, written)
    else:  # a decoder may write a token in another way than alone
        return [*[b""] * (len(tokens) - 1), said]
    parts, at = [], -begin
    for token in tokens:
        parts.append(token[max(-at, 0) : max(len(said) - at, 0)])
        at += len(token)
    return parts


def _shown_as(text: str, written: bytes) -> bytes:
    """The first of these bytes, which a text with U+FFFD shows; if that is unclear, all of them."""
    beginnings = (written[:size] for size in range(len(written), -1, -1))
    return next((part for part in beginnings if part.decode(errors="replace") == text), written)
