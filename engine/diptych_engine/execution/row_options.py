"""Rarely used options of the sampler: the operator's own functions, biases, penalties, and excluded
tokens.

`EngineConfig.logits_processors` names the functions as `module:function`; a request names those
that it wants. As in vLLM's V0, a function takes the output's token ids and the logits of the next
token, or the prompt's token ids before them, and returns the logits. It is called again after a
preemption, so its result may depend on these arguments alone.
"""

from __future__ import annotations

import inspect
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.grammar_state import GrammarState, constrain
from diptych_engine.execution.sampling_math import penalize
from diptych_engine.execution.worker_extension import named, refusal
from diptych_engine.scheduling.request import Request
from diptych_kernels.host_arrays import to_device
from diptych_protocol import DiptychError, EngineGenerateError, SamplingParams

log = logging.getLogger(__name__)
Processor = Callable[[list[int], list[int], Tensor], Tensor]
"""(prompt's token ids, output's token ids, logits [vocabulary] float32) -> logits."""
PARAM = "logits_processors"


class SeenTokens:
    """The distinct tokens of a growing sequence. Each step reads only the new ones."""

    def __init__(self) -> None:
        self._token_ids = array("q")
        self._counts = array("q")
        """How often each stands in the output."""
        self._places: dict[int, int] = {}
        self._num_looked_at = 0

    def advance(self, request: Request) -> None:
        """Read the request's tokens since the last call."""
        token_ids = request.token_ids
        for position in range(self._num_looked_at, len(token_ids)):
            place = self._places.setdefault(token_ids[position], len(self._places))
            if place == len(self._token_ids):
                self._token_ids.append(token_ids[position])
                self._counts.append(0)
            self._counts[place] += position >= request.num_prompt_tokens
        self._num_looked_at = len(token_ids)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return token ids and output counts, as views that must be dropped before the next
        `advance`."""
        return np.frombuffer(self._token_ids, np.int64), np.frombuffer(self._counts, np.int64)


class Penalties:
    """The penalties of one row."""

    def __init__(self, presence: float, frequency: float, repetition: float) -> None:
        self.presence = presence
        self.frequency = frequency
        self.repetition = repetition
        self.seen = SeenTokens()

    @classmethod
    def of(cls, params: SamplingParams) -> Penalties | None:
        """Return the penalties of a request; None if its parameters change nothing."""
        asked = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        return None if asked == (0.0, 0.0, 1.0) else cls(*asked)


def apply_penalties(
    logits: Tensor, penalized: Sequence[tuple[int, Penalties]], requests: Sequence[Request]
) -> None:
    """Lower the logits of seen tokens, in place.

    logits: [requests, vocabulary].
    penalized: rows of `logits` with their penalties, at least one.
    """
    pieces = []
    for row, penalties in penalized:
        penalties.seen.advance(requests[row])
        pieces.append((row, penalties, *penalties.seen.arrays()))
    lengths = [len(token_ids) for _, _, token_ids, _ in pieces]

    def spread(values: list[float]) -> Tensor:
        return to_device(np.repeat(np.array(values, np.float32), lengths), logits.device)

    penalize(
        logits,
        rows=to_device(np.repeat(np.array([row for row, *_ in pieces]), lengths), logits.device),
        token_ids=to_device(np.concatenate([ids for _, _, ids, _ in pieces]), logits.device),
        counts=to_device(np.concatenate([counts for *_, counts in pieces]), logits.device),
        presence=spread([penalties.presence for _, penalties, *_ in pieces]),
        frequency=spread([penalties.frequency for _, penalties, *_ in pieces]),
        repetition=spread([penalties.repetition for _, penalties, *_ in pieces]),
    )


def load_processors(names: Iterable[str]) -> Mapping[str, Processor]:
    """Load the functions of these names. Raises `InvalidRequestError` for one that
    cannot be used."""
    return {name: _load(name) for name in names}


def _load(name: str) -> Processor:
    function = named(name, PARAM)
    try:
        num_arguments = len(inspect.signature(function).parameters)
    except (TypeError, ValueError) as exc:
        raise refusal(name, PARAM, exc) from exc
    if num_arguments == 3:
        processor: Processor = function
        return processor
    if num_arguments == 2:
        return lambda _prompt, output, logits: function(output, logits)
    raise refusal(name, PARAM, TypeError(f"it takes {num_arguments} arguments, not 2 or 3"))


@dataclass(slots=True)
class RowOptions:
    """The special options of one row, with what they have learned of its request so far."""

    logprobs: bool
    num_logprobs: int
    min_tokens: int
    ends: list[int]
    """Tokens that would end the output, excluded until it has `min_tokens`."""
    bad_words: list[list[int]]
    bias: Bias | None
    penalties: Penalties | None
    grammar: GrammarState | None
    processors: list[Processor]

    @classmethod
    def of(
        cls, request: Request, vocab_size: int, processors: Mapping[str, Processor]
    ) -> RowOptions | None:
        """Return the request's special options; None if it has none. `processors`: all functions
        that it may name."""
        params = request.params
        options = cls(
            params.logprobs is not None,
            params.logprobs or 0,
            params.min_tokens,
            _ends(request, vocab_size) if params.min_tokens else [],
            params.bad_words_token_ids or [],
            Bias.of(params.logit_bias),
            Penalties.of(params),
            None
            if request.grammar is None
            else GrammarState(request.grammar, request.reasoning, request.digits),
            [processors[name] for name in params.logits_processors or ()],
        )
        given = (
            options.logprobs, options.min_tokens, options.bad_words, options.bias,
            options.penalties, options.grammar, options.processors,
        )  # fmt: skip
        return options if any(given) else None

    def forbidden(self, request: Request) -> Iterator[int]:
        """Return the tokens that the request must not get next."""
        num_output = request.num_output_tokens
        if num_output < self.min_tokens:
            yield from self.ends
        for word in self.bad_words:
            begun = len(word) - 1
            # Only the output counts: what the prompt says is not generated.
            if begun == 0 or (begun <= num_output and request.token_ids[-begun:] == word[:-1]):
                yield word[-1]


class Bias:
    """Numbers that are added to the logits of some tokens."""

    def __init__(self, token_ids: list[int], values: list[float]) -> None:
        self.token_ids = np.array(token_ids, np.int64)
        self.values = np.array(values, np.float32)

    @classmethod
    def of(cls, logit_bias: dict[int, float] | None) -> Bias | None:
        return cls(list(logit_bias), list(logit_bias.values())) if logit_bias else None


def change_logits(
    logits: Tensor, special: Sequence[tuple[int, RowOptions]], requests: Sequence[Request]
) -> dict[str, DiptychError]:
    """Apply processors, biases, penalties and exclusions, in place and in vLLM's order.

    logits: [requests, vocabulary]. special: the rows of `logits` that have options. Returns the ids
    of requests that cannot continue, with the reasons.
    """
    processed = [(row, o.processors) for row, o in special if o.processors]
    failed = _process_logits(logits, processed, requests) if processed else {}
    for row, options in special:
        if options.bias is not None:
            logits[row, to_device(options.bias.token_ids, logits.device)] += to_device(
                options.bias.values, logits.device
            )
    penalized = [(row, o.penalties) for row, o in special if o.penalties is not None]
    if penalized:
        apply_penalties(logits, penalized, requests)
    constrained = [(row, o.grammar) for row, o in special if o.grammar is not None]
    rows = [row for row, _ in constrained]
    unchanged = logits[rows] if rows else None
    pairs = [(row, token) for row, o in special for token in o.forbidden(requests[row])]
    if pairs:
        where: NDArray[np.int64] = np.array(pairs, np.int64).T
        logits[tuple(to_device(where, logits.device))] = -torch.inf
    if unchanged is None:
        return failed
    return failed | constrain(
        logits, unchanged, rows, [state for _, state in constrained], requests
    )


def _process_logits(
    logits: Tensor, wanted: Sequence[tuple[int, Sequence[Processor]]], requests: Sequence[Request]
) -> dict[str, DiptychError]:
    """Let each of the `wanted` rows be changed by its functions, in place.

    logits: [requests, vocabulary].
    Returns the ids of requests that cannot go on, with the reasons.
    """
    failed: dict[str, DiptychError] = {}
    for row, processors in wanted:
        request = requests[row]
        split = request.num_prompt_tokens
        prompt, output = request.token_ids[:split], request.token_ids[split:]
        changed = logits[row].clone()
        try:
            for processor in processors:
                changed = processor(prompt, output, changed)
            logits[row] = changed
        except Exception as exc:  # somebody else's code
            log.exception("request %s: a logits processor failed", request.request_id)
            reason = f"{PARAM}: {type(exc).__name__}: {exc}"
            failed[request.request_id] = EngineGenerateError(reason)
    return failed


def _ends(request: Request, vocab_size: int) -> list[int]:
    params = request.params
    ends = set(params.stop_token_ids)
    if request.eos_token_id is not None and not params.ignore_eos:
        ends.add(request.eos_token_id)
    return [token for token in sorted(ends) if 0 <= token < vocab_size]
