"""What an engine keeps of answers for a while after they ended here, for clients that come back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from diptych_engine.scheduling.request import NOT_SAMPLED, Request
from diptych_protocol import FinishReason, KeptAnswer

KEEP_S: Final = 10.0
"""Clients come back at once; a gateway needs some seconds to see that a router is gone."""
MOST_TOKENS: Final = 1 << 20
"""The most tokens of all answers; the oldest go first."""
LEAST_TOKENS: Final = 256
"""A shorter answer counts as so many, so that there are at most 4,096."""
FINAL: Final = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    client: bytes
    until: float
    tokens: array[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    is_unpaid: bool = False
    """Its client was lost, maybe before it had told and billed what it got."""


class KeptAnswers:
    """The tokens of the answers that somebody may take over, by their names; the oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.by_name: dict[str, _Kept] = {}
        self._num_tokens = 0
        self._clock = clock

    def keep(self, request: Request) -> None:
        """Keep the answer of a request that has ended here, in place of what its name stood for."""
        self._drop(request.kept_as)
        output = array("i", request.token_ids[request.num_prompt_tokens :])
        while output and output[-1] == NOT_SAMPLED:
            output.pop()
        handed_over = request.kv_transfer is not None and request.kv_transfer.do_remote_decode
        reason, stop = request.finish_reason, request.stop_reason
        if reason not in FINAL or (handed_over and reason is FinishReason.LENGTH):
            reason = stop = None
        until = self._clock() + KEEP_S
        self.by_name[request.kept_as] = _Kept(
            request.tenant, request.client, until, output, reason, stop
        )
        self._num_tokens += max(len(output), LEAST_TOKENS)
        while self._num_tokens > MOST_TOKENS:
            self._drop(next(iter(self.by_name)))

    def client_lost(self, client: bytes) -> None:
        """Record that what this client had asked for may not have been billed."""
        for name, kept in self.by_name.items():
            if kept.client == client:
                self.by_name[name] = replace(kept, is_unpaid=True)

    def find(self, name: str, tenant: str) -> KeptAnswer | None:
        """Return what is kept under a name of this tenant."""
        self.forget_old()
        kept = self.by_name.get(name)
        if kept is None or kept.tenant != tenant:
            return None
        return KeptAnswer(
            kept.tokens.tolist(), kept.finish_reason, kept.stop_reason, is_unpaid=kept.is_unpaid
        )

    def forget_old(self) -> None:
        """Forget what was kept for long enough."""
        now = self._clock()
        for name in [name for name, kept in self.by_name.items() if kept.until <= now]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        kept = self.by_name.pop(name, None)
        if kept is not None:
            self._num_tokens -= max(len(kept.tokens), LEAST_TOKENS)
