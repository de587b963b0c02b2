"""Makes the requests of a run and their times. A seed gives the same workload for every server."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from diptych.errors import BadInputError
from diptych_protocol import UNREADABLE

MAX_TOKENS: Final = 1_000_000
MAX_DATASET_BYTES: Final = 256 << 20
WORDS: Final = [
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be",
    "by", "on", "not", "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an",
    "they", "which", "one", "you", "were", "all", "her", "she", "there", "would", "their", "we",
    "him", "been", "has", "when", "who", "will", "no", "more", "if", "out", "so", "up", "said",
    "what", "its", "about", "than", "into", "them", "can", "only", "other", "time", "new", "some",
    "could", "these", "two", "may", "first", "then", "do", "any", "like", "my", "now", "over",
    "such", "our", "man", "me", "even", "most", "made", "after", "also", "did", "many", "off",
    "before", "must", "well", "back", "through", "years", "where", "much", "your", "way", "down",
    "should", "because", "long",
]  # fmt: skip
"""Frequent words, each of which is one token of nearly every vocabulary."""
_LENGTHS: Final = re.compile(r"(\d{1,7})(?::(\d{1,7}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, or a range whose values are equally likely."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse `N` or `LEAST:MOST`. Raises `ValueError`."""
        found = _LENGTHS.fullmatch(text.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= MAX_TOKENS:
            raise ValueError(f"{text!r} is neither a number of tokens nor a range such as 64:256")
        return cls(least, most)

    def draw(self, rng: random.Random) -> int:
        """Draw one of the values."""
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request's body that differ between requests."""

    messages: Sequence[dict[str, Any]]
    max_tokens: int


def made_up(prompt: Lengths, output: Lengths, shared_tokens: int, seed: int) -> Iterator[Request]:
    """Yield endless requests of random words, of which the first `shared_tokens` are the same in
    all. A prompt has about as many tokens as words, plus those of the chat's template."""
    shared = random.Random(f"{seed}").choices(WORDS, k=shared_tokens)
    for number in itertools.count():
        rng = random.Random(f"{seed}/{number}")
        own = max(1, prompt.draw(rng) - shared_tokens)
        text = " ".join([*shared, *rng.choices(WORDS, k=own)])
        yield Request([{"role": "user", "content": text}], output.draw(rng))


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def of_file(path: Path, output: Lengths, seed: int) -> list[Request]:
    """Return the requests of a file of JSON lines, in an order that depends on the seed.

    Raises `BadInputError`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DATASET_BYTES + 1)
    except OSError as exc:
        raise BadInputError(str(exc)) from exc
    if len(content) > MAX_DATASET_BYTES:
        raise BadInputError(f"{path} has more than {MAX_DATASET_BYTES >> 20} MiB")
    lines = content.splitlines()
    rng = random.Random(seed)
    found = [
        _request(f"{path}, line {number}", line, output.draw(rng))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise BadInputError(f"{path} has no requests")
    rng.shuffle(found)
    return found


def _request(where: str, line: bytes, max_tokens: int) -> Request:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except UNREADABLE as exc:
        raise BadInputError(f"{where}: {exc}") from exc
    if (found.prompt is None) == (found.messages is None):
        raise BadInputError(f"{where}: give either prompt or messages")
    if not 1 <= (found.max_tokens or max_tokens) <= MAX_TOKENS:
        raise BadInputError(f"{where}: max_tokens must be 1 to {MAX_TOKENS}")
    messages = found.messages or [{"role": "user", "content": found.prompt}]
    return Request(messages, found.max_tokens or max_tokens)


def arrivals(rate: float | None, seed: int) -> Iterator[float]:
    """Yield the seconds from the start at which each request comes: at random, `rate` a second on
    average (a Poisson process). None: all come at the start."""
    rng = random.Random(seed)
    now = 0.0
    while True:
        yield now
        now += rng.expovariate(rate) if rate else 0.0
