"""Guesses the next tokens of requests with a small model of the same tokens.

Its keys and values lie behind the model's own in each block. So whatever happens to blocks (they
are shared, remembered, lent, sent) happens to the draft model's state.

It computes each token of a prompt when the model does. Of an answer's tokens it computes those that
it lacks when it is to guess what follows: where nobody guesses, they cost nothing. What it lacks of
an answer that a later prompt repeats stays empty, which makes guesses worse, but no answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from diptych_engine.execution.placement import block_shape
from diptych_engine.execution.sampler import Sampler
from diptych_engine.models import StepInputs, build_model, check_weights, load_weights
from diptych_engine.models.shard import WHOLE
from diptych_engine.scheduling.request import Request, ScheduledRequest
from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_kernels.host_arrays import to_device
from diptych_protocol import InvalidRequestError, SpeculativeConfig

MakeInputs = Callable[..., StepInputs]
"""`ModelRunner._inputs`."""


def draft_source(settings: SpeculativeConfig | None, target: ModelSource) -> ModelSource | None:
    """Return the draft model that is wanted, if any.

    Raises `InvalidRequestError` unless it exists and its tokens are the model's.
    """
    if settings is None or settings.model is None:
        return None
    try:
        source = resolve_model(settings.model)
        own, other = load_tokenizer(target), load_tokenizer(source)
    except InvalidRequestError as exc:
        raise _refused(str(exc)) from exc
    sizes = source.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise _refused("{} has logits of {} tokens, the model of {}".format(source.uri, *sizes))
    if own and other and own.backend.get_vocab() != other.backend.get_vocab():
        raise _refused(f"{source.uri} has other tokens than the model")
    return source


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"speculative_config: {why}; name a draft model of the same tokenizer, or take the method "
        "ngram, which needs none",
        param="speculative_config",
    )


class Drafter:
    """The draft model, and how far it has computed the request of each row."""

    def __init__(
        self,
        source: ModelSource,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        packs: bool,
    ) -> None:
        """Allocate the model; see `build_model`. Raises `InvalidRequestError` if its file cannot be
        read."""
        check_weights(source, WHOLE)
        self.source = source
        self.model = build_model(source.config, max_positions, dtype, device, packs=packs)
        self._packables = self.model.packables if packs else ()
        self._device = device

    @property
    def compat(self) -> str:
        """What engines must have in common to exchange this model's KV."""
        path, config = self.source.path, self.source.config
        geometry = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        return f"{self.source.uri if path is None else path.resolve()} {geometry}"

    def load(self, seed: int, bits: int | None) -> None:
        """Fill the weights; see `load_weights`."""
        load_weights(self.model.slots, self.source, seed, None, self._packables, bits)

    def share_of(self, weights: Iterable[Tensor]) -> float:
        """Return how long its step takes, as a share of that of a model with these weights: what a
        step reads of each."""
        return _num_bytes(self.model.weight_memory) / max(1, _num_bytes(weights))

    def kv_layers(self, rest: Tensor, block_size: int) -> Sequence[Tensor]:
        """Return the view of each layer. rest: [blocks, numbers], what blocks have behind KV of the
        model."""
        return rest.view(-1, *block_shape(self.source.config, block_size)).unbind(1)

    def join(
        self,
        kv_layers: Sequence[Tensor],
        make_inputs: MakeInputs,
        sampler: Sampler,
        num_rows: int,
        most_tokens: int,
    ) -> None:
        """Work in the batch of a runner. most_tokens: that a step of this model has."""
        self._kv_layers, self._make_inputs, self._sampler = kv_layers, make_inputs, sampler
        self._known = np.zeros(num_rows, np.int64)
        """How many first tokens of the request in each row have KV here."""
        self._most_tokens = most_tokens

    def admit(self, row: int, share: ScheduledRequest) -> None:
        """Begin with a request, of which what precedes the share was computed before, here or
        elsewhere: its prompt for sure, its answer only where somebody guessed."""
        self._known[row] = min(share.start, share.request.num_prompt_tokens)

    def draft(self, shares: Sequence[ScheduledRequest], row_of: Mapping[str, int]) -> None:
        """Compute what a step is to have of this model, before the step: tokens of prompts, and
        guesses, which are put into their shares."""
        wanted: defaultdict[str, list[ScheduledRequest]] = defaultdict(list)
        for share in shares:
            if share.guess is not None:
                wanted[share.request.request_id].append(share)
        lacking: list[ScheduledRequest] = []
        for share in shares:
            request, start = share.request, share.start
            if share.guess is not None:
                continue
            row, guesses = row_of[request.request_id], request.request_id in wanted
            known = min(int(self._known[row]), start)  # what it computed after a wrong guess is not
            if guesses or start < request.num_prompt_tokens:
                end = start + share.num_tokens
                lacking.append(ScheduledRequest(request, known, end - known, guesses))
                known = end
            self._known[row] = known
        if lacking:
            self._guess(lacking, wanted, row_of)

    def _guess(
        self,
        lacking: Sequence[ScheduledRequest],
        wanted: Mapping[str, list[ScheduledRequest]],
        row_of: Mapping[str, int],
    ) -> None:
        """lacking: the tokens to compute; after those that sample, guesses follow."""
        requests: list[Request] = []
        last: list[Tensor] = []
        for shares in self._in_steps(lacking):
            ordered = sorted(shares, key=lambda share: share.num_tokens > 1)
            ends = [i for i, share in enumerate(ordered) if share.samples]
            num_decodes = sum(share.num_tokens == 1 for share in ordered)
            inputs, hidden = self._forward(ordered, row_of, num_decodes, ahead=False)
            rows = to_device(inputs.attention.query_starts[1:][ends] - 1, self._device)
            last.append(hidden.index_select(0, rows))
            requests += [ordered[i].request for i in ends]
        order = sorted(range(len(requests)), key=lambda i: -len(wanted[requests[i].request_id]))
        requests = [requests[i] for i in order]
        hidden = torch.cat(last)[order]
        drafted: list[Tensor] = []
        filled: list[ScheduledRequest] = []
        while requests:
            depth = len(drafted)
            guesses = [wanted[request.request_id][depth] for request in requests]
            places = np.array([share.start for share in guesses])
            rows_now = [row_of[request.request_id] for request in requests]
            logits = self.model.logits(hidden)
            drafted.append(self._sampler.draft(logits, rows_now, places))
            filled += guesses
            requests = [r for r in requests if len(wanted[r.request_id]) > depth + 1]
            if requests:
                inputs, hidden = self._forward(
                    guesses[: len(requests)], row_of, len(requests), ahead=True
                )
                self._known[rows_now[: len(requests)]] += 1
        if drafted:
            for share, token in zip(filled, torch.cat(drafted).tolist(), strict=True):
                share.guess = token

    def _forward(
        self,
        shares: Sequence[ScheduledRequest],
        row_of: Mapping[str, int],
        num_decodes: int,
        *,
        ahead: bool,
    ) -> tuple[StepInputs, Tensor]:
        """ahead: the tokens are those that were drafted last."""
        rows = [row_of[share.request.request_id] for share in shares]
        inputs = self._make_inputs(shares, rows, num_decodes, ahead=ahead)
        inputs.adapters = ()
        return inputs, self.model.forward(inputs, self._kv_layers)

    def _in_steps(self, shares: Iterable[ScheduledRequest]) -> Iterator[list[ScheduledRequest]]:
        """Divide tokens into steps that are not too large."""
        step: list[ScheduledRequest] = []
        room = self._most_tokens
        for share in shares:
            start, end = share.start, share.start + share.num_tokens
            while start < end:
                count = min(end - start, room)
                samples = share.samples and start + count == end
                step.append(ScheduledRequest(share.request, start, count, samples))
                start, room = start + count, room - count
                if not room:
                    yield step
                    step, room = [], self._most_tokens
        if step:
            yield step


def _num_bytes(weights: Iterable[Tensor]) -> int:
    """Each memory once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values())
