"""The half in vLLM's scheduler: it gives orders to the worker half, and decides which of its
reports vLLM may see. It performs no I/O, but reads a clock and random bits."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from diptych_kv_transfer.signing.references import References
from diptych_protocol import InvalidRequestError, KVTransferParams
from diptych_vllm.fetching import Fetching
from diptych_vllm.figures import Growth
from diptych_vllm.kv_groups import BlockIds, VllmKVGroups
from diptych_vllm.lending import Lending, Progress
from diptych_vllm.orders import Order, RevokeAll
from diptych_vllm.request import Arrival

log = logging.getLogger(__name__)


class SchedulerHalf:
    """Follows the requests of one engine from their arrival until vLLM forgets them."""

    def __init__(
        self,
        references: References,
        groups: VllmKVGroups,
        lease_seconds: float,
        *,
        lends: bool = True,
        fetches: bool = True,
        announced_from: int | None = None,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """
        Args:
            groups: how vLLM keeps the KV of a request.
            lends: whether vLLM's `kv_role` lets this engine lend.
            fetches: whether vLLM's `kv_role` lets this engine fetch.
            announced_from: see `Lending.announced_from`.
            random_bits: `random_bits(k)` returns k unpredictable bits.
        """
        self._lends, self._fetches = lends, fetches
        self._lending = Lending(references, groups, lease_seconds, random_bits, announced_from)
        self._fetching = Fetching(references, groups, lease_seconds)
        self._engine: KVTransferParams | None = None
        self._orders: list[Order] = []
        self._growth = Growth()
        self.reports_dropped = 0
        """Reports of the worker half that were about nothing that vLLM waits for."""

    def __len__(self) -> int:
        """The number of requests that it follows."""
        return len(self._lending) + len(self._fetching)

    @property
    def _engine_id(self) -> str:
        return "" if self._engine is None else self._engine.remote_engine_id or ""

    def meet(self, engine: KVTransferParams) -> None:
        """Receive the worker's hinge's description of itself, which every reference contains."""
        self._engine = engine

    # --- requests -----------------------------------------------------------------------------

    def arrived(self, request: Arrival) -> None:
        """Record that vLLM has admitted a request. Called once for each, before anything else."""
        if request.params is None:
            return
        if request.rejected:
            self._orders += self._fetching.rejected(request, self._engine_id)
            return
        try:
            params = KVTransferParams.parse(request.params)
        except InvalidRequestError as exc:
            self._unreadable(request, str(exc))
            return
        if params.do_remote_decode:
            self._asked_to_lend(request, params)
        elif params.do_remote_prefill:
            self._brings_reference(request, params)

    def _unreadable(self, request: Arrival, reason: str) -> None:
        if isinstance(request.params, dict) and not request.params.get("do_remote_prefill"):
            log.warning("request %s: its KV is not lent: %s", request.request_id, reason)
        else:
            self._fetching.refused(request, reason, None)

    def _asked_to_lend(self, request: Arrival, params: KVTransferParams) -> None:
        if self._engine is None or not self._lends:
            log.warning(
                "request %s: its KV is not lent: kv_role has to be kv_producer or kv_both",
                request.request_id,
            )
            return
        self._orders += self._lending.arrived(request, params.lease_id)

    def _brings_reference(self, request: Arrival, params: KVTransferParams) -> None:
        if self._engine is None or not self._fetches:
            reason = "kv_role has to be kv_consumer or kv_both"
            self._fetching.refused(request, reason, params)
        elif params.remote_engine_id == self._engine_id:
            reason = "the reference is this engine's own; send it to a decode engine"
            self._fetching.refused(request, reason, params)
        elif request.token_ids is None:
            reason = "no lease is for a prompt that has embeddings"
            self._fetching.refused(request, reason, params)
        else:
            self._orders += self._fetching.arrived(request, params)

    def num_elsewhere(self, request_id: str, num_here: int) -> int:
        """Return how many tokens of a prompt can be loaded after the first `num_here` ones.

        It has no side effects.
        """
        return self._fetching.num_elsewhere(request_id, num_here)

    def allocated(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> None:
        """Record that vLLM has allocated blocks to a request, which waits for a load of
        `num_tokens` tokens, or for none.

        block_ids: all blocks of the request. It may be called repeatedly.
        """
        self._orders += self._fetching.allocated(request_id, block_ids, num_tokens)

    @property
    def promised(self) -> Set[str]:
        """The requests whose progress `step` needs."""
        return self._lending.promised

    def step(self, progress: Mapping[str, Progress], preempted: Set[str]) -> None:
        """Record that vLLM has scheduled a step, which the orders taken next go with.

        progress: how far it will bring each promised request that it computes. preempted: the
        promised requests that have lost their blocks.
        """
        self._orders += self._lending.step(progress, preempted)

    def finished(
        self, request_id: str, block_ids: BlockIds, *, by_length: bool
    ) -> dict[str, Any] | None:
        """A request has finished; it is called once for each.

        Args:
            block_ids: its blocks whose KV is computed.
            by_length: it has finished because it was to go no further.

        Returns what its answer tells a decode engine; vLLM then keeps the blocks until the request
        is reported as sent. None: the blocks are not kept.
        """
        if self._engine is None:
            return None
        self._orders += self._fetching.finished(request_id)
        orders, params = self._lending.finished(
            request_id, self._engine, block_ids, lends=by_length
        )
        self._orders += orders
        return params

    def reset(self) -> None:
        """Forget all KV: nobody may read any of it from now on."""
        self._orders.append(RevokeAll())

    # --- the worker half ----------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether there are orders for the worker half."""
        return bool(self._orders)

    def take_orders(self) -> list[Order]:
        """Return the orders since the last call, for the worker half, in this order."""
        orders, self._orders = self._orders, []
        return orders

    def awaited(self, sent: Iterable[str], received: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return the ids that vLLM waits for, each once. Any other would end its core."""
        good_sent = {request_id for request_id in sent if self._lending.sent(request_id)}
        good_received = {
            request_id for request_id in received if self._fetching.received(request_id)
        }
        dropped = (set(sent) - good_sent) | (set(received) - good_received)
        for request_id in dropped:
            log.error("request %s: a report that nobody waits for is dropped", request_id)
        self.reports_dropped += len(dropped)
        return good_sent, good_received

    def take_figures(self) -> dict[str, int]:
        """Return the counts since the last call; see `figures.OF_SCHEDULER`."""
        return self._growth.of(
            {
                "references_refused": self._fetching.num_refused,
                "reports_dropped": self.reports_dropped,
            }
        )
