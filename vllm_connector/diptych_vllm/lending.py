"""P's part of the scheduler half: prompts that are computed for other engines. Pure.

    arrived ──▶ PROMISED ──finished by its length──▶ PINNED ──worker reports it sent──▶ gone
                   └──────finished otherwise───────▶ gone: the lease is withdrawn

A lease is promised before the worker computes anything of the prompt, so whoever has the answer of
P can open it, even if the grant is still on its way to the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diptych_kv_transfer.parameters import describe_lease
from diptych_kv_transfer.signing.references import References
from diptych_protocol import KVTransferParams
from diptych_vllm.kv_groups import BlockIds, KVGroups
from diptych_vllm.orders import Grant, Order, Promise, Withdraw
from diptych_vllm.request import Arrival

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lent:
    """A promised lease, or one that keeps blocks of a request that has finished."""

    lease_id: str
    num_tokens: int
    digest: str


@dataclass(slots=True)
class Lending:
    """The leases of one engine, by the ids of their requests."""

    references: References
    groups: KVGroups
    lease_seconds: float
    random_bits: Callable[[int], int]
    _promised: dict[str, Lent] = field(default_factory=dict)
    _pinned: dict[str, Lent] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._promised) + len(self._pinned)

    def arrived(self, request: Arrival, wanted: str | None) -> list[Order]:
        """Promise a lease of the prompt's KV. `wanted`: the id that the router has drawn for it."""
        if request.token_ids is None:
            log.warning(
                "request %s: its prompt has embeddings, so its KV is not lent", request.request_id
            )
            return []
        taken = {lent.lease_id for lent in (*self._promised.values(), *self._pinned.values())}
        if wanted is None or wanted in taken:
            wanted = f"{self.random_bits(128):032x}"
        num_blocks = self.groups.num_blocks(request.num_tokens)
        lent = Lent(wanted, request.num_tokens, request.digest)
        self._promised[request.request_id] = lent
        return [Promise(wanted, request.request_id, num_blocks, lent.digest)]

    def finished(
        self,
        request_id: str,
        engine: KVTransferParams,
        block_ids: BlockIds,
        *,
        lends: bool,
    ) -> tuple[list[Order], dict[str, Any] | None]:
        """A request has finished, and `block_ids` hold its KV.

        `lends`: it has finished because it was to go no further, so somebody else goes on with it.
        Returns the parameters for its answer; None if nothing is lent, and its blocks are free.
        """
        lent = self._promised.pop(request_id, None)
        if lent is None:
            return [], None
        blocks = self.groups.lent(lent.num_tokens, block_ids) if lends else None
        if blocks is None:
            if lends:
                log.error("request %s: its KV is gone, so it is not lent", request_id)
            return [Withdraw(lent.lease_id)], None
        self._pinned[request_id] = lent
        params = describe_lease(
            engine,
            request_id=request_id,
            lease_id=lent.lease_id,
            block_ids=blocks,
            num_tokens=lent.num_tokens,
            digest=lent.digest,
            first_token_ids=[],
        )
        signed = self.references.sign(params, self.lease_seconds)
        return [Grant(lent.lease_id, request_id, blocks)], signed.to_dict()

    def sent(self, request_id: str) -> bool:
        """The worker says that nobody reads the blocks of a request. Returns whether it kept any;
        otherwise the report is late, repeated or wrong."""
        return self._pinned.pop(request_id, None) is not None
