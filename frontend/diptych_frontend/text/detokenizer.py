"""Decodes tokens to text as they arrive, and searches it for stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from tokenizers.decoders import DecodeStream

from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import SamplingParams

PRIMING_TOKENS: Final = 6
"""The last tokens of the prompt, which may change the text after them, so they are read first."""
REPLACEMENT: Final = "\ufffd"
"""The character that stands for bytes that are not UTF-8, or not yet."""
MAX_UNDECODED: Final = 16
"""More tokens than this without text are not an unfinished character but invalid bytes. They are
output as replacement characters, or the output would stop."""


class TextStream:
    """Decodes one sequence piece by piece, and never emits half a character."""

    __slots__ = ("_backend", "_kept", "_skip_special", "_stream", "_undecoded")

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        *,
        skip_special_tokens: bool,
        kept_token_ids: Collection[int] = (),
    ) -> None:
        """`context`: the tokens before the first one that will be pushed. `kept_token_ids`: special
        tokens that are not skipped."""
        self._backend = tokenizer.backend
        self._kept = kept_token_ids if skip_special_tokens else ()
        self._skip_special = skip_special_tokens
        self._undecoded: list[int] = []
        tail = list(context[-PRIMING_TOKENS:])
        # A context that ends inside a character would be emitted again together with its rest.
        primed = not self._decode(tail).endswith(REPLACEMENT)
        self._stream = DecodeStream(tail if primed else [], skip_special_tokens)

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; it is often empty inside a character."""
        if token_id in self._kept:
            return self._restart() + self._backend.decode([token_id], skip_special_tokens=False)
        undecoded = self._undecoded
        undecoded.append(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception as exc:
            # The library has no narrower type. It gives up when later tokens change the text of
            # earlier ones; decoding what is new on its own is then the best there is.
            if not str(exc).startswith("Invalid prefix"):
                raise
            return self._restart()
        if text is not None:
            undecoded.clear()
            return text
        return self._restart() if len(undecoded) > MAX_UNDECODED else ""

    def flush(self) -> str:
        """Return the rest at the end of the sequence, without the unfinished character."""
        if not self._undecoded:
            return ""
        text = self._decode(self._undecoded).rstrip(REPLACEMENT)
        self._undecoded.clear()
        return text

    def _restart(self) -> str:
        text = self._decode(self._undecoded)
        self._undecoded.clear()
        self._stream = DecodeStream([], self._skip_special)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special)


class StopMatcher:
    """Finds the first complete stop string in a text that arrives in any pieces.

    Text is held back while a stop string might still begin in it.
    """

    __slots__ = ("_held", "_include", "_keep", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._keep = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, piece: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Add text, and return the text that is certain now, and the stop string that ended it.

        Without `may_stop`, a stop string that ends within this piece does not count.
        """
        old = len(self._held)
        text = self._held + piece
        if may_stop and piece:
            found = self._first_match(text, old)
            if found is not None:
                end, stop = found
                self._held = ""
                return text[: end if self._include else end - len(stop)], stop
        certain = max(len(text) - self._keep, 0)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """The match with the earliest end after `old`; of several, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(old - len(stop) + 1, 0))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])


class Detokenizer:
    """The text of one answer, token by token."""

    __slots__ = (
        "_include_stop",
        "_length",
        "_matcher",
        "_min_tokens",
        "_stream",
        "num_tokens",
        "text_ends",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        context: Sequence[int],
        kept_token_ids: Collection[int] = (),
        *,
        traced: bool = False,
    ) -> None:
        """`context`: the tokens before the answer, that is, the prompt. `kept_token_ids`: see
        `TextStream`. `traced`: keep `text_ends`."""
        self._stream = TextStream(
            tokenizer,
            context,
            skip_special_tokens=params.skip_special_tokens,
            kept_token_ids=kept_token_ids,
        )
        self._matcher = (
            StopMatcher(params.stop, include_in_output=params.include_stop_str_in_output)
            if params.stop
            else None
        )
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self._length = 0
        self.text_ends: list[int] | None = [] if traced else None
        """For each token of the last `push`, how many characters were decoded after it. Some of
        them may be held back, or cut off by a stop string."""

    def push(
        self, token_ids: Sequence[int], *, finished: bool, stop_token: bool
    ) -> tuple[str, int, str | None]:
        """Add the tokens of one step.

        Args:
            token_ids: new tokens, in order.
            finished: the engine ended the sequence with these tokens.
            stop_token: it did so because of the last of them, which is then not part of the text
                (unless the request wants its stop in the output).

        Returns:
            The text to emit, how many of the tokens belong to the answer, and the stop string that
            ended it, if one did.
        """
        num_new = len(token_ids)
        silent = num_new - 1 if stop_token and not self._include_stop else num_new
        if self._matcher is None and self.text_ends is None:  # most steps are like this
            self.num_tokens += num_new
            text = "".join(map(self._stream.push, token_ids[:silent]))
            return text + self._stream.flush() if finished else text, num_new, None
        if self.text_ends is not None:
            self.text_ends.clear()
        pieces = []
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            piece = "" if index == silent else self._stream.push(token_id)
            if self.text_ends is not None:
                self._length += len(piece)
                self.text_ends.append(self._length)
            text, stop = self._match(piece)
            pieces.append(text)
            if stop is not None:
                return "".join(pieces), index + 1, stop
        if finished:
            text, stop = self._match(self._stream.flush())
            pieces.append(text)
            if stop is not None:
                return "".join(pieces), num_new, stop
            pieces.append(self.flush())
        return "".join(pieces), num_new, None

    def flush(self) -> str:
        """Return the text that was held back for a stop string that will not come."""
        return "" if self._matcher is None else self._matcher.flush()

    def _match(self, piece: str) -> tuple[str, str | None]:
        if self._matcher is None:
            return piece, None
        return self._matcher.push(piece, may_stop=self.num_tokens > self._min_tokens)
