"""Guesses the next tokens of a request, and how many guesses are worth it.

An answer that repeats its prompt, such as an edit of code, goes on as the prompt did after the same
last tokens (prompt lookup; A. Saxena, 2023). Otherwise a draft model guesses, when the step is
computed (`execution.drafter`). A step computes guessed tokens beside the last known
one, each in a row of its own, as the decode that it will be if the guess is right. From each row
the next token is sampled as it would be without guesses: with the same random number, and with what
its options make of the tokens before. So guesses change when tokens come, and never which,
except where a product of more rows rounds otherwise, as in bfloat16 on a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_protocol import SpeculativeConfig

HALF_LIFE: Final = 64
"""After this many tokens, a guess counts half in the estimate of the next ones."""
LOOK_AGAIN: Final = 8
"""Where steps run ahead, a request whose last token would not have been guessed does not look for
guesses again before it has so many more tokens."""
TO_DRAFT: Final = -1
"""Stands for a guess until the draft model has made it."""
DRAFTS_ARE_RIGHT: Final = 0.8
"""How often, as long as a request had none of late: so high, because only a guess can tell."""

# What guesses may lose, in steps.
FIRST_STAKE: Final = 1.0
"""Before they have won or lost anything."""
MOST_AT_STAKE: Final = 4.0
"""However much they have won."""
ALLOWANCE: Final = 0.01
"""This much more with each step, so that guesses that lost all are tried again."""
DEEPEST: Final = -1.0
"""What they lose beyond that is forgotten, or a disturbance would end them for long."""

# The usual time of a step without guesses.
KNOWN_AFTER: Final = 3
"""It is known after so many of them."""
KNOWN_FOR: Final = 32
"""After so many steps with guesses it must be measured again."""
LEARNED_FROM: Final = 8
"""It is the mean of about so many."""
SLOWEST: Final = 1.5
"""A step that takes more than so many times as long as expected was disturbed; no more counts."""


def look_up(
    tokens: NDArray[np.int32], shortest: int, longest: int, count: int
) -> NDArray[np.int32]:
    """Return `count` tokens that may follow: those after the last place where the most of the last
    tokens stood before, or none if fewer than `shortest` did.

    More than `longest` are not compared. If the tokens end before there are `count`, they go on as
    a period.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = 1
    while length < longest and len(ends) > (length >= shortest):  # a last one is the best
        ends_of_more = ends if ends[0] >= length else ends[1:]
        ends_of_more = ends_of_more[tokens[ends_of_more - length] == tokens[last - length]]
        if not len(ends_of_more):
            break
        ends, length = ends_of_more, length + 1
    if length < shortest or not len(ends):
        return tokens[:0]
    begin = int(ends[-1]) + 1
    found = tokens[begin : begin + count]
    return found if len(found) == count else np.resize(found, count)


def rows_of_guess(draft_share: float, rows: int, spare_rows: float) -> float:
    """Return how many rows take as long as a guess beside so many: its own, and its part of a step
    of the draft model, which takes this share of the time of one of the model."""
    return 1 + draft_share * (1 + spare_rows / rows) if draft_share else 1.0


def worthwhile(
    chance: float, rows: int, spare_rows: float, most: int, rows_of_each: float = 1.0
) -> int:
    """Return how many guesses of a request get the most tokens from a second.

    chance: that a guess is right, if those before it are.
    rows: those that the step has without these guesses; each gives a token.
    spare_rows: the time of a step without any row, as the number of rows that take as long.
    rows_of_each: see `rows_of_guess`.
    """
    count, tokens, right, time = 0, float(rows), chance, spare_rows + rows
    while count < most and right * time > tokens * rows_of_each:
        tokens += right
        time += rows_of_each
        right *= chance
        count += 1
    return count


def pay(gain: float, in_vain: float, rows: int, spare_rows: float, lost_rows: float) -> bool:
    """Return whether a step gets more tokens from a second with all its guesses than without.

    gain: how many of them are right on average. in_vain: the rows that take as long as they do.
    rows: those without a guess.
    lost_rows: the time for which the device waits, because a step with guesses is planned only when
    the tokens before it are known, as the number of rows that take as long.
    """
    return gain * (spare_rows + rows) > rows * (in_vain + lost_rows)


@dataclass(slots=True)
class Guesser:
    """One request's guesses so far. It has no state that its tokens do not give again, except how
    many guesses were right of late."""

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Its tokens, `num_tokens` of them."""
    num_tokens: int = 0
    right: float = 0.0
    wrong: float = 0.0
    learned_at: int = 0
    """How many tokens it had when the two counts were last changed."""
    pause: int = 0
    """For how many tokens to look no more after one that could not be guessed."""
    look_at: int = 0
    """With so many tokens, a step waits to look for guesses."""
    at_first: float = 0.0
    """How likely a guess is right as long as none was compared."""

    def chance(self, num_tokens: int) -> float:
        """Return how likely a guess is right."""
        kept = self._kept(num_tokens)
        right = kept * self.right + 0.5 * self.at_first
        return right / (kept * (self.right + self.wrong) + 0.5)

    def _kept(self, num_tokens: int) -> float:
        return math.exp2((self.learned_at - num_tokens) / HALF_LIFE)

    def learn(self, num_tokens: int, *, right: bool) -> None:
        """Count a guess that was compared with its token."""
        kept = self._kept(num_tokens)
        self.right, self.wrong = kept * self.right + right, kept * self.wrong + (not right)
        self.learned_at = num_tokens

    def check(self, token_ids: Sequence[int], settings: SpeculativeConfig) -> None:
        """Learn whether the last token would have been guessed. This costs no row, so a request
        guesses for nothing until it is likely to be right."""
        last = len(token_ids) - 1
        if self.learned_at >= last:
            return
        found = self._look_up(token_ids, last, settings, 1)
        right = len(found) > 0 and int(found[0]) == token_ids[last]
        if len(found):
            self.learn(last, right=right)
        self.look_at = last + 1 + (0 if right else self.pause)

    def guess(
        self, token_ids: Sequence[int], settings: SpeculativeConfig, count: int
    ) -> NDArray[np.int32]:
        """Return `count` guesses or none. token_ids: the request's, which only ever grow."""
        known = len(token_ids)
        found = self._look_up(token_ids, known, settings, count)
        self.look_at = known + (0 if len(found) else self.pause)
        return found

    def _look_up(
        self, token_ids: Sequence[int], end: int, settings: SpeculativeConfig, count: int
    ) -> NDArray[np.int32]:
        known = len(token_ids)
        if known > len(self.tokens):
            self.tokens = np.resize(self.tokens, known + known // 2 + LOOK_AGAIN)
        self.tokens[self.num_tokens : known] = token_ids[self.num_tokens :]
        self.num_tokens = known
        shortest, longest = settings.prompt_lookup_min, settings.prompt_lookup_max
        return look_up(self.tokens[:end], shortest, longest, count)


@dataclass(slots=True)
class Balance:
    """What guesses won and lost in batches of about one size."""

    row_s: float = 0.0
    """How long a step without guesses takes, by row, spare ones included."""
    measured: int = 0
    """How many such steps there were."""
    wagers: int = 0
    """Steps with guesses since the last of them."""
    stake: float = FIRST_STAKE
    """How much of the time of such steps guesses may lose."""


class Stakes:
    """Bounds what guesses lose where estimates are wrong: of rows, of lost time, of chances.

    Guesses wager time. A step with guesses wins the time that its tokens would have taken without
    them, and loses its own. What guesses may lose is one per cent of all steps, and what they won
    before, up to a few steps. So they never cost much more than that, and are tried again. There is
    no clock here: the core tells how long steps took.
    """

    def __init__(self, spare_rows: float, lost_rows: float, draft_share: float = 0.0) -> None:
        """See `worthwhile`, `pay` and `rows_of_guess`."""
        self._spare_rows = spare_rows
        self._lost_rows = lost_rows
        self._draft_share = draft_share
        self._balances: defaultdict[int, Balance] = defaultdict(Balance)
        """By the number of rows without guesses, in powers of two."""

    def most(self, rows: int) -> int:
        """Return how many guesses beside so many rows may be in vain."""
        balance = self._balances[rows.bit_length()]
        if balance.measured < KNOWN_AFTER or balance.wagers >= KNOWN_FOR:
            return 0
        in_vain = balance.stake * (self._spare_rows + rows) - self._lost_rows
        return int(in_vain / rows_of_guess(self._draft_share, rows, self._spare_rows))

    def took(self, rows: int, guesses: int, tokens: int, seconds: float, *, wager: bool) -> None:
        """A step of so many rows and guesses gave so many tokens.

        wager: it had guesses, or its launch waited for tokens only because there might be some.
        """
        balance = self._balances[rows.bit_length()]
        size = self._spare_rows + rows
        row_s = seconds / size
        if balance.measured:
            more = guesses * rows_of_guess(self._draft_share, rows, self._spare_rows)
            more += wager * self._lost_rows
            row_s = min(row_s, SLOWEST * (1 + more / size) * balance.row_s)
        won = ALLOWANCE
        if not wager:
            balance.measured, balance.wagers = balance.measured + 1, 0
            balance.row_s += (row_s - balance.row_s) / min(balance.measured, LEARNED_FROM)
        elif balance.measured:
            balance.wagers += 1
            won += tokens / rows - row_s / balance.row_s
        balance.stake = min(max(balance.stake + won, DEEPEST), MOST_AT_STAKE)
