"""PoolClient: an EngineClient whose engine is two pools.

`generate` chooses a pair, prefills there, streams the first token at once, hands the KV to the
decode engine and streams the rest. Because the router holds every token so far, the loss of either
engine is a new attempt with prompt + tokens so far, not a broken stream; an engine that leaves in
good order hands its streams on; and a request that finds no engine waits for one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diptych_frontend.async_engine import AsyncEngine
from diptych_frontend.core_client import NotConnectedError
from diptych_frontend.input_processor import InputProcessor
from diptych_frontend.output_processor import OutputProcessor
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    FinishReason,
    KVTransferParams,
    RouterConfig,
    SchedulerStats,
    UtilityError,
    WithoutControl,
)
from diptych_router.discovery import Target
from diptych_router.engine_link import EngineLink, ReadKeys
from diptych_router.held_requests import HeldRequests
from diptych_router.policy import Role
from diptych_router.pools import Pools
from diptych_router.routed_request import RoutedRequest, Setback, Stage, is_given_up

log = logging.getLogger(__name__)

MAX_OPEN_REQUESTS = 4096
HAND_OFF_TIMEOUT_S = 10.0


class PoolClient(AsyncEngine, WithoutControl):
    """Create it inside a running loop; `start()` begins discovery, `shutdown()` ends it all."""

    def __init__(
        self,
        config: RouterConfig,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        *,
        targets: dict[Role, list[Target]],
        read_keys: ReadKeys | None,
        serving: Path | None = None,
    ) -> None:
        super().__init__(config, inputs, outputs, max_open_requests=MAX_OPEN_REQUESTS)
        self.leaving = False
        """The router is about to end: it serves on, but wants no more to come."""
        self.pools = Pools(
            config,
            targets,
            read_keys,
            serving,
            on_change=self._pools_changed,
            on_outputs=self._handle_outputs,
            on_lost=self._engine_lost,
        )
        self._model_limit = inputs.max_model_len
        self._routed: dict[str, RoutedRequest] = {}
        """By the request's own id."""
        self._placed: dict[str, RoutedRequest] = {}
        """By the id under which an engine has it now."""
        self._held = HeldRequests(config, give_up=self._fail)
        self._charges: dict[str, list[tuple[EngineLink, int]]] = {}
        """What each request adds to the open tokens of engines."""

    def start(self) -> None:
        self.pools.start()

    # --- what others ask ----------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        return len(self._held)

    def why_not_ready(self) -> str:
        """In words; empty if it is ready."""
        return "the router is shutting down" if self.leaving else self.pools.why_not_ready()

    async def check_health(self) -> None:
        """Ready once a pair was usable; from then on while a decode engine is, or may be again.

        While engines are away, as between the revisions of a Recreate, requests are to come here
        and to be held, not to be refused by an address without a router. An engine that is silent
        is not the router's illness: it has probes of its own.
        """
        self._check_usable()
        reason = self.why_not_ready()
        if reason and (self.leaving or not self.pools.may_hold()):
            raise EngineDeadError(reason)

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        return self.pools.stats_by_engine()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.pools.supported_tasks()

    async def refresh_stats(self) -> dict[str, SchedulerStats]:
        """Ask every engine for its statistics now, and wait a second at most."""
        await self.pools.refresh_stats()
        return self.stats_by_engine()

    # --- requests begin -----------------------------------------------------------------------

    def _submit(self, request: EngineCoreRequest) -> None:
        routed = RoutedRequest(request, self.max_model_len)
        self._routed[request.request_id] = routed
        try:
            self._dispatch(routed)
        except EngineOverloadedError:
            del self._routed[request.request_id]
            raise

    def _dispatch(self, routed: RoutedRequest) -> None:
        """Start an attempt with what is known so far, or wait until that is possible.

        Raises `EngineOverloadedError` if it may not wait.
        """
        pooling = routed.prefill_only
        while (decision := self.pools.choose(routed.full, prefill_only=pooling)) is not None:
            prefill = self.pools.links[decision.prefill] if decision.prefill else None
            decode = self.pools.links[decision.decode]
            routed.attempts += 1
            routed.decode_engine = decision.decode
            facts = {
                "prefill": (prefill or decode).name,
                "decode": decode.name,
                "reason": decision.reason,
                "attempts": routed.attempts,
            }
            self._facts[routed.request_id] = facts
            log.info("request %s: %s", routed.request_id, facts)
            try:
                if prefill is not None and prefill is not decode:
                    self._place(routed, prefill, Stage.PREFILL, plans=decode)
                    prefill.client.add(routed.prefill_request())
                else:
                    self._place(routed, decode, Stage.DECODE)
                    decode.client.add(routed.aggregated_request())
                return
            except NotConnectedError as exc:
                self._disconnected(routed, prefill or decode, exc)
        self._held.add(routed)

    def _place(
        self,
        routed: RoutedRequest,
        link: EngineLink,
        stage: Stage,
        plans: EngineLink | None = None,
    ) -> None:
        """Put a request to an engine's account, and to that of the one to take over later."""
        self._leave_engine(routed)
        routed.place(link.key, stage)
        self._placed[routed.core_id] = routed
        cost = routed.prompt_tokens + len(routed.generated)
        charges = [(engine, cost) for engine in (link, plans) if engine is not None]
        self._charges[routed.request_id] = charges
        for engine, tokens in charges:
            engine.open_tokens += tokens

    def _leave_engine(self, routed: RoutedRequest) -> None:
        for engine, tokens in self._charges.pop(routed.request_id, ()):
            engine.open_tokens -= tokens
        self._placed.pop(routed.core_id, None)
        routed.engine = ""

    def _disconnected(
        self, routed: RoutedRequest, link: EngineLink, cause: NotConnectedError
    ) -> None:
        """Sending found out first that an engine is gone."""
        self._leave_engine(routed)
        link.client.lost(cause)

    # --- requests go on -----------------------------------------------------------------------

    def _handle_outputs(self, link: EngineLink, message: EngineCoreOutputs) -> None:
        deliver: list[EngineCoreOutput] = []
        turns: list[Callable[[], None]] = []
        strays: list[str] = []
        for output in message.outputs:
            routed = self._placed.get(output.request_id)
            if routed is None:
                self._release(output.request_id, output.kv_transfer_params)
                if not output.finished:
                    strays.append(output.request_id)
            elif output.finish_reason is FinishReason.ERROR:
                why = output.error or "the engine gave no reason"
                turns.append(partial(self._retry, routed, routed.setback_of(why), why))
            elif is_given_up(output):
                setback = Setback.MOVE if link.withdrawn else Setback.LOSS
                why = f"engine {link.name} gave it up"
                turns.append(partial(self._retry, routed, setback, why))
            else:
                self._absorb(routed, output, turns)
                if output.new_token_ids or output.finished:
                    deliver.append(output)
        self._deliver(deliver)
        link.abort(strays)
        for turn in turns:  # after delivery: the first token does not wait for the hand-off
            turn()

    def _absorb(
        self, routed: RoutedRequest, output: EngineCoreOutput, turns: list[Callable[[], None]]
    ) -> None:
        if routed.absorb(output):
            turns.append(partial(self._hand_over, routed))
        elif output.finished:
            self._leave_engine(routed)
            del self._routed[routed.request_id]

    def _hand_over(self, routed: RoutedRequest) -> None:
        """An engine is done with its part and lends its KV: let the next one take over, if the
        user still wants it."""
        if routed.request_id not in self._routed:  # a stop string ended it, or the user left
            self._release(routed.core_id, routed.lease)
            return
        link = self._taker(routed)
        if link is None:
            self._retry(routed, Setback.MOVE, "no decode engine can take it over")
            return
        try:
            self._place(routed, link, Stage.DECODE)
            routed.decode_engine = link.key
            link.client.add(routed.decode_request())
        except NotConnectedError as exc:
            self._disconnected(routed, link, exc)
            self._retry(routed, Setback.LOSS, str(exc))

    def _taker(self, routed: RoutedRequest) -> EngineLink | None:
        """The planned engine if it still may, else one that fits, else the planned one after all
        (while it drains it still takes what was meant for it)."""
        fingerprint = (routed.lease or {}).get("compat")
        planned = self.pools.links.get(routed.decode_engine)
        if planned is not None and (
            planned.key == routed.engine  # it is the one that hands off
            or not planned.up
            or fingerprint not in (None, planned.fingerprint)  # restarted as something else
        ):
            planned = None
        if planned is not None and self.pools.usable(planned):
            return planned
        return self.pools.heir(str(fingerprint)) or planned

    def _retry(self, routed: RoutedRequest, setback: Setback, why: str) -> None:
        """Give a request another chance elsewhere, or end it with an error."""
        if routed.request_id not in self._routed:
            return
        log.warning("request %s, attempt %d: %s", routed.request_id, routed.attempts, why)
        again = routed.set_back(setback)
        self._release(routed.core_id, routed.lease)
        routed.lease = None
        self._leave_engine(routed)
        if not again:
            kind = EngineOverloadedError if setback is Setback.FULL else EngineGenerateError
            self._fail(routed, kind(why))
            return
        try:
            self._dispatch(routed)
        except EngineOverloadedError as exc:
            self._fail(routed, EngineOverloadedError(f"{why}; then: {exc}"))

    def _fail(self, routed: RoutedRequest, error: Exception) -> None:
        del self._routed[routed.request_id]
        self.output_processor.fail(routed.request_id, error)

    def _engine_lost(self, link: EngineLink, cause: EngineDeadError) -> None:
        setback = Setback.MOVE if link.withdrawn else Setback.LOSS
        for routed in [r for r in self._placed.values() if r.engine == link.key]:
            self._retry(routed, setback, str(cause))

    def _withdraw(self, request_ids: list[str]) -> None:
        by_engine: dict[str, list[str]] = {}
        for request_id in request_ids:
            routed = self._routed.pop(request_id, None)
            if routed is None:
                continue
            self._held.release(request_id)
            if routed.engine:
                by_engine.setdefault(routed.engine, []).append(routed.core_id)
                self._leave_engine(routed)
        for key, ids in by_engine.items():
            link = self.pools.links.get(key)
            if link is not None:
                link.abort(ids)

    # --- the pools change ---------------------------------------------------------------------

    def _pools_changed(self) -> None:
        """Engines came, went or began to leave: let those who wait go on, and move streams."""
        self._follow_engines()
        stuck: set[bool] = set()
        """Kinds of requests (`prefill_only`) that no engine can take."""
        for request_id in self._held:
            routed = self._routed.get(request_id)
            if routed is None or routed.prefill_only in stuck:
                continue
            if self.pools.choose(prefill_only=routed.prefill_only) is None:
                stuck.add(routed.prefill_only)
                continue
            if self._held.release(request_id):
                self._dispatch(routed)
        self._move_streams()

    def _follow_engines(self) -> None:
        """Every usable engine can take every request. While there is none, nothing new is known."""
        usable = self.pools.usable_engines()
        if usable:
            limits = [engine.max_model_len for engine in usable]
            ordered = all(engine.scheduling_policy == "priority" for engine in usable)
            self.input_processor.max_model_len = min(self._model_limit, *limits)
            self.input_processor.scheduling_policy = "priority" if ordered else "fcfs"

    def _move_streams(self) -> None:
        """Ask engines that leave to hand off what they decode, if somebody can take it over."""
        for link in self.pools.draining("decode"):
            if self.pools.heir(link.fingerprint) is None:
                continue  # they may end here; a loss before that is a new attempt
            for routed in list(self._placed.values()):
                if routed.engine == link.key and not routed.moving:
                    routed.moving = True
                    self.pools.spawn(self._move(routed, routed.core_id, link))

    async def _move(self, routed: RoutedRequest, core_id: str, link: EngineLink) -> None:
        """Take a stream off an engine: its last output there then brings a lease."""
        try:
            if await link.client.call("hand_off", core_id, timeout_s=HAND_OFF_TIMEOUT_S):
                return
            why = "it has computed too little to hand off"
        except EngineDeadError:
            return  # who lost the engine has seen to it
        except (UtilityError, TimeoutError) as exc:
            why = str(exc) or "it does not answer"
        if core_id in self._placed:
            link.abort([core_id])
            self._retry(routed, Setback.MOVE, f"engine {link.name} leaves: {why}")

    # --- leases that nobody took over, and what all engines do --------------------------------

    def _release(self, request_id: str, params: dict[str, Any] | None) -> None:
        if params is not None:
            self.pools.release(request_id, params)

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        KVTransferParams.parse(kv_transfer_params)
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
        self._held.close()
        self.pools.close()
        self.output_processor.fail_all(EngineDeadError("the router was shut down"))
