"""One engine process: the real core, scheduler, block pool and hinge, and a loop in virtual time.

The loop is that of `CoreServer`: take what has arrived, run a step, take what arrived while it ran,
tell the clients. A step takes some virtual time, and the hinge goes on meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from sim_clock import Clock
from sim_driver import SimDriver
from sim_model import BLOCK, VOCABULARY, HashingRunner, Memory, PoisoningPool
from sim_network import Network
from sim_session import Abort, Add, Call, FromEngine, Posture, Session, ToEngine
from sim_tally import UTILITY_REFUSALS, named, refused_by_engine

from diptych_engine.control.controls import Controls
from diptych_engine.control.core import EngineCore
from diptych_engine.control.image_intake import ImageIntake
from diptych_engine.control.kept_answers import KeptAnswers
from diptych_engine.execution.grammar_compiler import GrammarCompiler
from diptych_engine.scheduling.request import Pending, StepPlan
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_kv_transfer.connector import KVConnector, make_hinge
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.messages import VERSION, Hello
from diptych_protocol import EngineCoreOutput, EngineDescription, FinishReason, KVTransferConfig
from diptych_router.engines.engine_table import Role

MAX_LEASE_S = 2.0
MAX_LOAD_TIMEOUT_S = 3.0
MAX_MODEL_LEN = 14
SLOW_STEP = 0.02
"""How many steps take a hundred times as long, while the hinge goes on."""
IDLE_WAIT_S = 1.0
STEP_S = 0.01
RESEND_S = 0.1
"""How often what a partition holds up is tried again."""
PORT = 7000
HOSTS = {name: f"10.0.0.{number}" for number, name in enumerate(("p0", "p1", "d0", "d1"), 1)}
"""An engine's address, by its name."""


class NoGrammars:
    """The part of the grammar compiler: nobody here asks for a form."""

    has_finished = False
    wake_fd = -1

    def begin(self, _: object) -> bool:
        return True

    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large and of what kind an engine is; another incarnation may differ."""

    name: str
    role: Role
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    max_model_len: int
    lease_seconds: float
    load_timeout_s: float
    prefix_caching: bool = True
    runs_ahead: bool = False
    model: str = "m"
    version: int = VERSION
    """The version of the protocol between hinges."""


class SimEngine:
    """One incarnation; a restart makes a new one at the same address."""

    def __init__(
        self, shape: Shape, incarnation: int, network: Network, lent: list[dict[str, Any]]
    ) -> None:
        """`lent` gets the parameters of every lease."""
        self.shape = shape
        self.network = network
        self.clock: Clock = network.clock
        self.random: Random = network.random
        self.name = shape.name
        self._lent = lent
        epoch = f"{shape.name}.{incarnation}"
        self.memory = Memory(shape.num_blocks, epoch)
        self.pool = PoisoningPool(shape.num_blocks, self.memory)
        compat: dict[str, int | str] = {"model": shape.model, "block_size": BLOCK}
        config = KVTransferConfig(
            listen_host=HOSTS[shape.name],
            listen_port=PORT,
            lease_seconds=shape.lease_seconds,
            load_timeout_s=shape.load_timeout_s,
        )
        hinge = make_hinge(config, Hello(shape.name, epoch, compat, shape.version))
        self.address = (HOSTS[shape.name], PORT)
        network.machines[HOSTS[shape.name]] = shape.name
        self.driver = SimDriver(hinge, self.address, network, self.memory, self.pool)
        self.driver.wake_core = self.wake
        network.hosts[self.address] = self.driver
        references = References(PUBLIC_KEY, lambda: self.clock.now)
        connector = KVConnector(hinge.me, config, self.driver, references, self.random.getrandbits)
        description = EngineDescription(
            engine_id=shape.name, epoch=epoch, model=shape.model,
            max_model_len=shape.max_model_len, vocab_size=VOCABULARY, block_size=BLOCK,
            num_blocks=shape.num_blocks, dtype="float32", compat=compat,
            max_num_seqs=shape.max_num_seqs, pid=incarnation, kv_transfer=True,
            kv_transfer_host=connector.host, kv_transfer_port=PORT,
            kv_transfer_proof=connector.proof,
        )  # fmt: skip
        scheduler = Scheduler(
            self.pool,
            BLOCK,
            shape.max_num_seqs,
            shape.max_num_batched_tokens,
            shape.max_num_waiting,
            shape.prefix_caching,
        )
        grammars = cast(GrammarCompiler, NoGrammars())
        self.runner = HashingRunner(self.memory)
        self.core = EngineCore(
            description,
            scheduler,
            self.runner,
            connector,
            grammars,
            ImageIntake(None, 0),
            runs_ahead=shape.runs_ahead,
        )
        self.core.offer(*Controls(self.core).calls)
        self.core.kept = KeptAnswers(lambda: self.clock.now)
        self.alive = True
        self.stalled = False
        self.saw: Callable[[SimEngine], None] = lambda _: None
        """Called after each turn of the loop."""
        self._inbox: deque[tuple[Session, ToEngine]] = deque()
        self._sessions: dict[bytes, Session] = {}
        self._turn_due = False
        self._computing = False
        self._blocked = False
        """Nothing could be scheduled; only news can change that."""
        self._posture = self.core.posture
        self._frozen: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # --- its process --------------------------------------------------------------------------

    def crash(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.driver.close()
        self._break_sessions("crashed")

    def leave(self) -> None:
        """SIGTERM to the core: it ends what it has, says goodbye, and is gone."""
        self.core.leaving = True
        self._receive()
        self.core.abort(list(self.core.scheduler.requests))
        self._send_outputs()
        self.alive = False
        self.driver.close()
        self._break_sessions("shut down")

    def stall(self) -> None:
        """SIGSTOP."""
        self.stalled = True
        self.driver.stall()

    def resume(self) -> None:
        """SIGCONT."""
        self.stalled = False
        self.driver.resume()
        frozen, self._frozen = self._frozen, []
        for call, args in frozen:
            call(*args)
        self.wake()

    def heard_by(self, host: str) -> bool:
        """Somebody there gets answers: it lives, runs, and can be reached."""
        return self.alive and not self.stalled and self.network.reaches(host, self.name)

    def _running(self, call: Callable[..., None], *args: Any) -> bool:
        """Whether this process runs; if it is stalled, the call is made when it goes on."""
        if self.stalled:
            self._frozen.append((call, args))
        return self.alive and not self.stalled

    # --- its connections ----------------------------------------------------------------------

    def accept(self, session: Session) -> Posture:
        """A client has connected. A session that it closes is missed when we next send to it."""
        self._sessions[session.identity] = session
        draining, paused, _ = self.core.posture
        session.told = Posture(draining, paused)
        return session.told

    def _break_sessions(self, why: str) -> None:
        for session in self._sessions.values():
            if session.open:
                self.clock.after(self._delay(), self._tell_broken, session, why)

    def _tell_broken(self, session: Session, why: str) -> None:
        if not session.open:
            return
        if not self.network.reaches(session.host, self.name):
            self.clock.after(RESEND_S, self._tell_broken, session, why)
            return
        session.open = False
        session.lost(session, why)

    def post(self, session: Session, message: ToEngine) -> None:
        """A client sends a message."""
        session.to_engine.append(message)
        session.last_sent = max(session.last_sent, self.clock.now + self._delay())
        self.clock.at(session.last_sent, self._arrive, session)

    def _arrive(self, session: Session) -> None:
        if not self.alive or not session.open:
            return
        if not self.network.reaches(session.host, self.name):
            self.clock.after(RESEND_S, self._arrive, session)
            return
        self._inbox.append((session, session.to_engine.popleft()))
        self.wake()

    def _send(self, session: Session, message: FromEngine) -> None:
        session.to_client.append(message)
        session.last_received = max(session.last_received, self.clock.now + self._delay())
        self.clock.at(session.last_received, self._deliver, session)

    def _deliver(self, session: Session) -> None:
        if not session.open:
            return
        if not self.network.reaches(session.host, self.name):
            self.clock.after(RESEND_S, self._deliver, session)
            return
        session.receive(session, session.to_client.popleft())

    def _delay(self) -> float:
        return 0.002 * (0.2 + self.random.random())

    # --- its loop -----------------------------------------------------------------------------

    def wake(self) -> None:
        """There is news, or work."""
        self._blocked = False
        if not self._turn_due and not self._computing:
            self._turn_due = True
            self.clock.after(0.0, self._turn)

    def _turn(self) -> None:
        if not self._running(self._turn):
            return
        self._turn_due = False
        self._receive()
        if not self.core.has_work or self._blocked:
            self._settle()
            return
        self._computing = True
        plan, pending = self.core.start_step()
        seconds = STEP_S * (0.2 + self.random.random())
        if self.random.random() < SLOW_STEP:
            seconds *= 100
        self.clock.after(seconds, self._finish, plan, pending)
        self.saw(self)

    def _finish(self, plan: StepPlan, pending: Pending) -> None:
        if not self._running(self._finish, plan, pending):
            return
        self._receive()
        self._computing = False
        self.core.finish_step(plan, pending)
        if not plan.scheduled:
            self._blocked = True
            self.clock.after(IDLE_WAIT_S, self._retry)
        self._settle()

    def _retry(self) -> None:
        """The loop looks again from time to time."""
        if self._blocked and self._running(self._retry):
            self.wake()

    def _receive(self) -> None:
        while self._inbox:
            session, message = self._inbox.popleft()
            match message:
                case Add(request):
                    if self.core.leaving:
                        self.network.note("refused by an engine: it leaves")
                    self.core.add(request, session.identity)
                case Abort(request_ids):
                    self.core.abort(request_ids)
                case Call():
                    self._call(session, message)
        self.core.handle_transfer_events()

    def _call(self, session: Session, call: Call) -> None:
        try:
            result = self.core.call(call.method, list(call.args))
        except Exception as exc:  # it fails the call, not the engine
            result = exc
            self.network.note(f"refused call: {named(str(exc), UTILITY_REFUSALS)}")
        if call.method == "announce_kv_transfer" and isinstance(result, bool):
            self.network.note(f"announced: {'blocks reserved' if result else 'only connected'}")
        if call.answer is None:
            return
        if isinstance(result, Future):
            raise TypeError("nobody here waits for answers that come later")
        self.clock.after(self._delay(), self._answer, session, call.answer, result)

    def _answer(self, session: Session, answer: Callable[[Any], None], result: Any) -> None:
        if session.open:
            answer(result)

    def _settle(self) -> None:
        self._tell_posture()
        self._send_outputs()
        self.core.deferred.settle()
        self.saw(self)
        if self.core.has_work and not self._blocked:
            self.wake()

    def _tell_posture(self) -> None:
        if self.core.posture == self._posture:
            return
        self._note_posture()
        draining, paused, _ = self._posture = self.core.posture
        posture = Posture(draining, paused)
        for session in self._sessions.values():
            if session.open and session.told != posture:
                session.told = posture
                self._send(session, posture)

    def _note_posture(self) -> None:
        before, now, role = self._posture, self.core.posture, self.shape.role
        news = {"drains": now[0] > before[0], "paused": now[1] > before[1],
                f"fell asleep: level {now[2]}": now[2] > before[2]}  # fmt: skip
        for what, happened in news.items():
            if happened:
                self.network.note(f"{role} {what}")

    def _send_outputs(self) -> None:
        for client, outputs in self.core.take_outputs().items():
            self._lent += [o.kv_transfer_params for o in outputs if o.kv_transfer_params]
            self._note_ends(outputs)
            session = self._sessions.get(client)
            if session is not None and session.open:
                self._send(session, outputs)
            else:
                self._sessions.pop(client, None)
                self.core.client_lost(client)

    def _note_ends(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                self.network.note(refused_by_engine(self.shape.role, output.error or ""))
            elif output.finish_reason is FinishReason.ABORT and output.kv_transfer_params:
                self.network.note("handed off by a decode engine")
