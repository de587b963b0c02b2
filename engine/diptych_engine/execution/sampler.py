"""Chooses the next token of each request in a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.row_options import Processor, RowOptions, change_logits
from diptych_engine.execution.sampling_math import describe, find_largest, uniforms
from diptych_engine.scheduling.request import NOT_SAMPLED, Pending, Request, StepResult
from diptych_engine.scheduling.step_results import stop_condition
from diptych_kernels.host_arrays import to_device
from diptych_kernels.sampling import Filters, sample
from diptych_protocol import DiptychError

LogprobsRow = tuple[list[int], list[float], int]

SEED_MASK = 2**64 - 1


class Sampler:
    """The sampling options of every row of the batch, and the choice itself.

    Biases, penalties and excluded tokens change the logits first. Then greedy rows take the
    largest; others scale by temperature, filter, and draw with a random number that depends on
    (seed, position) alone. Reported log-probabilities are those of the unchanged logits.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        processors: Mapping[str, Processor] = MappingProxyType({}),
    ) -> None:
        """`processors`: functions that requests may name."""
        self._processors = processors
        self._vocab_size = vocab_size
        self._device = device
        self.sampled = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """The token that each row got last; kept if the sampler is told to."""
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float64)
        self._min_p = np.zeros(num_rows, np.float32)
        self._filtered = np.zeros(num_rows, np.bool_)
        self._seed = np.zeros(num_rows, np.uint64)
        self._special: dict[int, RowOptions] = {}
        """Rows with options beyond those above."""
        self._plain = [True] * num_rows
        """Rows that just take the largest logit."""

    def admit(self, row: int, request: Request) -> None:
        """Store a row's options; the row must be free."""
        params = request.params
        greedy = params.greedy
        self._temperature[row] = 0.0 if greedy else params.temperature
        self._top_k[row] = min(max(params.top_k, 0), self._vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._filtered[row] = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._seed[row] = request.seed & SEED_MASK
        options = RowOptions.of(request, self._vocab_size, self._processors)
        if options is not None:
            self._special[row] = options
        self._plain[row] = greedy and options is None

    def release(self, row: int) -> None:
        """Forget a row's options."""
        self._special.pop(row, None)

    def needs_host(self, row: int) -> bool:
        """Whether a row's next token depends on more than its logits, its seed and its position."""
        return row in self._special

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        requests: Sequence[Request],
        places: NDArray[np.int64],
        *,
        keep: bool,
    ) -> Pending:
        """Choose a token for each request from its logits.

        logits: [requests, vocabulary]; may be changed. rows: the row that each request was admitted
        to. places: [requests], the position that each token will have in its sequence. keep: the
        tokens in `sampled`, too.
        """
        logits = logits.float()
        plain = all(map(self._plain.__getitem__, rows))
        special = []
        if not plain:
            special = [
                (i, self._special[row]) for i, row in enumerate(rows) if row in self._special
            ]
        reported = [(i, options.num_logprobs) for i, options in special if options.logprobs]
        unchanged = logits[[i for i, _ in reported]].log_softmax(-1) if reported else None
        failed = change_logits(logits, special, requests) if special else {}
        tokens, largest = find_largest(logits)
        nans = _count_nans(logits, largest)
        if not plain:
            self._draw_random_rows(logits, np.asarray(rows), places, largest, tokens)
        if keep:
            self.sampled[to_device(np.asarray(rows), self._device)] = tokens
        chosen = Readback(tokens) if nans is None else Readback(tokens, nans)
        logprobs: list[LogprobsRow | None] | None = None
        if unchanged is not None:
            logprobs = [None] * len(rows)
            token_ids = tokens.tolist()
            described = describe(
                unchanged, [token_ids[i] for i, _ in reported], [count for _, count in reported]
            )
            for (i, _), row_logprobs in zip(reported, described, strict=True):
                logprobs[i] = row_logprobs
        return lambda: _read(chosen, logprobs, failed)

    def draft(self, logits: Tensor, rows: Sequence[int], places: NDArray[np.int64]) -> Tensor:
        """Choose tokens by the logits of a draft model and keep them in `sampled`.

        They are drawn with the random numbers of their places, as `sample` will draw there: where
        the two models agree, both get the same token. What options make of the tokens before is
        left out.
        """
        logits = logits.float()
        tokens, largest = find_largest(logits)
        self._draw_random_rows(logits, np.asarray(rows), places, largest, tokens)
        self.sampled[to_device(np.asarray(rows), self._device)] = tokens
        return tokens

    def sample_guessed(
        self,
        logits: Tensor,
        rows: Sequence[int],
        requests: Sequence[Request],
        places: NDArray[np.int64],
        guesses: Sequence[int | None],
    ) -> Pending:
        """Do the same as `sample`, for a step with guesses.

        guesses: [requests], the token from which each row of logits was computed, if it is one. The
        rows of a request's guesses follow its own, in the order of their places. Options that look
        at the tokens before, as those of grammars, are given only such that were sampled: they
        choose for a guess after it was right, and never have to take a token back or see one after
        the answer's end.
        """
        turn = [i for i, g in enumerate(guesses) if g is None or rows[i] not in self._special]
        if len(turn) == len(guesses):
            return self.sample(logits, rows, requests, places, keep=False)
        now, tokens = list(requests), [NOT_SAMPLED] * len(guesses)
        logprobs: list[LogprobsRow | None] = [None] * len(guesses)
        nans, failed, is_first = [0] * len(guesses), dict[str, DiptychError](), True
        while turn:
            own, mine = [rows[i] for i in turn], [now[i] for i in turn]
            result = self.sample(logits[turn], own, mine, places[turn], keep=False)()
            following = []
            for at, i in enumerate(turn):
                if now[i].request_id in result.failed:
                    continue  # without guesses, a later failure would come after this step
                tokens[i] = token = result.token_ids[at]
                logprobs[i] = None if result.logprobs is None else result.logprobs[at]
                nans[i] = 0 if result.num_nans is None else result.num_nans[at]
                if i + 1 < len(rows) and rows[i] in self._special and guesses[i + 1] == token:
                    now[i + 1] = replace(now[i], token_ids=[*now[i].token_ids, token])
                    if stop_condition(now[i + 1], token) is None:
                        following.append(i + 1)
            failed, is_first, turn = (result.failed if is_first else failed), False, following
        result = StepResult(
            tokens, logprobs if any(logprobs) else None, nans if any(nans) else None, failed=failed
        )
        return lambda: result

    def _draw_random_rows(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        largest: Tensor,
        tokens: Tensor,
    ) -> None:
        """Replace the tokens of rows with a temperature, but where no distribution exists."""
        random = np.flatnonzero(self._temperature[rows] > 0.0)
        if not len(random):
            return
        rows, positions = rows[random], places[random].astype(np.uint64)
        chosen: Tensor | slice = slice(None)
        if len(random) < len(logits):
            chosen = to_device(random, self._device)
            logits, largest = logits[chosen], largest[chosen]
        hopeless = ~largest.isfinite()
        if logits.is_cuda or hopeless.any():  # the host would have to wait to know
            logits = logits.masked_fill(hopeless.unsqueeze(1), 0.0)
        drawn = sample(
            logits,
            to_device(self._temperature[rows], self._device),
            to_device(uniforms(self._seed[rows], positions), self._device),
            self._filters(rows),
        )
        tokens[chosen] = torch.where(hopeless, tokens[chosen], drawn)

    def _filters(self, rows: NDArray[np.int64]) -> Filters | None:
        """Top-k, top-p and min-p of the rows."""
        if not self._filtered[rows].any():
            return None
        options = (self._top_k[rows], self._top_p[rows], self._min_p[rows])
        return Filters(*[to_device(option, self._device) for option in options])


def _count_nans(logits: Tensor, largest: Tensor) -> Tensor | None:
    """NaNs per row; None if a glance at the largest logits shows that there are none. A GPU counts
    them unasked, because the host does not wait to have that glance."""
    if logits.device.type == "cpu" and math.isfinite(sum(largest.tolist())):
        return None
    return logits.isnan().sum(-1)


def _read(
    chosen: Readback, logprobs: list[LogprobsRow | None] | None, failed: dict[str, DiptychError]
) -> StepResult:
    tokens, *counts = chosen.read()
    nans: list[int] = counts[0].tolist() if counts else []
    return StepResult(tokens.tolist(), logprobs, nans if any(nans) else None, failed=failed)


class Readback:
    """Tensors that are being copied to the host. On a CPU there is no copy."""

    def __init__(self, *tensors: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            pinned = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for target, source in zip(pinned, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._done = torch.cuda.current_stream(tensors[0].device).record_event()
            tensors = tuple(pinned)
        self._tensors = tensors

    def read(self) -> tuple[Tensor, ...]:
        """Wait for the tensors and return them."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
