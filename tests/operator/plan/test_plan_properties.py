"""The planner against a cluster in which pods start late, die and get stuck, and users meddle."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from cluster_kit.rollout_sequence import running, sequence
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Canary, CanaryStep, Rollout
from diptych_operator.plan import Evidence, Phase, RevisionState, Step, Trial, plan
from diptych_protocol.admin import TrialReport

ROLES = ("prefill", "decode")
EXAMPLES = int(os.environ.get("DIPTYCH_PLAN_EXAMPLES", "60"))
CANARY = Canary(
    steps=[CanaryStep(weight=10, pause_seconds=60), CanaryStep(weight=50, pause_seconds=0)]
)
sizes = st.builds(Counts, st.integers(1, 5), st.integers(1, 6))
surges = st.sampled_from([(0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (3, 2)])


def both(counts: Counts) -> bool:
    return counts.prefill > 0 and counts.decode > 0


def carried(state: RevisionState, wanted: Counts) -> Counts:
    """What a revision serves with if so many pods are wanted: nothing without a pair."""
    ready = Counts(
        min(state.ready.prefill, state.wanted.prefill, wanted.prefill),
        min(state.ready.decode, state.wanted.decode, wanted.decode),
    )
    return ready if both(ready) else NOTHING


@dataclass
class Pool:
    wanted: int = 0
    ready: int = 0
    leaving: int = 0

    def scale(self, wanted: int) -> None:
        """As a ReplicaSet does it: pods that are not ready go first."""
        self.leaving += max(0, self.wanted - wanted)
        self.wanted = wanted
        self.ready = min(self.ready, wanted)


@dataclass
class Revision:
    prefill: Pool = field(default_factory=Pool)
    decode: Pool = field(default_factory=Pool)
    broken: bool = False
    """Its pods never become ready."""
    verified: bool = False

    def of(self, role: str) -> Pool:
        return self.prefill if role == "prefill" else self.decode

    @property
    def wanted(self) -> Counts:
        return Counts(self.prefill.wanted, self.decode.wanted)

    @property
    def ready(self) -> Counts:
        return Counts(self.prefill.ready, self.decode.ready)

    def state(self, name: str) -> RevisionState:
        present = Counts(*(self.of(r).wanted + self.of(r).leaving for r in ROLES))
        return RevisionState(name, self.wanted, self.ready, present, self.verified)


class Cluster(RuleBasedStateMachine):
    """Every rule is something that happens; after each, the planner is asked and obeyed."""

    def __init__(self) -> None:
        super().__init__()
        self.revisions: dict[str, Revision] = {"r0": Revision()}
        self.target = "r0"
        self.desired = Counts(2, 3)
        self.rollout = Rollout()
        self.failed = False
        self.suspended = False
        self.routers: list[tuple[str, ...] | None] = [(), ()]
        self.serving: tuple[str, ...] = ()
        self.removed: set[str] = set()
        self.verify = True
        self.trial: Trial | None = None
        self.told: list[TrialReport | None] = [None, None]
        self.stable = ""

    # What users do.

    @rule(broken=st.booleans())
    def change_the_spec(self, broken: bool) -> None:
        self.target = f"r{len(self.removed | set(self.revisions))}"
        self.revisions[self.target] = Revision(broken=broken)
        self.failed = False

    @rule(pick=st.integers(0, 9))
    def roll_back(self, pick: int) -> None:
        names = sorted(self.revisions)
        self.target = names[pick % len(names)]
        self.failed = False

    @rule(desired=sizes | st.just(NOTHING))
    def scale(self, desired: Counts) -> None:
        self.desired = desired

    @rule(limits=surges, kind=st.sampled_from(["PairedRolling", "PairedRolling", "BlueGreen",
                                               "Canary", "Recreate"]))  # fmt: skip
    def change_the_rollout(self, limits: tuple[int, int], kind: str) -> None:
        self.rollout = Rollout(
            type=kind,  # type: ignore[arg-type]
            canary=CANARY,
            max_surge=limits[0],
            max_unavailable=limits[1],
        )

    @rule(suspended=st.booleans())
    def suspend(self, suspended: bool) -> None:
        self.suspended = suspended

    @rule()
    def miss_the_deadline(self) -> None:
        self.failed = True

    # What the cluster does.

    @rule(data=st.data(), role=st.sampled_from(ROLES))
    def some_pods_become_ready(self, data: st.DataObject, role: str) -> None:
        revision = self.revisions[data.draw(st.sampled_from(sorted(self.revisions)))]
        pool = revision.of(role)
        if not revision.broken:
            pool.ready = data.draw(st.integers(pool.ready, pool.wanted))

    @rule()
    def everything_becomes_ready(self) -> None:
        for revision in self.revisions.values():
            for role in ROLES:
                pool = revision.of(role)
                pool.ready = pool.ready if revision.broken else pool.wanted

    @rule(data=st.data(), role=st.sampled_from(ROLES))
    def a_pod_dies(self, data: st.DataObject, role: str) -> None:
        pool = self.revisions[data.draw(st.sampled_from(sorted(self.revisions)))].of(role)
        pool.ready = max(0, pool.ready - 1)

    @rule()
    def drained_pods_are_gone(self) -> None:
        for revision in self.revisions.values():
            for role in ROLES:
                revision.of(role).leaving = 0

    @rule()
    def canaries_cross(self) -> None:
        for revision in self.revisions.values():
            revision.verified = revision.verified or both(revision.ready)

    @rule(which=st.integers(0, 1), answers=st.booleans())
    def a_router_follows(self, which: int, answers: bool) -> None:
        self.routers[which] = self.serving if answers else None
        self.told[which] = self.report() if answers else None

    # The operator.

    def observe(self) -> list[RevisionState]:
        return [revision.state(name) for name, revision in sorted(self.revisions.items())]

    def decide(self) -> Step:
        return plan(
            self.target,
            self.desired,
            self.rollout,
            self.observe(),
            verify=self.verify,
            failed=self.failed,
            routers_serving=self.routers,
            suspend=self.suspended,
            evidence=Evidence(self.stable, self.trial, "now", 60.0, self.told),
        )

    def report(self) -> TrialReport | None:
        """What a router says that follows."""
        if self.trial is None or len(self.serving) < 2:
            return None
        return TrialReport(revision=self.trial.revision, weight=self.trial.weight, requests=20)

    def obey(self, step: Step) -> None:
        for name, counts in step.replicas.items():
            revision = self.revisions.setdefault(name, Revision())
            for role in ROLES:
                revision.of(role).scale(counts.of(role))
        for name in step.removable:
            del self.revisions[name]
            self.removed.add(name)
        self.serving, self.trial = step.serving, step.trial
        if step.phase is Phase.Idle:
            self.stable = self.target

    @invariant()
    def the_planner_is_asked(self) -> None:
        before = self.observe()
        step = self.decide()
        self.check_form(before, step)
        if not self.suspended:
            if self.rollout.type == "PairedRolling":
                self.check_ceiling(before, step)
                self.check_floor(before, step)
            if step.phase is Phase.Failed and self.rollout.type != "Recreate":
                self.check_failure_costs_nothing(before, step)
        self.obey(step)

    def check_form(self, before: list[RevisionState], step: Step) -> None:
        assert step.message
        assert set(step.replicas) <= {state.revision for state in before} | {self.target}
        assert not set(step.removable) & set(step.replicas)
        assert self.target in step.replicas
        for counts in step.replicas.values():
            assert both(counts) or not counts, f"one pool alone: {step.replicas}"

    def check_ceiling(self, before: list[RevisionState], step: Step) -> None:
        for role in ROLES:
            now = sum(state.wanted.of(role) for state in before)
            then = sum(counts.of(role) for counts in step.replicas.values())
            assert then <= max(now, self.desired.of(role) + self.rollout.max_surge)

    def check_floor(self, before: list[RevisionState], step: Step) -> None:
        if min(self.desired.prefill, self.desired.decode) + self.rollout.max_surge < 2:
            return  # No place for two revisions: the user accepted an empty pool.
        for role in ROLES:
            now = sum(carried(state, state.wanted).of(role) for state in before)
            then = sum(carried(s, step.replicas.get(s.revision, NOTHING)).of(role) for s in before)
            floor = self.desired.of(role) - self.rollout.max_unavailable
            assert then >= min(now, floor), (before, step)

    def check_failure_costs_nothing(self, before: list[RevisionState], step: Step) -> None:
        """What old revisions carry stays, as far as it is desired at all."""
        olds = [state for state in before if state.revision != self.target]
        for role in ROLES:
            now = sum(carried(s, s.wanted).of(role) for s in olds)
            then = sum(carried(s, step.replicas.get(s.revision, NOTHING)).of(role) for s in olds)
            assert then >= min(now, self.desired.of(role)), (before, step)

    @precondition(lambda self: not self.suspended)
    @rule()
    def all_goes_well_from_here(self) -> None:
        """The rollout ends: the target alone, whole, in a bounded number of rounds."""
        self.revisions.setdefault(self.target, Revision()).broken = False
        self.failed = False
        self.trial = None  # the spec has changed, or what failed would not be tried again
        for _ in range(80):
            self.obey(self.decide())
            self.everything_becomes_ready()
            self.drained_pods_are_gone()
            self.canaries_cross()
            self.routers = [self.serving, self.serving]
            self.told = [self.report(), self.report()]
        step = self.decide()
        assert step.phase is Phase.Idle, (self.observe(), step)
        assert dict(step.replicas) == {self.target: self.desired}
        assert set(self.revisions) == {self.target}


Cluster.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)
TestCluster = Cluster.TestCase


@given(size=sizes, limits=surges)
@settings(max_examples=150)
def test_each_revision_stays_within_one_pod_of_the_ratio(
    size: Counts, limits: tuple[int, int]
) -> None:
    rollout = Rollout(max_surge=limits[0], max_unavailable=limits[1])
    for step in sequence("b", size, rollout, [running("a", size)]):
        for counts in step.replicas.values():
            p_share, d_share = counts.prefill * size.decode, counts.decode * size.prefill
            one_pod = max(size.prefill, size.decode)
            assert abs(p_share - d_share) < one_pod, (size, limits, step)


@given(size=sizes, limits=surges)
@settings(max_examples=150)
def test_capacity_in_pairs_lacks_less_than_a_pod_of_the_smaller_pool(
    size: Counts, limits: tuple[int, int]
) -> None:
    """Capacity: over all revisions, the share that the scarcer of their two pools provides."""
    surge, unavailable = limits
    small = min(size.prefill, size.decode)
    if small + surge < 2:
        return
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    states = {"a": running("a", size)}
    for step in sequence("b", size, rollout, list(states.values())):
        kept = [carried(state, step.replicas.get(name, NOTHING)) for name, state in states.items()]
        capacity = sum(min(k.prefill / size.prefill, k.decode / size.decode) for k in kept)
        floor = 1 - unavailable / small
        assert capacity > floor - 1 / small + 1e-9, (size, limits, step)
        states = {name: running(name, counts) for name, counts in step.replicas.items()}


@given(
    size=sizes,
    olds=st.lists(sizes, min_size=1, max_size=3),
    begun=st.none() | sizes,
    limits=surges,
)
@settings(max_examples=300)
def test_from_any_state_a_rollout_ends(
    size: Counts, olds: list[Counts], begun: Counts | None, limits: tuple[int, int]
) -> None:
    rollout = Rollout(max_surge=limits[0], max_unavailable=limits[1])
    revisions = [running(f"old{number}", counts) for number, counts in enumerate(olds)]
    revisions += [running("new", begun)] if begun else []
    pods = sum(counts.prefill + counts.decode for counts in (size, *olds))
    *_, last = sequence("new", size, rollout, revisions, limit=2 * pods + 3)
    assert last.replicas["new"] == size


@given(
    size=sizes,
    olds=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=3),
    limits=surges,
)
@settings(max_examples=300)
def test_old_pods_that_never_become_ready_hold_up_nothing(
    size: Counts, olds: list[tuple[Counts, Counts]], limits: tuple[int, int]
) -> None:
    """Unless there are so many old revisions that one pod of each fills a pool: one of them is to
    grow then, and which of them still can is not to be seen."""
    surge, unavailable = limits
    assume(len(olds) < min(size.prefill, size.decode) + surge)
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    working = {f"old{number}": able for number, (_, able) in enumerate(olds)}
    wanted = {f"old{number}": counts for number, (counts, _) in enumerate(olds)}
    for _ in range(2 * sum(c.prefill + c.decode for c in (size, *wanted.values())) + 3):
        before = [partly_ready(name, c, working.get(name, c)) for name, c in wanted.items()]
        step = plan(
            "new", size, rollout, before,
            verify=True, failed=False, routers_serving=[()], suspend=False,
        )  # fmt: skip
        for role in ROLES:
            now = sum(carried(state, state.wanted).of(role) for state in before)
            kept = [carried(s, step.replicas.get(s.revision, NOTHING)).of(role) for s in before]
            assert sum(kept) >= min(now, size.of(role) - unavailable), (before, step)
        wanted = dict(step.replicas)
        if step.phase is Phase.Idle and set(wanted) == {"new"}:
            return
    raise AssertionError(f"no end: {wanted}, of which {working} can be ready")


def partly_ready(name: str, wanted: Counts, able: Counts) -> RevisionState:
    """A revision with `wanted` pods, of which at most `able` ever become ready."""
    ready = Counts(min(wanted.prefill, able.prefill), min(wanted.decode, able.decode))
    return RevisionState(name, wanted, ready, wanted, verified=True)
