"""A core's part in hand-offs: what it asks of the hinge, and what it makes of the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from diptych_engine.request import Request
from diptych_engine.scheduler import Scheduler
from diptych_kv_transfer import KVConnector, LeaseEnded
from diptych_protocol import (
    DiptychError,
    EngineCoreRequest,
    EngineDescription,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
)

log = logging.getLogger(__name__)

Admit = Callable[[EngineCoreRequest], Request]
"""Validates an announced request. Raises `InvalidRequestError`."""


class HandOffs:
    """Between the scheduler, which decides, and the connector, which acts.

    An engine without a connector lends and fetches nothing, and nothing is asked of it.
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
        self._connector = connector
        self._admit_announced = admit_announced

    # --- requests come and go -----------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A request was admitted: keep alive what it is to fetch."""
        params = request.kv_transfer
        if self._connector is not None and params is not None and params.do_remote_prefill:
            self._connector.hold(request.request_id, params)

    def gone(self, request: Request) -> None:
        """A request is about to end before its time."""
        if self._connector is not None:
            self._connector.cancel_load(request.request_id)

    def announce_kv_transfer(self, request: EngineCoreRequest) -> bool:
        """A request will come, under this id, when a prefill engine has computed its prompt.

        It is what the later ADD will be, but for the tokens that prefill samples; its
        `kv_transfer_params` have `do_remote_prefill`, `remote_engine_id`, `remote_host`,
        `remote_port`, `epoch`, `compat`, the `lease_id` that the prefill request was given, and as
        `remote_num_tokens` the length of its prompt (`generated_token_ids` included).

        Returns whether blocks are reserved and filled while prefill computes; False: it is only
        connected. Either way nothing is promised, nothing is answered later, and the ADD must say
        everything again. Without an ADD it ends by ABORT of the id, or by itself after
        `load_timeout_s`; the lease stays as it is. Repeating it is harmless. Raises
        `InvalidRequestError` for what the ADD would be refused for.
        """
        if self._connector is None:
            raise InvalidRequestError("this engine takes no part in hand-offs")
        announced = self._admit_announced(request)
        params = announced.kv_transfer
        if params is None or not params.do_remote_prefill:
            raise InvalidRequestError("only a hand-off to this engine can be announced")
        self._connector.reach(params)
        return False

    # --- a step -------------------------------------------------------------------------------

    def start_loads(self) -> None:
        """Begin what the scheduler has reserved blocks for."""
        orders, self._scheduler.load_orders = self._scheduler.load_orders, []
        if self._connector is None:
            return
        for order in orders:
            self._connector.start_load(
                order.request_id,
                order.params,
                order.indices,
                order.local_block_ids,
                order.token_ids,
                order.cache_salt,
            )

    def grant(self, request: Request) -> dict[str, Any] | None:
        """Lend the computed blocks of a request that is about to finish.

        Returns what a decode engine must be told to fetch them.
        """
        if self._connector is None:
            return None
        computed = request.num_computed_tokens
        params = self._connector.grant(
            request.request_id,
            self._scheduler.lease_blocks(request),
            request.token_ids[:computed],
            request.token_ids[computed:],
            request.cache_salt,
        )
        return params.to_dict()

    # --- the hinge reports --------------------------------------------------------------------

    def handle_events(self) -> list[tuple[Request, str]]:
        """Apply what the hinge reports. Returns requests that have failed by it, and why."""
        failures = []
        for event in self._connector.poll_events() if self._connector is not None else ():
            if isinstance(event, LeaseEnded):
                self._scheduler.lease_ended(event.block_ids)
                continue
            failed = self._scheduler.load_ended(event.request_id, ok=event.ok)
            if failed is not None:
                error = f"the KV hand-off failed: {event.reason}"
                log.warning("request %s: %s", event.request_id, error)
                failed.kv_transfer = None  # the lease has ended with the load
                self._scheduler.finish(failed, FinishReason.ERROR)
                failures.append((failed, error))
        return failures

    # --- rejection ----------------------------------------------------------------------------

    def reject_kv_transfer(self, request_id: str, raw_params: dict[str, Any]) -> None:
        """Somebody refused or lost a request before admission: free what P holds for it.

        Works on either side: P ends its own lease, D tells P. Repeating it is harmless.
        """
        if self._connector is None:
            return
        params = KVTransferParams.parse(raw_params)
        if params.remote_engine_id == self._description.engine_id:
            self._connector.revoke(params)
        elif params.do_remote_prefill:
            self._connector.reject(params)
        log.info("request %s was rejected before admission; its lease is released", request_id)

    def refused(self, message: EngineCoreRequest) -> None:
        """A refused hand-off must not leave its prefill pinned, whatever was wrong with it."""
        params = message.sampling_params
        raw = ((params.extra_args if params is not None else None) or {}).get("kv_transfer_params")
        if isinstance(raw, dict) and raw.get("do_remote_prefill"):
            try:
                self.reject_kv_transfer(message.request_id, raw)
            except DiptychError as exc:
                log.info("request %s: nothing to release: %s", message.request_id, exc)
