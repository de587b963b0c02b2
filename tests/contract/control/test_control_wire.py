"""Control calls, aborts and the end of a core, seen from a client's socket."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_kit.core import make_core
from engine_kit.wire import ABORT, ADD, TIMEOUT_MS, UTILITY, Client, request, start
from waits import PATIENCE_S, Deadline

from diptych_engine.control.core import EngineCore
from diptych_engine.scheduling.request import Pending, StepPlan
from diptych_engine.serving.core_server import FEW_CLIENTS, CoreServer
from diptych_protocol import FinishReason, UtilityCall, wire

ENDLESS = {"max_tokens": 900, "ignore_eos": True}


class Caller(Client):
    """A client that keeps everything it is told, in order."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.events: list[tuple[str, Any]] = []
        """("token", request), ("end", (request, reason)), ("answer", (call id, ...)), ("dead",)."""

    def ask(self, method: str, *args: Any) -> int:
        """Make a call; do not wait for its answer."""
        self.call_id += 1
        self.send(UTILITY, msgspec.msgpack.encode(UtilityCall(0, self.call_id, method, [*args])))
        return self.call_id

    def until(self, kind: str, what: Any = None) -> Any:
        """Listen until something is told, and return it."""
        while True:
            for seen, value in self.events:
                name = value[0] if isinstance(value, tuple) else value
                if seen == kind and what in (None, name):
                    return value
            self._listen()

    def _listen(self) -> None:
        assert self.socket.poll(TIMEOUT_MS), f"silence after {self.events[-3:]}"
        frames = self.socket.recv_multipart()
        if frames == [wire.ENGINE_CORE_DEAD]:
            self.events.append(("dead", "core"))
            return
        message = wire.outputs_decoder.decode(frames)
        if message.utility_output is not None:
            answer = message.utility_output
            value = (answer.call_id, answer.failure_message, answer.result)
            self.events.append(("answer", value))
        for output in message.outputs:
            self.events += [("token", output.request_id)] * len(output.new_token_ids)
            if output.finished:
                self.events.append(("end", (output.request_id, output.finish_reason)))

    def count(self, kind: str, what: Any) -> int:
        return self.events.count((kind, what))


@contextlib.contextmanager
def served(core: EngineCore, path: Path) -> Iterator[tuple[CoreServer, Caller]]:
    """The core in a thread of this process."""
    endpoint = f"ipc://{path}/core"
    server = CoreServer(core, [(endpoint, None)])
    thread = threading.Thread(target=server.run)
    thread.start()
    caller = Caller(endpoint)
    try:
        yield server, caller
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        caller.socket.close()
        assert not thread.is_alive()


class Blocking:
    """Stops the core's runner in the middle of a step, once, until there is mail for the core."""

    def __init__(self, core: EngineCore) -> None:
        self._launch = core.runner.launch
        core.runner.launch = self.launch  # type: ignore[method-assign]
        self.mailbox: zmq.Socket[bytes] | None = None
        """The core's socket; set it to block the next step."""
        self.inside = threading.Event()
        self.done_before = 0
        """Steps that were done when the blocked one began."""

    def launch(self, plan: StepPlan) -> Pending:
        if self.inside.is_set() or not plan.scheduled:
            pass
        elif self.mailbox is None:
            self.done_before += 1
        else:
            self.inside.set()
            assert self.mailbox.poll(int(PATIENCE_S * 1000))  # this is the thread that owns it
        return self._launch(plan)


def test_contract_B07_an_abort_while_a_step_is_blocked_silences_the_request(tmp_path: Path) -> None:
    core = make_core()
    runner = Blocking(core)
    with served(core, tmp_path) as (server, caller):
        caller.add("a", **ENDLESS)
        caller.until("token", "a")
        runner.mailbox = server._sockets[0]
        assert runner.inside.wait(PATIENCE_S)
        caller.send(ABORT, msgspec.msgpack.encode(["a"]))
        assert caller.until("end", "a") == ("a", FinishReason.ABORT)
        asked = caller.ask("stats")
        stats = caller.until("answer", asked)[2]
        told = caller.count("token", "a")
        assert told == runner.done_before, "what the blocked step sampled is told to nobody"
        assert stats[3] == stats[4], "all blocks are free"


def test_contract_B15_a_pending_call_delays_neither_tokens_nor_other_calls(tmp_path: Path) -> None:
    with served(make_core(), tmp_path) as (_, caller):
        caller.add("a", max_tokens=60, ignore_eos=True)
        caller.until("token", "a")
        pause = caller.ask("pause_generation", "wait")
        unknown, other = caller.ask("no_such_method"), caller.ask("is_paused")
        bad = caller.ask("sleep", "deep")
        assert "no utility method" in caller.until("answer", unknown)[1]
        assert caller.until("answer", other) == (other, None, True)
        assert "level" in caller.until("answer", bad)[1]
        assert caller.until("answer", pause) == (pause, None, None)
        assert caller.count("token", "a") == 60
        order = [event for event in caller.events if event[0] in ("end", "answer")]
        assert order[-2:] == [
            ("end", ("a", FinishReason.LENGTH)), ("answer", (pause, None, None)),
        ], "the pause is complete when its last output is out"  # fmt: skip


def test_contract_B15_an_answer_may_come_from_another_thread_or_fail_there(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    core = make_core()
    gate = threading.Event()
    with ThreadPoolExecutor(3) as pool:

        def slow(value: int) -> Any:
            return pool.submit(lambda: gate.wait(20) and 10 // value)

        def odd() -> object:
            return object()

        core.offer(slow, odd)
        with served(core, tmp_path) as (_, caller):
            fine, broken, unsendable = (
                caller.ask("slow", 5),
                caller.ask("slow", 0),
                caller.ask("odd"),
            )
            assert "cannot be sent" in caller.until("answer", unsendable)[1]
            caller.add("a", max_tokens=5)
            caller.until("end", "a")
            gate.set()
            assert caller.until("answer", fine) == (fine, None, 2)
            assert "division" in caller.until("answer", broken)[1]


def test_contract_B15_pending_calls_are_rejected_at_shutdown(tmp_path: Path) -> None:
    with served(make_core(), tmp_path) as (server, caller):
        caller.add("a", **ENDLESS)
        caller.until("token", "a")
        pause = caller.ask("pause_generation", "wait")
        caller.until("answer", caller.ask("is_paused"))
        server.stop()
        assert caller.until("answer", pause) == (pause, "Server shutting down", None)
        caller.until("dead")
        assert caller.until("end", "a") == ("a", FinishReason.ABORT)


@pytest.fixture
def start_core(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], Caller]]]:
    started: list[tuple[subprocess.Popen[bytes], Caller]] = []

    def make(**changes: Any) -> tuple[subprocess.Popen[bytes], Caller]:
        path = f"ipc://{tmp_path}/core"
        started.append((start(path, **changes), Caller(path)))
        return started[-1]

    yield make
    for process, caller in started:
        process.kill()
        process.wait()
        caller.socket.close()


@pytest.mark.parametrize(
    ("timeout_s", "max_tokens", "reason"),
    [(0, 900, FinishReason.ABORT), (PATIENCE_S, 600, FinishReason.LENGTH)],
)
def test_contract_B16_sigterm_aborts_or_drains_and_turns_away_what_comes(
    start_core: Callable[..., Any], timeout_s: float, max_tokens: int, reason: FinishReason
) -> None:
    process, caller = start_core(shutdown_timeout_s=timeout_s)
    for name in ("a", "b"):
        caller.add(name, max_tokens=max_tokens, ignore_eos=True)
        caller.until("token", name)
    process.send_signal(signal.SIGTERM)
    if timeout_s:
        refused = None
        while refused is None:  # until the signal has arrived
            answer = caller.until("answer", caller.ask("is_paused"))
            refused = answer[1]
        assert refused == "is_paused: Server shutting down"
        caller.add("late")
        assert caller.until("end", "late") == ("late", FinishReason.ABORT)
    caller.until("dead")
    assert process.wait(PATIENCE_S) == 0
    assert [caller.until("end", name)[1] for name in ("a", "b")] == [reason, reason]
    assert caller.events[-1] == ("dead", "core"), "the last word"
    if reason is FinishReason.LENGTH:
        assert caller.count("token", "a") == max_tokens


def test_contract_B16_a_drain_ends_when_its_time_is_up(start_core: Callable[..., Any]) -> None:
    process, caller = start_core(
        model="dummy://?num_hidden_layers=8&hidden_size=512", shutdown_timeout_s=0.3
    )
    caller.add("a", **ENDLESS)
    caller.until("token", "a")
    process.send_signal(signal.SIGTERM)
    assert caller.until("end", "a") == ("a", FinishReason.ABORT)
    assert process.wait(PATIENCE_S) == 0


def test_contract_B17_a_core_whose_runner_raises_says_that_it_is_dead(tmp_path: Path) -> None:
    core = make_core()
    endpoint = f"ipc://{tmp_path}/core"
    server = CoreServer(core, [(endpoint, None)])
    raised: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except RuntimeError as exc:
            raised.append(exc)

    def launch(plan: StepPlan) -> Pending:
        raise RuntimeError("the device fell off the bus")

    core.runner.launch = launch  # type: ignore[method-assign]
    thread = threading.Thread(target=run)
    thread.start()
    watcher, caller = Caller(endpoint), Caller(endpoint)
    watcher.until("answer", watcher.ask("is_paused"))
    caller.add("a")
    caller.until("dead")
    watcher.until("dead")
    thread.join(PATIENCE_S)
    assert "fell off" in str(raised[0])
    for client in (watcher, caller):
        client.socket.close()


def test_clients_that_have_vanished_are_forgotten(tmp_path: Path) -> None:
    """Routers come and go, each time under another identity."""
    with served(make_core(), tmp_path) as (server, caller):
        endpoint = caller.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for _ in range(5 * FEW_CLIENTS):
            visitor = Caller(endpoint)
            visitor.until("answer", visitor.ask("is_paused"))
            visitor.socket.close()
            caller.until("answer", caller.ask("is_paused"))
        deadline = Deadline("visitors that are forgotten")  # they vanish when ZMQ has seen it
        while len(server._clients) > FEW_CLIENTS + 1:
            deadline.check()
            caller.until("answer", caller.ask("is_paused"))


def test_what_two_calls_are_told_does_not_mix(tmp_path: Path) -> None:
    """Every client learns of a pause, once, before it learns what became of its requests."""
    with served(make_core(), tmp_path) as (_, caller):
        endpoint = caller.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        idle = Caller(endpoint)
        idle.until("answer", idle.ask("is_paused"))
        caller.add("a", **ENDLESS)
        caller.until("token", "a")
        asked = caller.ask("pause_generation", "abort")
        told: defaultdict[str, int] = defaultdict(int)
        paused_first = False
        while not told["answer"]:
            message = caller.receive()
            stats = message.scheduler_stats
            if stats is not None and stats.paused and not told["end"]:
                paused_first = True
            told["end"] += sum(output.finished for output in message.outputs)
            answer = message.utility_output
            told["answer"] += answer is not None and answer.call_id == asked
        assert paused_first
        assert told["end"] == 1
        news = idle.receive().scheduler_stats
        assert news is not None
        assert news.paused
        caller.until("answer", caller.ask("resume_generation"))
        news = idle.receive().scheduler_stats
        assert news is not None
        assert not news.paused
        assert idle.socket.poll(50) == 0
        idle.send(ADD, msgspec.msgpack.encode(request("b")))
        idle.until("end", "b")
        idle.socket.close()
