"""An owner of an EngineCore in the test's own process: what CoreServer does, without sockets.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import pytest
from engine_kit.block_checks import check_blocks
from engine_kit.core import CLIENT, core_request, generate, make_core, step, tokens

from diptych_engine.control.core import EngineCore
from diptych_kv_transfer.connector import KVConnector
from diptych_protocol import EngineCoreOutput, FinishReason

LONG = {"max_tokens": 40, "ignore_eos": True}


class Owner:
    """What CoreServer does, without sockets: step, tell, settle."""

    def __init__(self, **options: Any) -> None:
        self.core: EngineCore = make_core(**{"max_num_batched_tokens": 32, **options})
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.order: list[str] = []
        """Requests in the order in which they ended."""

    def add(self, name: str, prompt: list[int] | None = None, **params: Any) -> None:
        self.outputs[name] = []
        self.core.add(core_request(name, prompt or [3, 1, 4, 1, 5], **{**LONG, **params}), CLIENT)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.handle_transfer_events()
            made = step(self.core)
            for output in made:
                self.outputs[output.request_id].append(output)
                if output.finished:
                    self.order.append(output.request_id)
            self.core.deferred.settle()

    def until(self, condition: Callable[[], Any], most: int = 500) -> None:
        for _ in range(most):
            if condition():
                return
            self.turn()
        pytest.fail("not within 500 steps")

    def call(self, method: str, *args: Any) -> Any:
        """The answer of a utility call, after as many steps as it takes."""
        answer = self.core.call(method, list(args))
        if not isinstance(answer, Future):
            return answer
        self.until(answer.done)
        return answer.result()

    def finish(self, *names: str) -> None:
        self.until(lambda: all(self.ended(name) for name in names))

    def ended(self, name: str) -> FinishReason | None:
        made = self.outputs[name]
        return made[-1].finish_reason if made else None

    def tokens(self, name: str) -> list[int]:
        return tokens(self.outputs[name])

    @property
    def connector(self) -> KVConnector:
        """Its end of the hinge, which it must have."""
        assert self.core.connector is not None
        return self.core.connector

    @property
    def all_blocks_free(self) -> bool:
        pool = self.core.scheduler.pool
        check_blocks(pool)
        return pool.num_free == pool.num_blocks


@cache
def undisturbed() -> list[int]:
    """What an engine that nobody disturbs says to the usual request."""
    return generate(make_core(), [3, 1, 4, 1, 5], **LONG)


@cache
def shared_core() -> EngineCore:
    """For calls that change nothing."""
    return make_core()
