"""Where the outputs of a request are gathered for its consumer, with their log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, overload

import msgspec

from diptych_protocol import (
    Array,
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineGenerateError,
    Logprob,
    LogprobsLists,
    LogprobsTensors,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class Collector(Generic[Output]):
    """The mailbox between the output processor and one consumer. It holds at most one output, or
    the error that ended the request.

    For a slow consumer, deltas are merged and cumulative outputs replaced, so that the text itself
    limits the memory. One producer and one consumer use it, on one event loop; `take` needs no
    loop.
    """

    __slots__ = ("_error", "_pending", "_waiter", "finished", "request_ids", "take_at_once")

    def __init__(self, request_ids: Sequence[str] = ()) -> None:
        """`request_ids` are the internal ids of the requests whose outputs come here."""
        self.request_ids = request_ids
        self.finished = False
        """The last output was taken."""
        self.take_at_once: Callable[[Output], bool] | None = None
        """Offered what comes while the consumer waits; what it refuses wakes the consumer, and so
        does its error. Offered what is left when the consumer leaves."""
        self._pending: Output | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        """What the consumer waits for, if it does. An `asyncio.Event` costs more, at each token."""

    def put(self, output: Output, *, delta: bool = False) -> None:
        """Add an output, which belongs to the collector from then on. Ignored after `fail`."""
        if self._error is not None:
            return
        if self._waiter is not None and not self._waiter.done():
            try:
                if self.take_at_once is not None and self.take_at_once(output):
                    return
            except Exception as exc:  # the consumer's, not that of who reads for all
                self.fail(exc)
                return
            self._pending = output
            self._waiter.set_result(None)
        elif isinstance(self._pending, RequestOutput) and isinstance(output, RequestOutput):
            _merge(self._pending, output, delta=delta)
        else:
            self._pending = output

    def offer_rest(self) -> None:
        """Offer what is there to `take_at_once`: nobody will take it any more."""
        if self._pending is not None and self.take_at_once is not None:
            self.take_at_once(self._pending)

    def fail(self, error: BaseException) -> None:
        """Make every later `get` and `take` raise this error; the first error stays."""
        if self._error is None:
            self._pending, self._error = None, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> Output | None:
        """Return what is there now. Raises the error of `fail`."""
        if self._error is not None:
            # Many consumers may share one error: none of them should see the others' frames.
            raise self._error.with_traceback(None)
        output, self._pending = self._pending, None
        if output is not None and output.finished:
            self.finished = True
        return output

    @property
    def is_ready(self) -> bool:
        """Whether `take` has something to return or to raise."""
        return self._pending is not None or self._error is not None

    def ready(self) -> asyncio.Future[None]:
        """Return what is done when `is_ready`. It is a future, because a coroutine would be one
        more to wake at each token."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._pending is not None or self._error is not None:
            self._waiter.set_result(None)
        return self._waiter

    async def get(self) -> Output:
        """Wait for the next output and return it. Raises the error of `fail`."""
        await self.ready()
        return cast(Output, self.take())


def _merge(old: RequestOutput, new: RequestOutput, *, delta: bool) -> None:
    """Bring `old` up to date with `new`; answers with different indices stay apart."""
    place = {completion.index: at for at, completion in enumerate(old.outputs)}
    for completion in new.outputs:
        at = place.get(completion.index)
        if at is None:
            old.outputs.append(completion)
        elif delta:
            _append(old.outputs[at], completion)
        else:
            old.outputs[at] = completion
    old.finished = old.finished or new.finished
    old.num_cached_tokens = max(old.num_cached_tokens, new.num_cached_tokens)
    if new.prompt_logprobs is not None:
        old.prompt_logprobs = new.prompt_logprobs
    if new.kv_transfer_params is not None:
        old.kv_transfer_params = new.kv_transfer_params


def _append(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids += new.token_ids
    old.cumulative_logprob = new.cumulative_logprob
    if new.logprobs is not None:
        old.logprobs = (old.logprobs or []) + new.logprobs
    if new.text_ends is not None:
        old.text_ends = (old.text_ends or []) + new.text_ends
    if new.routed_experts is not None:
        old.routed_experts = new.routed_experts
    old.finish_reason = new.finish_reason
    old.stop_reason = new.stop_reason


class ParentRequest:
    """A request for n > 1 answers. It makes its children, and knows when all of them have ended."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.open_children: set[str] = set()
        self.prompt_logprobs: PromptLogprobs | None = None
        """Log-probabilities of the prompt, from the first child, which alone asks for them."""
        self.num_cached_tokens: int | None = None
        """Number of cached prompt tokens, as reported for the child whose output came first: the
        other children find in the cache what that one computed."""
        self._unfinished = request.sampling.n
        self._answers: list[CompletionOutput] = []

    def child(self, index: int) -> EngineCoreRequest:
        """Return the request for one answer; with a seed, answer i has that seed plus i."""
        params = self.request.sampling
        seed = None if params.seed is None else _wrap_int64(params.seed + index)
        return msgspec.structs.replace(
            self.request,
            request_id=f"{index}_{self.request.request_id}",
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=seed,
                # One of them suffices: the prompt is the same, and cannot come from the cache.
                prompt_logprobs=None if index else params.prompt_logprobs,
            ),
        )

    def finish_child(self) -> bool:
        """Count a finished child; True for the last one."""
        self._unfinished -= 1
        return self._unfinished == 0

    def gather(self, answer: CompletionOutput) -> list[CompletionOutput]:
        """Add a final answer, and return all of them so far, in the order of their indices."""
        self._answers.append(answer)
        return sorted(self._answers, key=lambda known: known.index)


def fan_out(
    request: EngineCoreRequest,
) -> tuple[ParentRequest | None, list[EngineCoreRequest], Collector[Any]]:
    """Return the core's requests, which are the request itself or a parent's n children, and the
    mailbox for their outputs."""
    if request.sampling_params is None or request.sampling_params.n == 1:
        return None, [request], Collector([request.request_id])
    parent = ParentRequest(request)
    children = [parent.child(index) for index in range(request.sampling_params.n)]
    return parent, children, Collector([child.request_id for child in children])


def _wrap_int64(value: int) -> int:
    """Seeds are 64-bit integers: after the largest comes the smallest."""
    return (value + 2**63) % 2**64 - 2**63


class PoolingAnswer:
    """Waits for the vectors of one prompt."""

    parent: Final = None
    """Always None: a prompt is pooled once, so it has no siblings."""

    def __init__(
        self, request: EngineCoreRequest, collector: Collector[PoolingRequestOutput]
    ) -> None:
        self.request_id = request.request_id
        self.external_id = request.shown_id
        self.collector = collector
        self._prompt_token_ids = request.prompt_token_ids or []

    def advance(self, output: EngineCoreOutput) -> bool:
        """Take a step's output; True if it was the last one. An aborted request has no vectors, so
        its consumer gets an error."""
        if not output.finished:
            return False
        if output.pooling_output is None:
            self.collector.fail(EngineGenerateError("aborted before the prompt was pooled"))
        else:
            self.collector.put(
                PoolingRequestOutput(
                    self.external_id,
                    PoolingOutput(output.pooling_output),
                    self._prompt_token_ids,
                    num_cached_tokens=output.num_cached_tokens,
                )
            )
        return True


def joined(parts: Sequence[Array]) -> NDArray[np.int16] | None:
    """Return [tokens, layers, experts per token] of all parts, one after the other; None without
    parts.

    Raises `ValueError` for parts that do not fit each other.
    """
    if not parts:
        return None
    for part in parts:
        if part.dtype != "int16" or len(part.shape) != 3 or part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"routed_experts is {part.dtype} {list(part.shape)}, not int16 "
                f"[tokens, {', '.join(map(str, parts[0].shape[1:]))}]"
            )
    import numpy as np  # here, as in `prompt_embeds`

    return np.concatenate(
        [np.frombuffer(part.data, np.int16).reshape(part.shape) for part in parts]
    )


TokenWords = Callable[[int], tuple[str, bytes] | tuple[None, None]]
"""A function to the text of a token and to its bytes; None without a tokenizer."""


def of_output(lists: LogprobsLists, count: int, words_of: TokenWords) -> list[dict[int, Logprob]]:
    """Return one row for each of the first `count` tokens, which the end of an output
    may cut off."""
    rows = zip(
        lists.logprob_token_ids[:count],
        lists.logprobs,
        lists.sampled_token_ranks,
        strict=False,  # `count` may cut the first of them
    )
    return [_row(*row, words_of) for row in rows]


Row = dict[int, Logprob] | None


class PromptLogprobs(Sequence[Row]):
    """One row for each token of a prompt; None for the first, which nothing precedes.

    A row is made each time that it is read. All rows of a long prompt take a second, too long for
    an event loop, so the reader has to choose where to read them.
    """

    def __init__(self, tensors: LogprobsTensors, words_of: TokenWords) -> None:
        self._tensors = tensors
        self._words_of = words_of

    def __len__(self) -> int:
        return 1 + self._tensors.selected_token_ranks.shape[0]

    @cached_property
    def _columns(self) -> tuple[list[list[int]], list[list[float]], list[int]]:
        """Token ids, values and ranks, a row for each token from the second on."""
        tensors = self._tensors
        return (
            tensors.logprob_token_ids.tolist(),
            tensors.logprobs.tolist(),
            tensors.selected_token_ranks.tolist(),
        )

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index] - 1  # raises IndexError
        if at < 0:
            return None
        token_ids, values, ranks = self._columns
        return _row(token_ids[at], values[at], ranks[at], self._words_of)


def _row(
    token_ids: Sequence[int], values: Sequence[float], rank: int, words_of: TokenWords
) -> dict[int, Logprob]:
    """The token itself with its rank, then the likeliest ones in their order."""
    row: dict[int, Logprob] = {}
    for position, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
        if token_id not in row:
            row[token_id] = Logprob(value, position or rank, *words_of(token_id))
    return row
