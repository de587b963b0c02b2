"""A constant load of questions with known answers, and what became of each.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from model_kit.sensitive_model import ANSWER_TOKENS, Question

from diptych_protocol import (
    ClientClosedError,
    DiptychError,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    RequestOutputKind,
    SamplingParams,
)
from diptych_router.requests.pool_client import PoolClient

EXPECTED_ERRORS = (
    ClientClosedError, EngineDeadError, EngineGenerateError, EngineOverloadedError,
)  # fmt: skip
"""What a request may end in while things break."""
NUM_SALTS = 3
"""Most requests find nothing in a prefix cache; the others share so many salts."""


@dataclass
class Fate:
    """One request's life."""

    name: str
    question: Question
    began: float
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    """`answered`, `aborted`, `failed`; empty while it is open."""
    error: str = ""
    attempts: int = 1
    seconds: float = 0.0

    @property
    def wrong(self) -> str:
        """Why this must not be; empty if all is well."""
        answer = self.question.answer
        if self.tokens != answer[: len(self.tokens)]:
            return f"answered {self.tokens}, not {answer}"
        if self.outcome == "answered" and self.tokens != answer:
            return f"ended after {len(self.tokens)} of {len(answer)} tokens"
        if self.outcome == "failed" and self.error.startswith("unexpected"):
            return self.error
        return "" if self.outcome else "never ended"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.outcome or 'OPEN'} after {self.seconds:.2f} s, "
            f"{len(self.tokens)} tokens, {self.attempts} attempts {self.error} {self.wrong}"
        )


class Load:
    """Asks again and again, until stopped."""

    def __init__(
        self, client: Callable[[], PoolClient | None], questions: list[Question], seed: int
    ) -> None:
        """`client`: who to ask now."""
        self.fates: list[Fate] = []
        self.abort_share = 0.0
        """The share of the requests that begin from now on which leave early."""
        self.slow_share = 0.0
        """The share of those whose client takes its time after each piece of the answer."""
        self._client = client
        self.questions = questions
        self._rng = random.Random(seed)
        self._seed = seed
        self._stopping = False
        self._open: set[asyncio.Task[None]] = set()
        self._askers: list[asyncio.Task[None]] = []

    def start(self, concurrency: int) -> None:
        self._askers += [asyncio.create_task(self._ask_on()) for _ in range(concurrency)]

    def burst(self, count: int) -> None:
        """So many requests at once, besides."""
        for _ in range(count):
            self._begin()

    async def settle(self, within_s: float) -> None:
        """Wait for those that are open."""
        if self._open:
            await asyncio.wait(self._open, timeout=within_s)

    async def finish(self, within_s: float) -> None:
        """Begin no more, and wait for those that are open; some may stay so."""
        self._stopping = True
        await asyncio.gather(*self._askers)
        await self.settle(within_s)
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _ask_on(self) -> None:
        while not self._stopping:
            task = self._begin()
            if task is None:
                await asyncio.sleep(0.01)
                continue
            while not (task.done() or self._stopping):
                await asyncio.wait((task,), timeout=0.1)
            await asyncio.sleep(0.002)  # refusals come at once

    def _begin(self) -> asyncio.Task[None] | None:
        client = self._client()
        if client is None:
            return None
        rng = self._rng
        name = f"{self._seed}-{len(self.fates)}"
        fate = Fate(name, rng.choice(self.questions), time.monotonic())
        self.fates.append(fate)
        salt = rng.choice([fate.name, fate.name, f"shared {rng.randrange(NUM_SALTS)}"])
        leaves_after = rng.randrange(ANSWER_TOKENS) if rng.random() < self.abort_share else None
        rest_s = rng.uniform(0.05, 0.3) if rng.random() < self.slow_share else 0.0
        task = asyncio.create_task(self._follow(client, fate, salt, leaves_after, rest_s))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def _follow(
        self,
        client: PoolClient,
        fate: Fate,
        salt: str,
        leaves_after: int | None,
        rest_s: float,
    ) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": fate.question.prompt, "cache_salt": salt}
        outputs = client.generate(prompt, params, fate.name)  # type: ignore[arg-type]
        try:
            if leaves_after == 0:
                await self._leave_soon(outputs.__anext__())
                fate.outcome = "aborted"
                return
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    fate.tokens += output.outputs[0].token_ids
                    fate.attempts = (output.metrics or {}).get("attempts", fate.attempts)
                    if leaves_after is not None and len(fate.tokens) >= leaves_after:
                        fate.outcome = "aborted"
                        return
                    if rest_s:
                        await asyncio.sleep(rest_s)
            fate.outcome = "answered"
        except EXPECTED_ERRORS as exc:
            fate.outcome, fate.error = "failed", f"{type(exc).__name__}: {exc}"
        except DiptychError as exc:
            fate.outcome, fate.error = "failed", f"unexpected {type(exc).__name__}: {exc}"
        finally:
            fate.seconds = time.monotonic() - fate.began

    async def _leave_soon(self, first: Awaitable[object]) -> None:
        """Hang up before the first token, or at about that time."""
        task = asyncio.ensure_future(first)
        await asyncio.wait((task,), timeout=self._rng.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
