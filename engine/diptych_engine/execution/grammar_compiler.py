"""Compiles the grammars of structured outputs, in a thread of its own.

A grammar may take about 100 ms, for which the engine's loop must not stop. llguidance releases the
GIL while it compiles.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from diptych_engine.scheduling.number_limit import Digits
from diptych_engine.scheduling.reasoning import ReasoningTokens
from diptych_engine.scheduling.request import Request
from diptych_frontend.model_files.model_source import ModelSource
from diptych_frontend.reasoning.formats import PROMPT_TAIL, format_of
from diptych_frontend.text.structured_outputs import (
    FIELD,
    MAX_REASON_CHARS,
    deep_executor,
    encode_form,
    grammar_of,
    is_json,
    parser_limits,
    reason_of,
)
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    DiptychError,
    InvalidRequestError,
    ReasoningParserName,
    StructuredOutputsParams,
)

log = logging.getLogger(__name__)

REMEMBERED_GRAMMARS: Final = 64

Compiled = tuple[bytes, LLMatcher | None, str]
"""An encoded form, its grammar, and why there is none."""


class HopelessFormError(InvalidRequestError):
    """No answer of this model can have the form. A front-end has already refused forms that fail
    for any vocabulary."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{FIELD}: {reason}", param=FIELD)


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    size: int
    ends: list[int]
    reasoning: ReasoningTokens | None
    """None if reasoning is not separated."""

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The same as llguidance wants them: 35 to 80 MiB. Making them holds the GIL, for 0.25 s
        with 50,000 tokens. Engines whose answers are free never have them."""
        text = self.tokenizer.backend.to_str()
        return LLTokenizer(text, n_vocab=self.size, eos_token=self.ends)

    @cached_property
    def digits(self) -> Digits:
        return Digits.of(self.tokens)

    @property
    def is_prepared(self) -> bool:
        return "digits" in vars(self)


class GrammarCompiler:
    """Compiles for one engine core. Only the core's thread calls `begin` and `finished`."""

    def __init__(self, source: ModelSource, reasoning_parser: ReasoningParserName = "auto") -> None:
        """Begin to load the model's vocabulary.

        reasoning_parser: see `EngineConfig.reasoning_parser`.
        """
        self._executor = deep_executor("grammar compiler")
        self._vocabulary: Future[Vocabulary] = self._executor.submit(
            _vocabulary, source, reasoning_parser
        )
        self._finished: SimpleQueue[Compiled] = SimpleQueue()
        self._waiting: dict[bytes, list[Request]] = {}
        """Encoded forms that are being compiled, and who wants them."""
        self._known: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self.wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK)
        """Readable when `finished` has something to tell."""
        self.before_silence: Callable[[], None] | None = None
        """Called before the first form keeps the whole process from working."""

    def wait_until_ready(self) -> str:
        """Wait until the vocabulary is loaded. Returns `EngineDescription.vocabulary`."""
        reason = self._vocabulary.exception()
        if reason is None:
            return self._vocabulary.result().tokenizer.vocabulary
        log.info("no structured outputs: %s", reason)
        return ""

    def begin(self, request: Request) -> bool:
        """Get the request's grammar. False: it is being compiled, and `finished` will return the
        request.

        Raises `InvalidRequestError` if the form is too large, or the model cannot produce it.
        """
        form = request.params.structured_outputs
        if form is None:
            return True
        reason = self._vocabulary.exception()
        if reason is not None:
            raise HopelessFormError(str(reason)) from reason
        self._see_reasoning(request)
        key = encode_form(form)
        grammar = self._known.get(key)
        if grammar is None:
            if key not in self._waiting:
                self._waiting[key] = []
                if self.before_silence is not None and not self._vocabulary.result().is_prepared:
                    self.before_silence()
                self._executor.submit(self._compile, key, form)
            self._waiting[key].append(request)
            return False
        self._known.move_to_end(key)
        self._give(request, form, grammar)
        return True

    def _give(self, request: Request, form: StructuredOutputsParams, grammar: LLMatcher) -> None:
        request.grammar = grammar
        request.digits = self._vocabulary.result().digits if is_json(form) else None

    def _see_reasoning(self, request: Request) -> None:
        """Find out what may stand before the part of its output that has the form."""
        reasoning = self._vocabulary.result().reasoning
        if reasoning is not None:
            end = request.num_prompt_tokens
            tail = request.token_ids[max(0, end - PROMPT_TAIL) : end]
            request.reasoning = reasoning.before(request.said_ended, tail)
        elif request.said_ended is False:
            raise InvalidRequestError(
                "reasoning_ended needs an engine whose reasoning_parser is set: this one knows no "
                "reasoning",
                param="reasoning_ended",
            )

    @property
    def has_finished(self) -> bool:
        return not self._finished.empty()

    def finished(self) -> list[tuple[Request, HopelessFormError | None]]:
        """Return requests whose grammar is ready, or the reason why there is none."""
        with contextlib.suppress(BlockingIOError):  # taken before the thread could wake us
            os.eventfd_read(self.wake_fd)
        told: list[tuple[Request, HopelessFormError | None]] = []
        while self.has_finished:
            key, grammar, reason = self._finished.get()
            if grammar is not None:
                self._remember(key, grammar)
            for request in self._waiting.pop(key):
                form = request.params.structured_outputs
                if grammar is not None and form is not None:
                    self._give(request, form, grammar)
                told.append((request, HopelessFormError(reason) if reason else None))
        return told

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        os.close(self.wake_fd)

    def _remember(self, key: bytes, grammar: LLMatcher) -> None:
        self._known[key] = grammar
        if len(self._known) > REMEMBERED_GRAMMARS:
            self._known.popitem(last=False)

    def _compile(self, key: bytes, form: StructuredOutputsParams) -> None:
        """In the compiler's thread."""
        grammar = None
        try:
            vocabulary = self._vocabulary.result()
            _ = vocabulary.digits  # the first form has the vocabulary prepared
            grammar = LLMatcher(
                vocabulary.tokens, grammar_of(form), log_level=0, limits=parser_limits()
            )
            if not grammar.is_error():
                # The first mask is the dearest, and shows what the limits do not allow.
                grammar.compute_bitmask()
            reason = reason_of(grammar)[:MAX_REASON_CHARS]
        except Exception as exc:
            # Whatever is wrong with a form is for those to hear who want it.
            reason = str(exc) or type(exc).__name__
        self._finished.put((key, None if reason else grammar, reason))
        os.eventfd_write(self.wake_fd, 1)


def _vocabulary(source: ModelSource, reasoning_parser: ReasoningParserName) -> Vocabulary:
    """Raises `ValueError` if the model's answers can have no form."""
    try:
        tokenizer = load_tokenizer(source)
    except DiptychError as exc:
        raise ValueError(str(exc)) from exc
    if tokenizer is None:
        raise ValueError("this model has no tokenizer")
    ends = list(source.config.eos_token_ids)
    if not ends:
        raise ValueError("this model has no token that ends an answer")
    size = source.config.vocab_size
    style = format_of(reasoning_parser, tokenizer.chat_template)
    _ = tokenizer.vocabulary  # in this thread
    reasoning = None if style is None else ReasoningTokens.of(style, tokenizer, size, ends)
    return Vocabulary(tokenizer, size, ends, reasoning)
