"""Whatever happens in whatever order, nothing that the connector reports can kill vLLM's core, and
nothing stays pinned."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm_scheduler import (
    LEASE_SECONDS,
    ONE_GROUP,
    THERE,
    WINDOWS,
    ScriptedDriver,
    Status,
    VllmScheduler,
    prompt,
    reference,
)

from diptych_kv_transfer.tables.load import LeaseRef
from diptych_protocol import KVTransferParams
from diptych_vllm.ranks import sources_of
from diptych_vllm.transfers import Results

NAMES = [f"r{number}" for number in range(4)]
names = st.sampled_from(NAMES)


class AnythingHappens(RuleBasedStateMachine):
    """Few names, so that they come again: as ids of later requests, and in late reports. Other
    engines answer each rank for itself, and one may fail while the other does not."""

    num_ranks, ranks_there, heads = 1, 1, 2
    groups = ONE_GROUP

    def __init__(self) -> None:
        super().__init__()
        self.vllm = VllmScheduler(self.num_ranks, self.ranks_there, self.heads, self.groups)
        self.reports: list[Results] = []
        """All that the worker has ever reported."""
        self.used: list[dict[str, Any]] = []
        self.bad: set[str] = set()
        """Requests whose references are not good."""
        self.num_leases = 0
        self.served: set[tuple[int, int, str, bool]] = set()
        """Which ranks got the blocks of which rank under which lease or share, and whether they
        were held."""

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
            params = reference(self.num_leases, length, self.ranks_there, self.groups)
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
        params: Any = reference(self.num_leases, 9, groups=self.groups, remote_num_tokens=8)
        match what:
            case "other prompt":
                params = reference(self.num_leases, 10, groups=self.groups)
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

    @rule(name=names, by_length=st.booleans(), num_tokens=st.integers(1, 9))
    def end_by_itself(self, name: str, by_length: bool, num_tokens: int) -> None:
        self.vllm.compute(name, by_length=by_length, num_tokens=num_tokens)

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
        self.reports.append(self.vllm.collect())
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

    def draw_rank(self, data: st.DataObject) -> ScriptedDriver:
        return data.draw(st.sampled_from(self.vllm.drivers))

    @rule(well=st.booleans(), data=st.data())
    def connect(self, well: bool, data: st.DataObject) -> None:
        self.draw_rank(data).connect(well=well)

    @rule(held=st.booleans(), data=st.data())
    def serve(self, held: bool, data: st.DataObject) -> None:
        driver = self.draw_rank(data)
        for peer, asked in driver.opens:
            rank = self.vllm.drivers.index(driver)
            self.served.add((rank, driver.rank_of[peer], asked.lease_id, held))
        driver.serve(held=held)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        self.draw_rank(data).refuse()

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS, 90.0]))
    def pass_time(self, seconds: float) -> None:
        for driver in self.vllm.drivers:
            driver.pass_time(seconds)

    @precondition(lambda self: self.vllm.answers)
    @rule(data=st.data(), share=st.sampled_from(["", "/0/2/2", "/1/2/2", "/2/4/1"]))
    def read(self, data: st.DataObject, share: str) -> None:
        params = data.draw(st.sampled_from(list(self.vllm.answers.values())))
        self.draw_rank(data).read(KVTransferParams.parse(params), share)

    # --- always -------------------------------------------------------------------------------

    @invariant()
    def nothing_runs_on_a_bad_reference(self) -> None:
        for name, request in self.vllm.requests.items():
            assert not (name in self.bad and request.loaded)

    @invariant()
    def what_is_loaded_came_to_every_rank_from_all_that_it_reads(self) -> None:
        for request in self.vllm.requests.values():
            if request.loaded:
                named = LeaseRef(request.arrival.params["lease_id"], THERE, "", "")
                for ranks in self.vllm.ranks:
                    for source in sources_of(ranks, self.ranks_there):
                        read = (ranks.rank, source.rank, source.lease(named).lease_id, True)
                        assert source.part is None or read in self.served

    def teardown(self) -> None:
        """When clients have gone and time has passed, nothing is left."""
        vllm = self.vllm
        for name in NAMES:
            vllm.abort(name)
        for _ in range(3):
            vllm.step()
            for driver in vllm.drivers:
                driver.connect(well=False)
                driver.refuse()
                for _ in range(4):
                    driver.pass_time(90.0)
            vllm.update(vllm.collect())
        assert vllm.requests == {}
        assert len(vllm.half) == 0
        assert vllm.aggregator.is_empty
        for driver in vllm.drivers:
            assert driver.hinge.leases.leases == {}
            assert driver.hinge.loads.loads == {}


class AnythingHappensToTwoRanks(AnythingHappens):
    num_ranks, ranks_there = 2, 2


class AnythingHappensToReadersOfTwoRanks(AnythingHappens):
    num_ranks, ranks_there = 1, 2


class AnythingHappensToTwoReadersOfARank(AnythingHappens):
    num_ranks, ranks_there = 2, 1


class AnythingHappensToReadersOfEqualRanks(AnythingHappens):
    num_ranks, ranks_there, heads = 2, 4, 1


class AnythingHappensToWindows(AnythingHappens):
    groups = WINDOWS


TestAnythingHappens = AnythingHappens.TestCase
TestAnythingHappensToTwoRanks = AnythingHappensToTwoRanks.TestCase
TestAnythingHappensToReadersOfTwoRanks = AnythingHappensToReadersOfTwoRanks.TestCase
TestAnythingHappensToTwoReadersOfARank = AnythingHappensToTwoReadersOfARank.TestCase
TestAnythingHappensToReadersOfEqualRanks = AnythingHappensToReadersOfEqualRanks.TestCase
TestAnythingHappensToWindows = AnythingHappensToWindows.TestCase
for _case in (TestAnythingHappens, TestAnythingHappensToTwoRanks, TestAnythingHappensToWindows):
    _case.settings = settings(max_examples=100, stateful_step_count=50)
for _case in (
    TestAnythingHappensToReadersOfTwoRanks,
    TestAnythingHappensToTwoReadersOfARank,
    TestAnythingHappensToReadersOfEqualRanks,
):
    _case.settings = settings(max_examples=60, stateful_step_count=50)
