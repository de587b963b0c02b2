"""The prefill engine's part of the scheduler half: prompts that are computed for other engines.

    arrived ──▶ PROMISED ──finished by its length──▶ PINNED ──worker reports it sent──▶ gone
                   └──────finished otherwise───────▶ gone: the lease is withdrawn

A lease is promised before the worker computes anything of the prompt, so whoever has the answer of
P can open it, even if the grant is still on its way to the worker.

Blocks of a promised lease are lent when they are computed. Their request may lose them again, and
with them the lease: D uses nothing of a lease that was never granted. The request then gets another
lease, because what it computes anew is in other blocks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from diptych_kv_transfer.parameters import describe_lease
from diptych_kv_transfer.signing.references import References
from diptych_protocol import KVTransferParams
from diptych_protocol.kv_transfer_params import LEASE_FIELDS
from diptych_vllm.kv_groups import BlockIds, VllmKVGroups
from diptych_vllm.orders import Grant, Lend, Order, Promise, Withdraw
from diptych_vllm.request import Arrival

log = logging.getLogger(__name__)


def lease_given_back(references: References, raw: Any) -> dict[str, Any]:
    """The fields that name a lease, and nothing else of what somebody sends who does not need it.

    The signature authorises the call, so it is checked here: vLLM's core is not told of a lease
    that no engine of this service has made. Raises `InvalidRequestError`.
    """
    params = KVTransferParams.naming_lease(raw)
    references.check_lease(params)
    return {name: getattr(params, name) for name in LEASE_FIELDS}


@dataclass(frozen=True, slots=True)
class Lent:
    """A promised lease, or one that keeps blocks of a request that has finished."""

    lease_id: str
    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is computed when a step is over."""

    num_tokens: int
    block_ids: BlockIds
    """All blocks of its request by then."""


@dataclass(slots=True)
class Lending:
    """The leases of one engine, by the ids of their requests."""

    references: References
    groups: VllmKVGroups
    lease_seconds: float
    random_bits: Callable[[int], int]
    announced_from: int | None = None
    """From how many tokens on a prompt is computed in several steps, so that it helps to announce
    it to D. None: never."""
    _promised: dict[str, Lent] = field(default_factory=dict)
    _pinned: dict[str, Lent] = field(default_factory=dict)
    _progress: dict[str, Progress] = field(default_factory=dict)
    """How far the prompts of promised leases are, when the steps so far are over."""
    _num_lent: dict[str, int] = field(default_factory=dict)
    """How many blocks of a promised lease are lent."""

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

    @property
    def promised(self) -> Set[str]:
        """The requests whose prompts are not computed yet."""
        return self._promised.keys()

    def step(self, progress: Mapping[str, Progress], preempted: Set[str]) -> list[Order]:
        """A step is about to be sent to the worker.

        progress: how far it will bring each request that it computes. preempted: requests that have
        lost their blocks, which this step may write to.
        """
        orders = []
        for request_id in preempted:
            orders += self._preempted(request_id)
        for request_id, lent in self._promised.items():
            # What this step finds in the prefix cache may be computed by itself, so only what was
            # there before it is certain. The last block comes with the grant: who has all blocks
            # closes the lease, and one that is only promised cannot be confirmed.
            before = self._progress.get(request_id)
            if before is not None:
                blocks = self.groups.full(
                    min(before.num_tokens, lent.num_tokens - 1), before.block_ids
                )
                if len(blocks) > self._num_lent.get(request_id, 0):
                    self._num_lent[request_id] = len(blocks)
                    orders.append(Lend(lent.lease_id, blocks))
        self._progress |= {name: x for name, x in progress.items() if name in self._promised}
        return orders

    def _preempted(self, request_id: str) -> list[Order]:
        self._progress.pop(request_id, None)
        if not self._num_lent.pop(request_id, 0):
            return []
        former = self._promised[request_id]
        lease_id = f"{self.random_bits(128):032x}"
        self._promised[request_id] = dataclasses.replace(former, lease_id=lease_id)
        log.info("request %s lost its blocks, and with them its lease", request_id)
        num_blocks = self.groups.num_blocks(former.num_tokens)
        promise = Promise(lease_id, request_id, num_blocks, former.digest)
        return [Withdraw(former.lease_id), promise]

    def finished(
        self, request_id: str, engine: KVTransferParams, block_ids: BlockIds, *, lends: bool
    ) -> tuple[list[Order], dict[str, Any] | None]:
        """A request has finished, and `block_ids` hold its KV.

        `lends`: it has finished because it was to go no further, so somebody else goes on with it.
        Returns the parameters for its answer; None if nothing is lent, and its blocks are free.
        """
        lent = self._promised.pop(request_id, None)
        self._progress.pop(request_id, None)
        self._num_lent.pop(request_id, None)
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
        signed = self.references.sign(params, self.lease_seconds).to_dict()
        if self.announced_from is not None:
            signed["announcing"] = {
                "proof": self.references.proof_of_engine(engine),
                "min_tokens": self.announced_from,
            }
        return [Grant(lent.lease_id, request_id, blocks)], signed

    def sent(self, request_id: str) -> bool:
        """The worker says that nobody reads the blocks of a request. Returns whether it kept any;
        otherwise the report is late, repeated or wrong."""
        return self._pinned.pop(request_id, None) is not None
