"""A core's part in hand-offs: its requests to the hinge, and what it does with the answers."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diptych_engine.handoff.block_store import BlockStore
from diptych_engine.handoff.kept_blocks import KeptBlocks
from diptych_engine.handoff.prefix_fetches import PrefixFetches
from diptych_engine.scheduling.request import LoadOrder, Request, RequestStatus, StoredPrefix
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_kv_transfer import (
    KVConnector,
    LeaseEnded,
    PrefixAsked,
    PrefixLate,
    UnprovenReferenceError,
)
from diptych_kv_transfer.tables.load import Prefix
from diptych_protocol import (
    DiptychError,
    EngineCoreRequest,
    EngineDescription,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
    KVTransferStats,
)
from diptych_protocol.kv_transfer_params import bad_params

log = logging.getLogger(__name__)

Admit = Callable[[EngineCoreRequest], Request]
"""Validates an announced request. Raises `InvalidRequestError`."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A request whose prompt is being computed for another engine."""

    request: Request
    lease_id: str
    kept: Sequence[int]
    """The places of the blocks that will be lent, in the request's list."""


class HandOffs:
    """Connects the scheduler, which decides, with the connector, which acts.

    An engine without a connector lends and fetches nothing.
    """

    def __init__(
        self,
        description: EngineDescription,
        scheduler: Scheduler,
        connector: KVConnector | None,
        admit_announced: Admit,
    ) -> None:
        self._description = description
        self._scheduler = scheduler
        self._early, self._lent = scheduler.early, scheduler.leased
        self._groups = scheduler.pool.groups
        self._connector = connector
        self._admit_announced = admit_announced
        self._promises: dict[str, Promise] = {}
        """By the ids of the requests; those whose leases have ended are not among them."""
        self.fetches = PrefixFetches()
        self._rejections_ignored = 0
        self.before_load: Callable[[Sequence[int]], None] | None = None
        """Told of the blocks that a load will fill; whoever builds the core may set it."""
        self.store: BlockStore | None = None
        """Keeps blocks on disk; whoever builds the core may set it."""
        self.kept: KeptBlocks | None = None
        """Keeps blocks for the next core; see `keep`."""

    def keep(self, kept: KeptBlocks) -> None:
        """Keep blocks and leases for the next core, and go on with those of the last one. Call
        before anything is computed; the connector has the leases already."""
        self.kept = kept
        for lease in kept.left if self._connector is not None else ():
            self._lent.begin(lease.lease_id)
            self._lent.lend(lease.lease_id, lease.block_ids)

    # --- requests come and go -----------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `InvalidRequestError` if the lease for a request belongs to another one, and
        `UnprovenReferenceError` if the lease that it comes with was not lent for it."""
        params = request.kv_transfer
        if self._connector is None or params is None:
            return
        if params.do_remote_prefill:
            self._check_count(params)
            tokens = request.token_ids[: params.remote_num_tokens]
            self._connector.check(params, tokens, request.kv_identity)
        elif params.lease_id is not None and params.lease_id in self._lent:
            raise bad_params("there is a lease of this id already")

    def _check_count(self, params: KVTransferParams) -> None:
        """Raise `InvalidRequestError` unless there are as many blocks as the tokens need."""
        own, remote = self._description.block_size, params.remote_num_tokens or 0
        size = params.remote_block_size or own
        kept = self._scheduler.prefixes.kept(remote)
        wanted = -(-remote // size) if size != own else len(kept)
        for blocks in params.remote_block_ids or []:
            if len(blocks) != wanted:
                raise bad_params(
                    f"{len(blocks)} blocks for {remote} tokens do not fit blocks of {size}"
                )

    def arrived(self, request: Request) -> None:
        """Begin the hand-offs of an admitted request: promise what it will lend, keep alive what it
        will fetch."""
        if self.store is not None:
            self.store.offer(request)
        self._reach_source(request)
        params = request.kv_transfer
        if self._connector is None or params is None:
            return
        if params.do_remote_decode:
            if request.max_total_tokens == request.num_tokens + 1:  # so it will lend the prompt
                self._promise(request, params.lease_id, request.num_tokens, self._connector)
            return
        self._connector.take(params)
        if self._early.claim(request):
            self._connector.adopt_load(request.request_id)
        else:
            self.forgo(request.request_id)
            if request.request_id in self._early.loads:
                # Something else is still on its way under this name: compute the prompt here.
                self._connector.reject(params)
                request.kv_transfer = None
            else:
                self._connector.hold(request.request_id, params)

    def _reach_source(self, request: Request) -> None:
        """Connect to the engine that may remember a prefix of a request, if it is one of ours."""
        source = request.prefix_source
        if source is None or isinstance(source, StoredPrefix):
            return
        try:
            if self._connector is None:
                request.prefix_source = None
            else:
                self._connector.reach(source)
        except UnprovenReferenceError as exc:
            request.prefix_source = None
            self.fetches.refused(request.request_id, str(exc))

    def _promise(
        self, request: Request, lease_id: str | None, num_tokens: int, connector: KVConnector
    ) -> Promise:
        kept = self._scheduler.prefixes.kept(num_tokens)
        lease_id = connector.promise(
            request.request_id,
            lease_id,
            len(kept),
            request.token_ids[:num_tokens],
            request.kv_identity,
        )
        self._lent.begin(lease_id)
        promise = self._promises[request.request_id] = Promise(request, lease_id, kept)
        return promise

    def gone(self, request: Request) -> None:
        """End the hand-offs of a request that is about to end without lending anything."""
        if self._connector is None:
            return
        self._withdraw(request.request_id)
        self._early.drop(request.request_id)
        self._connector.cancel_load(request.request_id)

    def _withdraw(self, request_id: str) -> None:
        promise = self._promises.pop(request_id, None)
        if promise is not None and self._connector is not None:
            self._connector.withdraw(promise.lease_id)

    def withdraw_lent(self) -> None:
        """End the leases of waiting requests that would have to compute lent blocks again."""
        for promise in list(self._promises.values()):
            waits = promise.request.status is not RequestStatus.RUNNING
            if waits and self._lent.count(promise.lease_id):
                self._withdraw(promise.request.request_id)

    def forgo(self, request_id: str) -> None:
        """Forget an announced request that will not come or is refused. Harmless if none was
        announced."""
        if self._connector is not None and request_id in self._early.loads:
            self._early.drop(request_id)
            self._connector.cancel_load(request_id)

    def announce_kv_transfer(self, request: EngineCoreRequest) -> bool:
        """Prepare for a request that will come, under this id, when a prefill engine has computed
        its prompt.

        It is the later ADD without the tokens that prefill samples. Its `kv_transfer_params` have
        `do_remote_prefill`, `remote_engine_id`, `remote_host`, `remote_port`, `epoch`, `compat`,
        the `lease_id` that the prefill request was given, as `remote_num_tokens` the length of its
        prompt (`generated_token_ids` included), and as `proof` the prefill engine's
        `kv_transfer_proof`.

        Returns whether blocks are reserved and filled while prefill computes; False: there is only
        a connection. Either way nothing is promised, nothing is answered later, and the ADD must
        contain everything again. Without an ADD it ends by ABORT of the id, or by itself after
        `load_timeout_s`; the lease stays as it is. Repeating it is harmless. Raises
        `InvalidRequestError` for the reasons that the ADD would be refused for.
        """
        if self._connector is None:
            raise InvalidRequestError("this engine takes no part in hand-offs")
        scheduler, connector = self._scheduler, self._connector
        if request.request_id in self._early.loads:
            return True
        if scheduler.find(request.request_id) or scheduler.is_loading(request.request_id):
            return False
        announced = self._admit_announced(request)
        params = announced.kv_transfer
        if params is None or not params.do_remote_prefill:
            raise InvalidRequestError("only a hand-off to this engine can be announced")
        connector.check_announced(params)
        # Requests that are here come first, and during a pause memory may go.
        wanted_here = scheduler.has_waiting or scheduler.paused
        order = None if wanted_here else self._early.reserve(announced)
        if order is None:
            connector.reach(params)
        else:
            self._start(connector, order, early=True)
        return order is not None

    # --- a step -------------------------------------------------------------------------------

    def start_loads(self) -> None:
        """Begin the loads for which the scheduler has reserved blocks."""
        for order in self._scheduler.take_load_orders():
            if isinstance(order.params, StoredPrefix):
                self._read(order)
            elif self._connector is not None:
                self._start(self._connector, order, early=False)

    def _read(self, order: LoadOrder) -> None:
        if self.before_load is not None:
            self.before_load(order.local_block_ids)
        if self.store is not None:
            self.store.read(order)

    def _start(self, connector: KVConnector, order: LoadOrder, *, early: bool) -> None:
        if self.before_load is not None:
            self.before_load(order.local_block_ids)
        size = self._description.block_size
        if order.names is not None:
            self.fetches.start(order)
            name_tokens = order.params.remote_block_size or size
            whole = order.num_blocks if self._groups.windowed else None
            prefix = Prefix(order.names, name_tokens, size, order.indices[0], whole)
            connector.fetch_prefix(
                order.request_id, order.params, prefix, order.indices, order.local_block_ids
            )
            return
        connector.start_load(
            order.request_id,
            order.params,
            order.indices,
            order.local_block_ids,
            order.token_ids,
            order.identity,
            early=early,
            num_blocks=order.num_blocks if self._groups.windowed else None,
        )

    def lend_computed(self) -> None:
        """Lend the full blocks that a step has completed, so that they travel while others are
        computed."""
        if self._connector is None:
            return
        for promise in self._promises.values():
            request, lent = promise.request, self._lent.count(promise.lease_id)
            rows = request.num_computed_tokens // self._description.block_size
            full = bisect_left(promise.kept, rows * self._groups.count)
            if full > lent:
                blocks = [request.block_ids[place] for place in promise.kept[lent:full]]
                self._connector.lend(promise.lease_id, self._lent.lend(promise.lease_id, blocks))

    def finish(self, request: Request, reason: FinishReason) -> dict[str, Any] | None:
        """Lend the KV of a request that computed a prompt for a decode engine and is about to
        finish.

        Returns the decode engine's parameters, if there is anything to lend.
        """
        if reason is FinishReason.LENGTH:
            return self.grant(request)
        self.gone(request)
        return None

    def grant(self, request: Request) -> dict[str, Any] | None:
        """Lend the computed blocks of a request that is about to finish.

        Returns the parameters by which a decode engine fetches them.
        """
        if self._connector is None:
            return None
        computed = request.num_computed_tokens
        promise = self._promises.pop(request.request_id, None)
        if promise is None:
            wanted = None if request.kv_transfer is None else request.kv_transfer.lease_id
            lease_id = None if wanted is None or wanted in self._lent else wanted
            promise = self._promise(request, lease_id, computed, self._connector)
            del self._promises[request.request_id]
        lent, kept = self._lent.count(promise.lease_id), promise.kept
        blocks = [request.block_ids[place] for place in kept[lent:]]
        params = self._connector.grant(
            request.request_id,
            self._lent.lend(promise.lease_id, blocks),
            request.token_ids[:computed],
            request.token_ids[computed:],
            request.kv_identity,
            promise.lease_id,
        )
        if self.kept is not None:
            self.kept.granted(params)
        return params.to_dict()

    # --- the hinge reports --------------------------------------------------------------------

    def handle_events(self) -> list[tuple[Request, str]]:
        """Apply what the hinge reports. Returns requests that failed because of it, and why."""
        failures = []
        for event in self._connector.poll_events() if self._connector is not None else ():
            if isinstance(event, LeaseEnded):
                self._lease_ended(event)
                continue
            if isinstance(event, PrefixAsked):
                self._lend_prefix(event)
                continue
            if isinstance(event, PrefixLate):
                self._scheduler.go_on_without(event.request_id)
                continue
            failed = self._scheduler.load_ended(
                event.request_id, ok=event.ok, num_tokens=event.num_tokens
            )
            if self.fetches.ended(event):
                self.lend_computed()
            if failed is not None:
                error = f"the KV hand-off failed: {event.reason}"
                log.warning("request %s: %s", event.request_id, error)
                failed.kv_transfer = None  # the lease has ended with the load
                self._scheduler.finish(failed, FinishReason.ERROR)
                failures.append((failed, error))
        return failures

    def _lend_prefix(self, asked: PrefixAsked) -> None:
        """Another engine lacks a prefix: lend what is remembered of it."""
        if self._connector is None:
            return
        blocks: list[int] = []
        alike = asked.weights == self._connector.weights()
        if alike and not self._scheduler.paused:  # memory may go then
            blocks = self._lent.lend_prefix(asked.lease_id, asked.names, asked.num_known)
        last_name = asked.names[-1 if self._groups.windowed else len(blocks) - 1]
        self._connector.lend_prefix(asked.lease_id, blocks, last_name)

    def _lease_ended(self, event: LeaseEnded) -> None:
        if self.kept is not None:
            self.kept.leases.ended(event.lease_id)
        self._lent.end(event.lease_id)
        promise = self._promises.get(event.request_id)
        if promise is not None and promise.lease_id == event.lease_id:
            # Whoever was to read it will not. If the request finishes, it gets a lease of its own.
            del self._promises[event.request_id]

    def stats(self) -> KVTransferStats | None:
        """Return totals since the start, and what is held now; None without a hinge."""
        if self._connector is None:
            return None
        stats = self._connector.stats()
        self._early.count(stats)
        self.fetches.count(stats)
        stats.rejections_ignored = self._rejections_ignored
        return stats

    # --- rejection ----------------------------------------------------------------------------

    def reject_kv_transfer(self, request_id: str, raw_params: dict[str, Any]) -> None:
        """Free what the prefill engine holds for a request that was refused or lost before
        admission.

        It works on either side: a prefill engine ends its own lease; a decode engine tells the
        prefill engine. Repeating it is harmless. Parameters without a valid signature are counted,
        and raise `InvalidRequestError`. Parameters of a present or past request change nothing,
        because that request decides about the lease.
        """
        try:
            self._release(request_id, raw_params)
        except InvalidRequestError:
            self._rejections_ignored += 1
            raise

    def _release(self, request_id: str, raw_params: dict[str, Any]) -> None:
        params = KVTransferParams.naming_lease(raw_params)
        if self._connector is None or self._connector.is_taken(params):
            return
        if params.remote_engine_id == self._description.engine_id:
            self._connector.revoke(params)
        else:
            self._connector.reject(params)
        log.info("request %s was rejected before admission; its lease is released", request_id)

    def refused(self, message: EngineCoreRequest, *, may_release: bool = True) -> None:
        """Release the prefill of a refused hand-off, whatever was wrong with the request.

        may_release: False if the prefill was not for this request. A holder of an edited reference
        may end the lease by name, but not through this refusal.
        """
        self.forgo(message.request_id)
        self._withdraw(message.request_id)
        params = message.sampling_params
        raw = ((params.extra_args if params is not None else None) or {}).get("kv_transfer_params")
        if may_release and isinstance(raw, dict) and raw.get("do_remote_prefill"):
            try:
                if self._connector is not None:
                    self._connector.prove(KVTransferParams.parse(raw))
                self._release(message.request_id, raw)
            except DiptychError as exc:
                log.info("request %s: nothing to release: %s", message.request_id, exc)
