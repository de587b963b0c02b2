"""EngineCore: the scheduler, the model runner and the hinge of one engine, run one step at a time.

It knows nothing of sockets: requests enter through `add` and `abort`, and answers leave through
`step` and `take_outputs`, by the client they belong to.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import msgspec

from diptych_engine.control.admission import aborted, admit, brought, failed
from diptych_engine.control.image_intake import ImageIntake, MissingImageError
from diptych_engine.control.kept_answers import KeptAnswers
from diptych_engine.control.sleep import Residency
from diptych_engine.control.utilities import Convert, Deferred, call_utility
from diptych_engine.execution.grammar_compiler import GrammarCompiler
from diptych_engine.handoff.hand_off import HandOffs
from diptych_engine.lora.table import AdapterTable
from diptych_engine.scheduling.request import Pending, Request, StepPlan, StepResult, no_result
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_engine.scheduling.sessions import go_on
from diptych_engine.scheduling.step_results import stop_condition
from diptych_engine.weights.update import WeightUpdate
from diptych_frontend.core_client.wire_server import Posture
from diptych_kv_transfer import KVConnector, UnprovenReferenceError
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDescription,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    KeptAnswer,
    RefusedByEngineError,
    SchedulerStats,
)
from diptych_protocol.admin import DrainReport

log = logging.getLogger(__name__)

SHUTTING_DOWN = "Server shutting down"
INTERNAL_ERROR = "internal error; the engine's log has it under the request's id"
TAKEN_OVER = "its client goes on with this answer at another router"
CROWDED_OUT = "overloaded: too many requests wait already, and most are of this API key"
LAST_CALLS = frozenset({"reject_kv_transfer"})
"""Calls that are answered until the very end, because they may free blocks of another engine."""


class Runner(Protocol):
    """Executes steps: the model runner, or several that share the model's tensors."""

    def launch(self, plan: StepPlan) -> Pending:
        """Launch a step after those before it. A GPU computes while the host continues."""

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Whether the step after a launched one needs none of its results on the host."""

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run a method of every worker; return the results in the order of their ranks."""

    def close(self) -> None:
        """End what the runner started."""


class EngineCore:
    """One engine, which its owner's loop runs."""

    def __init__(
        self,
        description: EngineDescription,
        scheduler: Scheduler,
        runner: Runner,
        connector: KVConnector | None,
        grammars: GrammarCompiler,
        images: ImageIntake,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """`runs_ahead`: launch steps before the results of those before them are known."""
        self.description = description
        self.scheduler = scheduler
        self.runner = runner
        self.connector = connector
        self.grammars = grammars
        self.images = images
        self.adapters = AdapterTable(
            scheduler.max_loras, runner.collective_rpc, lambda: scheduler.now_running
        )
        scheduler.pinned_adapters = self.adapters.pinned
        self.hand_offs = HandOffs(description, scheduler, connector, self._admit_announced)
        self.watched: dict[int, Callable[[], None]] = {}
        """Descriptors that wake the core, and what to do then; whoever builds the core adds to
        it. What raises ends the core."""
        self.rest_conditions: list[Callable[[], bool]] = [
            lambda: self.scheduler.quiet,
            lambda: self._ahead is None,
        ]
        """A pause is complete when all of them hold; whoever drives the core adds to them."""
        self.before_step: Callable[[StepPlan], None] | None = None
        """Hears of every step before it is computed; whoever drives the core sets it."""
        self.mark_launched: Callable[[], Callable[[], None]] | None = None
        """Marks what the device was told so far; its result is called when the step that was
        launched last has had its turn. Whoever builds the core may set it."""
        self.draining = False
        """This engine is about to leave; every client is to know."""
        self.leaving = False
        """It takes neither requests nor calls any more."""
        self.failed = False
        """It ends because of an error, and another will take its place."""
        self.dummy_steps = 0
        """See `SchedulerStats`; this and the next are counted by whoever drives the core."""
        self.malformed_messages = 0
        self._step_began = 0.0
        self._step_ended = 0.0
        """When the last step ended; 0: nothing was to be computed then."""
        self._seconds_stepping = 0.0
        self.residency = Residency()
        self.weights = WeightUpdate()
        if connector is not None:
            connector.weights = lambda: self.weights.name
        self.kept = KeptAnswers()
        self.deferred = Deferred()
        """What waits for steps or for the hinge; `settle` it after each step."""
        self.utilities: dict[str, Callable[..., Any]] = {}
        """The functions that a client may name in a utility call."""
        self.offer(
            self.describe,
            self.stats,
            self.hand_offs.announce_kv_transfer,
            self.hand_offs.reject_kv_transfer,
            self.drain,
            self.drain_report,
            self.hand_off,
            self.take_kept,
        )
        self._outputs: defaultdict[bytes, list[EngineCoreOutput]] = defaultdict(list)
        self._runs_ahead = runs_ahead
        self._ahead: tuple[StepPlan, Pending] | None = None
        """The step that was launched before its turn."""
        self._launched: Pending = no_result
        """The last step that was; a device computes them in order."""

    # --- requests -----------------------------------------------------------------------------

    def add(self, message: EngineCoreRequest, client: bytes) -> None:
        """Queue a request. One that cannot be served is answered with an error output."""
        try:
            self._take(message, client)
        except MissingImageError as exc:  # its client sends it again, with the image
            self._fail(message.request_id, client, exc)
        except DiptychError as exc:
            log.info("request %s refused: %s", message.request_id, exc)
            unproven = isinstance(exc, UnprovenReferenceError)
            self._refuse(message, client, exc, may_release=not unproven)
        except Exception:  # a defect of ours costs this request its answer, and nobody else's
            log.exception("request %s cannot be added", message.request_id)
            self._refuse(message, client, DiptychError(INTERNAL_ERROR))

    def unreadable(self, request_id: str, client: bytes, error: str) -> None:
        """Answer a message of which only the id can be read. If the id is a session's, the session
        ends, because its next piece is lost. Another running request of this id continues."""
        known = self.scheduler.find(request_id)
        if known is not None and (known.client != client or not known.resumable):
            log.warning("request %s is already here; the second is dropped: %s", request_id, error)
            return
        log.info("request %s refused: %s", request_id, error)
        if known is not None:
            self._end(known, FinishReason.ERROR)
        self.hand_offs.forgo(request_id)
        self._fail(request_id, client, error)

    def _take(self, message: EngineCoreRequest, client: bytes) -> None:
        known = self.scheduler.find(message.request_id)
        if known is not None:
            last = go_on(self.scheduler, known, message, client, self.description)
            if last is not None:
                self._outputs[client].append(last)
            return
        if self.leaving:
            self.hand_offs.refused(message)
            self._outputs[client].append(aborted(message.request_id))
            return
        self.weights.require_whole()
        if not self.scheduler.can_add(message.tenant):
            raise EngineOverloadedError("overloaded: too many requests wait already")
        if self.scheduler.is_loading(message.request_id):
            raise DiptychError("the KV of an earlier request of this id is still on its way")
        request, first_tokens = self._admit(message, client)
        if request.images:
            self.images.require_room(request, self.scheduler.unfinished)
        self.hand_offs.check(request)
        ended = stop_condition(request, first_tokens[-1]) if first_tokens else None
        if ended is not None:  # prefill has sampled all that was wanted
            last = EngineCoreOutput(request.request_id, first_tokens)
            last.finish_reason, last.stop_reason = ended
            last.trace_headers = request.trace_headers
            self._outputs[client].append(last)
            self.hand_offs.refused(message)
            return
        queued = self.grammars.begin(request)
        request.first_tokens = first_tokens
        self.hand_offs.arrived(request)
        (self.scheduler.add if queued else self.scheduler.hold)(request)
        surplus = self.scheduler.surplus()
        if surplus is not None:
            self._end(surplus, FinishReason.ERROR)
            self._fail(surplus.request_id, surplus.client, EngineOverloadedError(CROWDED_OUT))

    def _refuse(
        self,
        message: EngineCoreRequest,
        client: bytes,
        error: DiptychError,
        *,
        may_release: bool = True,
    ) -> None:
        """Nothing of the request stays here or, if it may release that, where its prefill waits."""
        begun = self.scheduler.find(message.request_id)
        if begun is not None:
            self._end(begun, FinishReason.ERROR)
        self.hand_offs.refused(message, may_release=may_release)
        self._fail(message.request_id, client, error)

    def _admit(
        self, message: EngineCoreRequest, client: bytes, *, announced: bool = False
    ) -> tuple[Request, list[int]]:
        limits, hinged = self.description, self.connector is not None
        tables = self.adapters, self.images
        return admit(message, client, limits, *tables, hinged=hinged, announced=announced)

    def _admit_announced(self, message: EngineCoreRequest) -> Request:
        self.weights.require_whole()
        return self._admit(message, b"", announced=True)[0]

    def take_grammars(self) -> None:
        """Queue requests that waited for grammars; call when `grammars.wake_fd` is readable."""
        for request, failure in self.grammars.finished():
            if request.finished:
                continue
            if failure is not None:
                self._end(request, FinishReason.ERROR)
                self._fail(request.request_id, request.client, failure)
            else:
                self.scheduler.queue_held(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored. Each gets a last output with ABORT."""
        for request_id in request_ids:
            request = self.scheduler.find(request_id)
            if request is None:
                self.hand_offs.forgo(request_id)
            else:
                self._end(request, FinishReason.ABORT)
                self._outputs[request.client].append(aborted(request_id))

    def abort_all(self) -> None:
        """End every request, as `abort` does."""
        self.abort([request.request_id for request in self.scheduler.unfinished])

    def client_lost(self, client: bytes) -> None:
        """End a lost client's requests and its leases."""
        lost = [r for r in self.scheduler.unfinished if r.client == client]
        if lost:
            log.warning("a client went away; aborting its %d requests", len(lost))
        for request in lost:
            self._end(request, FinishReason.ABORT)
        self.kept.client_lost(client)
        self._outputs.pop(client, None)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.hand_offs.gone(request)
        self.scheduler.finish(request, reason)
        if request.kept_as:
            self.kept.keep(request)

    def _fail(self, request_id: str, client: bytes, error: DiptychError | str) -> None:
        self._outputs[client].append(failed(request_id, error))

    # --- a step -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.grammars.has_finished or self._ahead is not None

    @property
    def posture(self) -> Posture:
        """The state that all clients get to know unasked."""
        return self.draining, self.scheduler.paused, self.residency.level

    def start_step(self) -> tuple[StepPlan, Pending]:
        """Run a step, and the one after it, if that is known already."""
        self._step_began = perf_counter()
        if self._ahead is not None and self.before_step is not None:
            self.before_step(self._ahead[0])
        plan, pending = self._ahead or self._launch_next()
        self._ahead = None
        self._launched = pending
        if self._runs_ahead and self.runner.can_run_ahead(plan):
            ahead = self.scheduler.plan_ahead(plan)
            if ahead is not None:
                self._launched = self._launch(ahead)
                self._ahead = ahead, self._launched
        return plan, pending

    def _launch_next(self) -> tuple[StepPlan, Pending]:
        """Plan a step from what is known. None is under way: blocks that are free are free on the
        device too."""
        if self.grammars.has_finished:
            self.take_grammars()
        plan = self.scheduler.schedule()
        for request in plan.brought:
            self._outputs[request.client].append(brought(request))
        self.hand_offs.start_loads()
        if not plan.scheduled and self.scheduler.has_waiting:
            self.hand_offs.withdraw_lent()
        if self.before_step is not None and (plan.scheduled or plan.images):
            self.before_step(plan)
        if self.adapters.in_use:
            for request, error in self.adapters.use(plan.scheduled):
                self._end(request, FinishReason.ERROR)
                self._fail(request.request_id, request.client, error)
            plan = plan.without_finished()
        if not (plan.scheduled or plan.removed or plan.images):
            return plan, no_result
        return plan, self._launch(plan)

    def _launch(self, plan: StepPlan) -> Pending:
        """A copy of KV that the step has written waits for this step, and for none after it."""
        pending = self.runner.launch(plan)
        if self.mark_launched is None:
            return pending
        complete = self.mark_launched()

        def result() -> StepResult:
            found = pending()
            complete()
            return found

        return result

    def finish_step(self, plan: StepPlan, pending: Pending) -> None:
        """Wait for a step's results and return them as outputs, without those of requests aborted
        since it started."""
        outputs = self._outputs
        results = pending()
        now = perf_counter()
        self._seconds_stepping += now - self._step_began
        seconds = now - (self._step_ended or self._step_began)
        for made in self.scheduler.update(plan, results, seconds):
            request = made.request
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason, made.output)
            outputs[request.client].append(made.output)
        if self.scheduler.stakes is not None:
            self._step_ended = now if plan.scheduled and self.scheduler.has_work else 0.0
        self.hand_offs.lend_computed()
        if self.hand_offs.kept is not None:
            self.hand_offs.kept.seal(self.scheduler.now_running)
        if self.hand_offs.store is not None:
            self.hand_offs.store.save()

    def _finish(self, request: Request, reason: FinishReason, output: EngineCoreOutput) -> None:
        """End a request, or a piece of a session, that has enough tokens; its output says so."""
        output.finish_reason = reason
        output.stop_reason = request.stop_reason
        output.trace_headers = request.trace_headers
        if request.resumable and reason is not FinishReason.ERROR:
            output.finish_reason, output.piece_finish_reason = None, reason
            surplus = self.scheduler.suspend(request)
            if surplus is not None:
                self._end(surplus, FinishReason.ERROR)
                self._fail(surplus.request_id, surplus.client, "ended: too many sessions are idle")
            return
        if request.kv_transfer is not None and request.kv_transfer.do_remote_decode:
            output.kv_transfer_params = self.hand_offs.finish(request, reason)
        self.scheduler.finish(request, reason, request.stop_reason)
        if request.kept_as:
            self.kept.keep(request)

    def take_outputs(self) -> dict[bytes, list[EngineCoreOutput]]:
        """Return outputs since the last call, by client."""
        outputs, self._outputs = self._outputs, defaultdict(list)
        return outputs

    def handle_transfer_events(self) -> None:
        """Apply what the hinge reports; call when the connector's `wake_fd` is readable."""
        for request, error in self.hand_offs.handle_events():
            self._fail(request.request_id, request.client, error)

    # --- utility calls ------------------------------------------------------------------------

    def offer(self, *calls: Callable[..., Any]) -> None:
        """Let clients call these functions by name. The builder of the core adds some."""
        self.utilities.update((call.__name__, call) for call in calls)

    def call(self, method: str, args: list[Any], convert: Convert = msgspec.convert) -> Any:
        """Run a utility call. Its answer may be a `Future`, which a later `settle` completes.

        Raises `InvalidRequestError` for a name that is not callable, or arguments that do not fit.
        """
        utility = self.utilities.get(method)
        if utility is None:
            known = ", ".join(sorted(self.utilities))
            raise InvalidRequestError(f"no utility method {method!r}; there are {known}")
        if self.leaving and method not in LAST_CALLS:
            raise DiptychError(SHUTTING_DOWN)
        self._launched()  # it may touch weights, and blocks that a step under way still writes to
        return call_utility(utility, args, convert)

    def describe(self) -> Any:
        return msgspec.to_builtins(self.description)

    def stats(self) -> SchedulerStats:
        snapshot = self.scheduler.snapshot()
        snapshot.kv_transfer = self.hand_offs.stats()
        if self.hand_offs.store is not None:
            self.hand_offs.store.count(snapshot)
        snapshot.draining = self.draining
        snapshot.paused = self.scheduler.paused
        snapshot.sleep_level = self.residency.level
        snapshot.dummy_steps = self.dummy_steps
        snapshot.malformed_messages = self.malformed_messages
        snapshot.seconds_stepping = self._seconds_stepping
        snapshot.adapters_loaded = self.adapters.num_loads
        snapshot.seconds_loading_adapters = self.adapters.seconds_loading
        return snapshot

    def drain(self) -> DrainReport:
        """Begin to drain: from now on `stats` says so. Present and new requests are served."""
        if not self.draining:
            log.info("draining: this engine is about to leave")
        self.draining = True
        return self.drain_report()

    def drain_report(self) -> DrainReport:
        """Return what still keeps this engine from ending."""
        return self.scheduler.view().drain_report(draining=self.draining)

    def hand_off(self, request_id: str) -> bool:
        """End a decoding request here so that another engine can go on with its KV.

        Its last output has ABORT and `kv_transfer_params`. Returns False and does nothing unless
        the request is decoding: all but the last sampled token is computed. If a step is running,
        nobody gets the token that it samples, and the other engine samples it again.
        """
        request = self.scheduler.find(request_id)
        if self.connector is None or request is None or not request.is_decoding:
            return False
        output = EngineCoreOutput(
            request_id,
            [],
            finish_reason=FinishReason.ABORT,
            kv_transfer_params=self.hand_offs.grant(request),
            num_cached_tokens=request.num_cached_tokens or 0,
        )
        self._outputs[request.client].append(output)
        self.scheduler.finish(request, FinishReason.ABORT)
        return True

    def take_kept(self, name: str, tenant: str) -> KeptAnswer | None:
        """See `wire.TAKE_KEPT`. Whoever had a running one is told that it is no longer theirs."""
        named = [x for x in self.scheduler.unfinished if name and x.kept_as == name]
        for request in named:
            if request.tenant == tenant:
                self._end(request, FinishReason.ABORT)
                self._fail(request.request_id, request.client, RefusedByEngineError(TAKEN_OVER))
        return self.kept.find(name, tenant)

    def close(self) -> None:
        self.grammars.close()
        if self.hand_offs.kept is not None:
            self.hand_offs.kept.close(failed=self.failed)
        if self.hand_offs.store is not None:
            self.hand_offs.store.close()
        if self.connector is not None:
            self.connector.close()
        self.runner.close()
