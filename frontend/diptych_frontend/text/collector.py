"""The mailbox between the output processor and one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

from diptych_protocol import CompletionOutput, PoolingRequestOutput, RequestOutput

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class Collector(Generic[Output]):
    """Holds at most one output, or the error that ended the request.

    For a slow consumer, deltas are merged and cumulative outputs replaced, so that the text itself
    limits the memory. One producer and one consumer use it, on one event loop; `take` needs no
    loop.
    """

    __slots__ = ("_error", "_pending", "_waiter", "finished", "request_ids")

    def __init__(self, request_ids: Sequence[str] = ()) -> None:
        """`request_ids` are the internal ids of the requests whose outputs come here."""
        self.request_ids = request_ids
        self.finished = False
        """The last output was taken."""
        self._pending: Output | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        """What the consumer waits for, if it does. An `asyncio.Event` costs more, at each token."""

    def put(self, output: Output, *, delta: bool = False) -> None:
        """Add an output, which belongs to the collector from then on. Ignored after `fail`."""
        if self._error is not None:
            return
        if isinstance(self._pending, RequestOutput) and isinstance(output, RequestOutput):
            _merge(self._pending, output, delta=delta)
        else:
            self._pending = output
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Make every later `get` and `take` raise this error; the first error stays."""
        if self._error is None:
            self._pending, self._error = None, error
        self._wake()

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

    async def ready(self) -> None:
        """Wait until `is_ready`."""
        while not self.is_ready:
            await self._news()

    async def get(self) -> Output:
        """Wait for the next output and return it. Raises the error of `fail`."""
        while (output := self.take()) is None:
            await self._news()
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _news(self) -> asyncio.Future[None]:
        """Done at the next `put` or `fail`."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


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
