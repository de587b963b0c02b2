"""Requests that a decode server is sent while prefill still computes their prompts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from diptych_protocol import EngineCoreOutput, EngineCoreRequest, FinishReason
from diptych_router.engines.vllm.exchange import Exchanger, HandOn
from diptych_router.engines.vllm.hand_off import ticket_of
from diptych_router.engines.vllm.service import VllmService


class EarlyAnswer:
    """The answer to one of them, which is kept until its request comes by itself.

    The server waits for the KV. Whatever goes wrong meanwhile costs nobody anything: the request
    is then sent again, with the reference of prefill.
    """

    def __init__(
        self,
        announced: EngineCoreRequest,
        num_blocks: int,
        run: Callable[[HandOn], Coroutine[Any, Any, None]],
        on_failed: Callable[[], object],
    ) -> None:
        """
        Args:
            num_blocks: how many blocks of the server it takes.
            run: sends the request, and hands its outputs on until they end.
            on_failed: called when nothing will come of it.
        """
        self.num_blocks = num_blocks
        self._num_known = len(announced.generated_token_ids or ())
        self._on_failed = on_failed
        self._outputs: list[EngineCoreOutput] = []
        self._hand_on: HandOn | None = None
        self._begun = asyncio.Event()
        """It has brought something, or has failed."""
        self.has_failed = False
        self.task = asyncio.create_task(run(self._take))
        self.task.add_done_callback(self._ended)

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        if self._hand_on is not None:
            self._hand_on(outputs)
        elif outputs:
            self._outputs += outputs
            if self._outputs[0].finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._fail()
            self._begun.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._hand_on is None:
            self._fail()

    def _fail(self) -> None:
        self.has_failed = True
        self._begun.set()
        self._on_failed()

    async def take_over(self, request: EngineCoreRequest, hand_on: HandOn) -> bool:
        """The request has come. Hand all its outputs on until they end.

        Returns False if nothing has come of it: the request has to be sent. Raises what `run`
        raises after that.
        """
        try:
            await self._begun.wait()
            same = len(request.generated_token_ids or ()) == self._num_known
            if self.has_failed or not same:
                return False
            self._hand_on = hand_on
            hand_on(self._outputs)
            await self.task
        finally:
            self.task.cancel()
        return True

    def close(self) -> None:
        """The request will not come."""
        self.task.cancel()


class EarlyAnswers:
    """Those of one server, by the ids of requests that have not come yet."""

    def __init__(self, service: VllmService) -> None:
        self._service = service
        self._answers: dict[str, tuple[str, EarlyAnswer]] = {}
        """With the leases that they read."""

    def announced(
        self, request: EngineCoreRequest, exchanger: Exchanger, block_size: int, num_free: int
    ) -> None:
        """Send a request whose prompt another server computes now, if that brings it on.

        It takes blocks while it waits, so all of them together have half of the server's free ones.
        """
        asked = ticket_of(request) or {}
        num_tokens, lease_id = asked.get("remote_num_tokens") or 0, asked.get("lease_id")
        at_least = self._service.announced_from(str(asked.get("remote_engine_id")))
        if lease_id is None or at_least is None or num_tokens < at_least:
            return
        num_blocks = -(-num_tokens // block_size)
        taken = sum(answer.num_blocks for _, answer in self._answers.values())
        if taken + num_blocks > num_free // 2:
            return
        core_id = request.request_id
        run = functools.partial(exchanger.run, request)
        answer = EarlyAnswer(request, num_blocks, run, lambda: self.take(core_id))
        self._answers[core_id] = lease_id, answer
        self._service.early.add(lease_id)

    def take(self, core_id: str) -> EarlyAnswer | None:
        """A request has come, or nothing will come of it. None: it was not sent ahead."""
        lease_id, answer = self._answers.pop(core_id, ("", None))
        self._service.early.discard(lease_id)
        return answer

    def drop(self, core_id: str) -> None:
        """A request will not come."""
        answer = self.take(core_id)
        if answer is not None:
            answer.close()

    def drop_all(self) -> None:
        """The server is lost."""
        for core_id in list(self._answers):
            self.drop(core_id)
