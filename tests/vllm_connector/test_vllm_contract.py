"""Whatever happens in whatever order, nothing that the connector reports can kill vLLM's core, and
nothing stays pinned."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm_scheduler import LEASE_SECONDS, Status, VllmScheduler, prompt, reference

from diptych_protocol import KVTransferParams
from diptych_vllm.transfers import Results

NAMES = [f"r{number}" for number in range(4)]
names = st.sampled_from(NAMES)


class AnythingHappens(RuleBasedStateMachine):
    """Few names, so that they come again: as ids of later requests, and in late reports."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm = VllmScheduler()
        self.reports: list[Results] = []
        """All that the worker has ever reported."""
        self.used: list[dict[str, Any]] = []
        self.bad: set[str] = set()
        """Requests whose references are not good."""
        self.num_leases = 0

    # --- requests -----------------------------------------------------------------------------

    def may_add(self, name: str) -> bool:
        return name not in self.vllm.requests

    @rule(name=names, length=st.integers(1, 13))
    def add_plain(self, name: str, length: int) -> None:
        if self.may_add(name):
            self.bad.discard(name)
            self.vllm.add(prompt(name, length))

    @rule(name=names, length=st.integers(1, 13), lease=st.sampled_from([None, "a" * 32]))
    def add_for_others(self, name: str, length: int, lease: str | None) -> None:
        if self.may_add(name):
            self.bad.discard(name)
            self.vllm.add(prompt(name, length, {"do_remote_decode": True, "lease_id": lease}))

    @rule(name=names, length=st.integers(1, 13), more=st.integers(0, 5))
    def add_with_reference(self, name: str, length: int, more: int) -> None:
        if self.may_add(name):
            self.bad.discard(name)
            self.num_leases += 1
            params = reference(self.num_leases, length)
            self.used.append(params)
            self.vllm.add(prompt(name, length + more, params))

    @rule(
        name=names,
        what=st.sampled_from(["edited", "other prompt", "garbage", "own"]),
    )
    def add_with_bad_reference(self, name: str, what: str) -> None:
        if not self.may_add(name):
            return
        self.num_leases += 1
        params: Any = reference(self.num_leases, 9, remote_num_tokens=8)
        match what:
            case "other prompt":
                params = reference(self.num_leases, 10)
            case "garbage":
                params = {"do_remote_prefill": True, "remote_port": -1}
            case "own" if self.vllm.answers:
                params = next(iter(self.vllm.answers.values()))
        self.bad.add(name)
        self.vllm.add(prompt(name, 9, params))

    @precondition(lambda self: self.used)
    @rule(name=names, data=st.data())
    def add_with_used_reference(self, name: str, data: st.DataObject) -> None:
        if self.may_add(name):
            params = data.draw(st.sampled_from(self.used))
            self.bad.add(name)
            self.vllm.add(prompt(name, params["remote_num_tokens"], params))

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.vllm.abort(name)

    @precondition(lambda self: self.used or self.vllm.answers)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        known = [*self.used, *self.vllm.answers.values()]
        self.vllm.reject(data.draw(st.sampled_from(known)))

    @rule(name=names, by_length=st.booleans())
    def end_by_itself(self, name: str, by_length: bool) -> None:
        self.vllm.compute(name, by_length=by_length)

    @rule(name=names)
    def preempt(self, name: str) -> None:
        self.vllm.preempt(name)

    @rule(prefix=st.integers(0, 3))
    def step(self, prefix: int) -> None:
        self.vllm.step(prefix)

    @rule()
    def reset(self) -> None:
        self.vllm.half.reset()

    # --- the worker, the hinge and the other engines ------------------------------------------

    @rule()
    def report(self) -> None:
        self.reports.append(self.vllm.worker.collect())
        self.vllm.update(self.reports[-1])

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def report_again(self, data: st.DataObject) -> None:
        """A worker, or what is between, repeats an old report of a request that is over."""
        old = data.draw(st.sampled_from(self.reports))
        over = {name for name in NAMES if name not in self.vllm.requests}
        self.vllm.update(Results(old.sent & over, old.received & over, old.failed & over))

    @rule(sent=st.sets(names), received=st.sets(names))
    def report_nonsense(self, sent: set[str], received: set[str]) -> None:
        """Ids of requests that are not here, or of which nothing is on its way."""
        busy = {
            name
            for name, request in self.vllm.requests.items()
            if request.status in (Status.LOADING, Status.FINISHED)
        }
        self.vllm.update(Results(sent - busy, received - busy, set()))

    @rule(well=st.booleans())
    def connect(self, well: bool) -> None:
        self.vllm.driver.connect(well=well)

    @rule(held=st.booleans())
    def serve(self, held: bool) -> None:
        self.vllm.driver.serve(held=held)

    @rule()
    def refuse(self) -> None:
        self.vllm.driver.refuse()

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS, 90.0]))
    def pass_time(self, seconds: float) -> None:
        self.vllm.driver.pass_time(seconds)

    @precondition(lambda self: self.vllm.answers)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        params = data.draw(st.sampled_from(list(self.vllm.answers.values())))
        self.vllm.driver.read(KVTransferParams.parse(params))

    # --- always -------------------------------------------------------------------------------

    @invariant()
    def nothing_runs_on_a_bad_reference(self) -> None:
        for name, request in self.vllm.requests.items():
            assert not (name in self.bad and request.loaded)

    def teardown(self) -> None:
        """When clients have gone and time has passed, nothing is left."""
        vllm = self.vllm
        for name in NAMES:
            vllm.abort(name)
        for _ in range(3):
            vllm.step()
            vllm.driver.connect(well=False)
            vllm.driver.refuse()
            for _ in range(4):
                vllm.driver.pass_time(90.0)
            vllm.update(vllm.worker.collect())
        assert vllm.requests == {}
        assert len(vllm.half) == 0
        assert vllm.driver.hinge.leases.leases == {}
        assert vllm.driver.hinge.loads.loads == {}


TestAnythingHappens = AnythingHappens.TestCase
TestAnythingHappens.settings = settings(max_examples=100, stateful_step_count=50)
