"""PoolClient: an EngineClient whose engine is two pools.

`generate` chooses a pair, prefills there, streams the first token at once, hands the KV to the
decode engine and streams the rest. Because the router holds every token so far, the loss of either
engine is a new attempt with prompt + tokens so far, not a broken stream; a draining engine hands
its streams on; and a request that finds no engine waits for one. `RequestTable` makes and records
the decisions, and this class carries them out.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from diptych_frontend.core_client.async_engine import AsyncEngine
from diptych_frontend.core_client.client import NotConnectedError
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_protocol import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineOverloadedError,
    KeptAnswer,
    KVTransferParams,
    RouterConfig,
    SchedulerStats,
    UtilityError,
    WithoutControl,
)
from diptych_protocol.abilities import Lack, check_abilities, lacks_of
from diptych_protocol.block_hashes import salt_of_tenant
from diptych_router.engines.discovery import Target
from diptych_router.engines.engine_link import EngineLink, ReadKeys
from diptych_router.engines.engine_table import Role
from diptych_router.engines.known_prefixes import BlockNaming
from diptych_router.requests.pools.pools import Pools
from diptych_router.requests.promises import Promises
from diptych_router.requests.request_record import Tracer
from diptych_router.requests.request_table import RequestTable
from diptych_router.requests.table_interface import (
    Abort,
    Action,
    Add,
    Announce,
    AskHandOff,
    Deliver,
    Fail,
    Release,
    WakeAt,
)

MAX_OPEN_REQUESTS = 4096
MOST_OF_FREE = 8
"""A tenant's open requests are limited to this multiple of the room for further requests. So there
is always some room for others; a single tenant leaves a ninth of all."""
HAND_OFF_TIMEOUT_S = 10.0


class PoolClient(AsyncEngine, WithoutControl):
    """Create it inside a running loop. `start()` begins discovery, `shutdown()` ends everything."""

    def __init__(
        self,
        config: RouterConfig,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        *,
        targets: dict[Role, list[Target]],
        read_keys: ReadKeys | None,
        serving: Path | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`tracer`: makes spans of the requests; its owner closes it."""
        super().__init__(config, inputs, outputs, max_open_requests=MAX_OPEN_REQUESTS)
        self.leaving = False
        """The router is about to end: it serves on, but wants no more to come."""
        connect = partial(
            EngineLink,
            read_keys=read_keys,
            on_outputs=self._handle_outputs,
            on_lost=self._engine_lost,
            on_hang=self._engine_hangs,
            vocabulary=inputs.renderer.tokenizer.vocabulary if inputs.renderer.tokenizer else "",
        )
        self.pools = Pools(config, targets, connect, serving, self._pools_changed)
        self._model_limit = inputs.max_model_len
        self._lacks: tuple[Lack, ...] = ()
        """What the engines cannot do, as those have said that were usable last."""
        self._block_sizes: frozenset[int] = frozenset()
        self._cache_per_key = config.cache_per_key
        self.table = RequestTable(
            self.pools,
            hold_seconds=config.hold_seconds,
            max_held=config.max_held,
            promises=Promises(config.slo),
        )
        self.router_tracer = tracer
        """None: nobody wants spans."""
        self._to_do: deque[Action] = deque()
        self._busy = False
        """Something of `_to_do` is being done."""
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        self.pools.start()

    # --- what others ask ----------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        return len(self.table.held)

    @property
    def is_full(self) -> bool:
        """Whether it would refuse any request because of those that are open."""
        return len(self.output_processor.answers) >= MAX_OPEN_REQUESTS

    def why_not_ready(self) -> str:
        """Return the reason in words; empty if it is ready."""
        return "the router is shutting down" if self.leaving else self.pools.why_not_ready()

    def why_unable(self) -> str:
        """Return why it would not even hold a new request; empty if it would."""
        waits = self.pools.may_hold() and not self.pools.refused_settings
        return "" if waits else self.pools.why_not_ready()

    async def check_health(self) -> None:
        """Ready once a pair was usable; from then on while a decode engine is, or may be again.

        While engines are away, as between the revisions of a Recreate, requests should wait here
        instead of meeting an address without a router. A silent engine does not make the router
        unhealthy: it has probes of its own.
        """
        self._check_usable()
        reason = self.why_not_ready() if self.leaving else self.why_unable()
        if reason:
            raise EngineDeadError(reason)

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images, and so do all engines that were usable last."""
        return self.renderer.stat_mm_cache() is not None and not any(
            lack.field == "image_url" for lack in self._lacks
        )

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        links = self.pools.links.values()
        return {f"{link.role}/{link.name}": link.stats for link in links}

    async def is_tracing_enabled(self) -> bool:
        return self.router_tracer is not None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.pools.supported_tasks()

    async def refresh_stats(self) -> dict[str, SchedulerStats]:
        """Ask every engine for its present statistics, and wait a second at most."""
        await self.pools.refresh_stats()
        return self.stats_by_engine()

    @property
    def keeps_answers(self) -> bool:
        return True

    async def find_kept(self, name: str, tenant: str) -> list[KeptAnswer]:
        return await self.pools.find_kept(name, tenant)

    # --- requests -----------------------------------------------------------------------------

    def _check_tenant(self, tenant: str, num_requests: int) -> None:
        if self.pools.refused_settings:
            # It stays up, so that the operator can ask why, but serves nobody by another setting.
            raise EngineOverloadedError(self.why_not_ready())
        if not tenant:
            return
        mine = self.table.tenants.num_open(tenant) + num_requests
        free = MAX_OPEN_REQUESTS - len(self.output_processor.answers) - num_requests
        if mine > MOST_OF_FREE * free:
            raise EngineOverloadedError(
                f"{mine - num_requests} requests of this API key are open already; retry later"
            )

    def _prepare(self, process: Callable[[], EngineCoreRequest]) -> EngineCoreRequest:
        """As `AsyncEngine._prepare`. The names of a long prompt's blocks are then remembered."""
        request = process()
        own, tokens = self._salted(request), request.prompt_token_ids
        if tokens and not (own.lora_request or own.mm_features):
            for size in self._block_sizes:
                self.table.namer.keys(own, tokens[:-1], BlockNaming(size))
        return request

    def _salted(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request for engines: salted by its tenant, if nobody else may find its blocks."""
        if not (self._cache_per_key and request.tenant):
            return request
        salt = salt_of_tenant(request.tenant, request.cache_salt)
        return msgspec.structs.replace(request, cache_salt=salt)

    def _submit(self, request: EngineCoreRequest, leader: str | None = None) -> None:
        if self._lacks:
            check_abilities(self._lacks, request)
        request = self._salted(request)
        now, tracer = time.monotonic(), self.router_tracer
        trace = None if tracer is None else tracer.begin(request, now)
        most = self.input_processor.max_model_len
        actions = self.table.submit(request, most, now, leader, trace, self.pools.trial)
        self._told[request.request_id] = self.table.records.by_id[request.request_id]
        self._carry_out(actions)

    def _withdraw(self, request_ids: list[str], outcome: str = "abort") -> None:
        self._carry_out(self.table.withdraw(request_ids, time.monotonic(), outcome))

    def _handle_outputs(self, link: EngineLink, message: EngineCoreOutputs) -> None:
        if message.prefix_changes is not None:
            self.pools.take_prefixes(link, message.prefix_changes)
        now = time.monotonic()
        if message.journey_events is not None:
            self.table.records.told(link.key, message.journey_events, now)
        self._carry_out(self.table.receive(link.key, message.outputs, now))
        if self.table.has_turns:
            self._carry_out(self.table.take_turns(now))

    def _engine_lost(self, link: EngineLink, cause: EngineDeadError) -> None:
        self._carry_out(self.table.engine_lost(link.key, str(cause), time.monotonic()))

    def _engine_hangs(self, link: EngineLink) -> None:
        self._carry_out(self.table.engine_hangs(link.key, time.monotonic()))

    def _pools_changed(self) -> None:
        self._follow_engines()
        now = time.monotonic()
        self._carry_out(self.table.fleet_changed(now))
        self._carry_out(self.table.give_up_late(now))

    def _follow_engines(self) -> None:
        """Every usable engine can take every request. While there is none, nothing new is known."""
        usable = self.pools.usable_engines()
        if usable:
            limits = [engine.max_model_len for engine in usable]
            ordered = all(engine.scheduling_policy == "priority" for engine in usable)
            self.input_processor.max_model_len = min(self._model_limit, *limits)
            self.input_processor.scheduling_policy = "priority" if ordered else "fcfs"
            self._lacks = lacks_of(usable)
            self._block_sizes = frozenset(engine.block_size for engine in usable)

    # --- what the table wants done ------------------------------------------------------------

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """In the order of the decisions, also where carrying out one leads to the next."""
        self._to_do.extend(actions)
        if self._busy:
            return
        self._busy = True
        try:
            while self._to_do:
                match self._to_do.popleft():
                    case Deliver(outputs):
                        if ended_here := self.output_processor.process(outputs):
                            self._withdraw(ended_here, "stop")
                    case Add() as add:
                        self._add(add)
                    case Abort(engine, core_ids):
                        if (link := self.pools.get(engine)) is not None:
                            link.abort(core_ids)
                    case Announce(engine, request):
                        if (link := self.pools.get(engine)) is not None:
                            link.tell("announce_kv_transfer", request)
                    case Release(core_id, params):
                        self.pools.release(core_id, params)
                    case AskHandOff() as ask:
                        self.pools.spawn(self._ask_hand_off(ask))
                    case Fail(request_id, error):
                        self.output_processor.fail(request_id, error)
                    case WakeAt(when):
                        self._loop.call_at(when, self._wake, when)
        finally:
            self._busy = False
        if self.router_tracer is not None:
            self._send_spans(self.router_tracer)

    def _send_spans(self, tracer: Tracer) -> None:
        for record in self.table.records.take_traced():
            tracer.send(record)

    def name_of(self, engine: str) -> str:
        """Return an engine's name by its key: its last one if nobody answers there now, the key
        itself if its address is gone."""
        link = self.pools.get(engine)
        return engine if link is None else link.known_as or link.endpoint

    def _add(self, action: Add) -> None:
        core_id = action.request.request_id
        link = self.pools.get(action.engine)
        if link is None or core_id not in self.table.placed:
            return  # sending something else found out that this engine is gone
        try:
            link.add(action.request)
        except NotConnectedError as exc:
            link.client.lost(exc)  # all that is there is lost, this request too
            self._carry_out(self.table.not_sent(core_id, str(exc), time.monotonic()))

    def _wake(self, when: float) -> None:
        if not self._closed:
            # The loop's clock is coarser than the one that records are written by.
            self._carry_out(self.table.tick(max(when, time.monotonic()), self.pools.why_not_ready))

    async def _ask_hand_off(self, action: AskHandOff) -> None:
        link = self.pools.get(action.engine)
        if link is None:
            return
        try:
            moved = await link.client.call("hand_off", action.core_id, timeout_s=HAND_OFF_TIMEOUT_S)
            why = "" if moved else "it has computed too little to hand off"
        except EngineDeadError:
            return  # who lost the engine has seen to it
        except (UtilityError, TimeoutError) as exc:
            why = str(exc) or "it does not answer"
        if why:
            now = time.monotonic()
            self._carry_out(self.table.cannot_hand_off(action.core_id, why, now))

    # --- what all engines do ------------------------------------------------------------------

    async def reject_kv_transfer(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        KVTransferParams.naming_lease(kv_transfer_params)
        await self.pools.reject(request_id, kv_transfer_params)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        flags = (reset_running_requests, reset_connector)
        return all(await self.pools.call_each("reset_prefix_cache", *flags))

    def shutdown(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if self.router_tracer is not None:
            self.table.shut_down(time.monotonic())
            self._send_spans(self.router_tracer)
        self.pools.close()
        self.output_processor.fail_all(EngineDeadError("the router was shut down"))
