"""PoolClient: an EngineClient whose engine is two pools.

`generate` chooses a pair, prefills there, streams the first token at once, hands the KV to the
decode engine and streams the rest. Because the router holds every token so far, the loss of either
engine is a new attempt with prompt + tokens so far, not a broken stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from diptych_frontend.async_engine import AsyncEngine
from diptych_frontend.input_processor import InputProcessor
from diptych_frontend.output_processor import OutputProcessor
from diptych_protocol import (
    CurveKeys,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    FinishReason,
    KVTransferParams,
    SchedulerStats,
    UtilityError,
    fingerprint,
)
from diptych_router.discovery import Target, resolve
from diptych_router.engine_link import EngineLink, Role
from diptych_router.policy import EngineView, decide
from diptych_router.routed_request import RoutedRequest, Stage

log = logging.getLogger(__name__)

DISCOVERY_INTERVAL_S = 2.0
NOTIFY_TIMEOUT_S = 5.0
MAX_OPEN_REQUESTS = 4096


class PoolClient(AsyncEngine):
    """Create it inside a running loop; `start()` begins discovery, `shutdown()` ends it all."""

    def __init__(
        self,
        model_name: str,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        *,
        targets: dict[Role, list[Target]],
        keys: CurveKeys | None,
    ) -> None:
        super().__init__(model_name, inputs, outputs, max_open_requests=MAX_OPEN_REQUESTS)
        self._targets = targets
        self._keys = keys
        self._links: dict[str, EngineLink] = {}
        self._routed: dict[str, RoutedRequest] = {}
        self._seen: set[Role] = set()
        """Pools that have had an engine since the start."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        self._spawn(self._discover())

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the pools ----------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Follow the pools' addresses, for ever."""
        while True:
            for role, targets in self._targets.items():
                endpoints = await resolve(targets)
                if endpoints is not None:
                    self._follow(role, endpoints)
            await asyncio.sleep(DISCOVERY_INTERVAL_S)

    def _follow(self, role: Role, endpoints: set[str]) -> None:
        """Open lines to new addresses; drop those that are neither listed nor alive."""
        known = {link.endpoint: key for key, link in self._links.items() if link.role == role}
        for endpoint in endpoints - known.keys():
            link = EngineLink(
                role,
                endpoint,
                self._keys,
                on_up=self._engine_up,
                on_outputs=self._handle_outputs,
                on_lost=self._engine_lost,
            )
            self._links[link.key] = link
        for endpoint, key in known.items():
            link = self._links[key]
            link.listed = endpoint in endpoints
            if not link.listed and link.description is None:
                link.close()
                del self._links[key]

    def _engine_up(self, link: EngineLink) -> None:
        self._seen.add(link.role)
        if link.description is not None:
            limit = min(self.max_model_len, link.description.max_model_len)
            self.input_processor.max_model_len = limit

    def _views(self, role: Role) -> list[EngineView]:
        return [
            EngineView(key, fingerprint(link.description.compat), link.open_tokens)
            for key, link in self._links.items()
            if link.role == role and link.listed and link.description is not None
        ]

    async def check_health(self) -> None:
        """Ready once both pools have been seen; from then on while a decode engine is up."""
        await super().check_health()
        missing = {"prefill", "decode"} - self._seen
        if missing:
            raise EngineDeadError(f"no engine yet in the {' and the '.join(sorted(missing))} pool")
        if not self._views("decode"):
            raise EngineDeadError("the decode pool is empty")

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        return {f"{link.role}/{link.name}": link.stats for link in self._links.values()}

    # --- requests -----------------------------------------------------------------------------

    def _submit(self, request: EngineCoreRequest) -> None:
        routed = RoutedRequest(request, self.max_model_len)
        self._routed[request.request_id] = routed
        try:
            self._dispatch(routed)
        except EngineOverloadedError:
            del self._routed[request.request_id]
            raise

    def _dispatch(self, routed: RoutedRequest) -> None:
        """Start an attempt with what is known so far."""
        decision = decide(self._views("prefill"), self._views("decode"))
        if decision is None:
            raise EngineOverloadedError("no decode engine is up; retry later")
        routed.attempts += 1
        routed.decode_engine = decision.decode
        request_id = routed.original.request_id
        prefill = self._links[decision.prefill] if decision.prefill else None
        decode = self._links[decision.decode]
        self._facts[request_id] = {
            "prefill": (prefill or decode).name,
            "decode": decode.name,
            "reason": decision.reason,
            "attempts": routed.attempts,
        }
        log.info("request %s: %s", request_id, self._facts[request_id])
        if prefill is not None and decision.prefill is not None:
            self._send(routed, decision.prefill, Stage.PREFILL, routed.prefill_request())
        else:
            self._send(routed, decision.decode, Stage.DECODE, routed.aggregated_request())

    def _send(
        self, routed: RoutedRequest, key: str, stage: Stage, request: EngineCoreRequest
    ) -> None:
        self._leave_engine(routed)
        link = self._links[key]
        routed.engine, routed.stage = key, stage
        routed.cost = routed.prompt_tokens + len(routed.generated)
        link.open_tokens += routed.cost
        link.client.add(request)

    def _leave_engine(self, routed: RoutedRequest) -> None:
        link = self._links.get(routed.engine)
        if link is not None:
            link.open_tokens = max(0, link.open_tokens - routed.cost)
        routed.engine, routed.cost = "", 0

    def _handle_outputs(self, link: EngineLink, message: EngineCoreOutputs) -> None:
        deliver: list[EngineCoreOutput] = []
        turns: list[Callable[[], None]] = []
        for output in message.outputs:
            routed = self._routed.get(output.request_id)
            if routed is None or routed.engine != link.key:
                self._release(output.request_id, output.kv_transfer_params)
            elif output.finish_reason is FinishReason.ERROR and routed.can_retry:
                turns.append(partial(self._retry, routed, output.error or "failed"))
            else:
                self._absorb(routed, output, turns)
                deliver.append(output)
        self._deliver(deliver)
        for turn in turns:  # after delivery: the first token does not wait for the hand-off
            turn()

    def _absorb(
        self, routed: RoutedRequest, output: EngineCoreOutput, turns: list[Callable[[], None]]
    ) -> None:
        if routed.absorb(output):
            turns.append(partial(self._hand_off, routed))
        elif output.finished:
            self._leave_engine(routed)
            del self._routed[output.request_id]

    def _hand_off(self, routed: RoutedRequest) -> None:
        """Prefill is done: let the decode engine take over, if the user still wants it."""
        request_id = routed.original.request_id
        if request_id not in self._routed:  # a stop string ended it, or the user left
            self._release(request_id, routed.lease)
            return
        decode = self._links.get(routed.decode_engine)
        if decode is None or decode.description is None:
            self._retry(routed, f"decode engine {routed.decode_engine} went away")
            return
        try:
            self._send(routed, routed.decode_engine, Stage.DECODE, routed.decode_request())
        except EngineDeadError as exc:
            self._retry(routed, str(exc))

    def _retry(self, routed: RoutedRequest, why: str) -> None:
        """Give a request whose engine failed another chance, or end it with an error."""
        request_id = routed.original.request_id
        if request_id not in self._routed:
            return
        self._release(request_id, routed.lease)
        routed.lease = None
        self._leave_engine(routed)
        log.warning("request %s, attempt %d: %s", request_id, routed.attempts, why)
        error: Exception = EngineGenerateError(why)
        if routed.can_retry:
            try:
                self._dispatch(routed)
                return
            except (EngineOverloadedError, EngineDeadError) as exc:
                error = EngineGenerateError(f"{why}; then: {exc}")
        del self._routed[request_id]
        self.output_processor.fail(request_id, error)

    def _engine_lost(self, link: EngineLink, cause: EngineDeadError) -> None:
        for routed in [r for r in self._routed.values() if r.engine == link.key]:
            self._retry(routed, str(cause))

    def _withdraw(self, request_ids: list[str]) -> None:
        by_engine: dict[str, list[str]] = {}
        for request_id in request_ids:
            routed = self._routed.pop(request_id, None)
            if routed is not None and routed.engine:
                by_engine.setdefault(routed.engine, []).append(request_id)
                self._leave_engine(routed)
        for key, ids in by_engine.items():
            link = self._links.get(key)
            if link is not None and link.description is not None:
                link.client.abort(ids)

    # --- leases that nobody took over ---------------------------------------------------------

    def _release(self, request_id: str, params: dict[str, Any] | None) -> None:
        """Tell P that its lease is not needed, without waiting for the answer."""
        if params is not None:
            self._spawn(self._reject(request_id, params))

    async def _reject(self, request_id: str, params: dict[str, Any]) -> None:
        """Free a lease at the engine that granted it; its expiry is the safety net."""
        owner = params.get("remote_engine_id")
        for link in list(self._links.values()):
            if link.description is not None and link.description.engine_id == owner:
                try:
                    await link.client.call(
                        "reject_kv_transfer", request_id, params, timeout_s=NOTIFY_TIMEOUT_S
                    )
                except (EngineDeadError, UtilityError, TimeoutError) as exc:
                    log.warning("request %s: lease not released: %s", request_id, exc)

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        KVTransferParams.parse(kv_transfer_params)
        await self._reject(request_id, kv_transfer_params)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        links = [link for link in self._links.values() if link.description is not None]
        answers = [
            await link.client.call("reset_prefix_cache", reset_running_requests, reset_connector)
            for link in links
        ]
        return all(answers)

    async def refresh_stats(self) -> dict[str, SchedulerStats]:
        """Ask every engine for its statistics now."""
        for link in list(self._links.values()):
            if link.description is not None:
                link.stats = await link.client.fetch_stats()
        return self.stats_by_engine()

    def shutdown(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close()
        self.output_processor.fail_all(EngineDeadError("the router was shut down"))
