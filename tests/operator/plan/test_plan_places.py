"""Rollouts where the cluster has too few places, its scheduler binds in any order, and others too
take places: a rollout ends, or says what it lacks, and never costs more than one pod of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from diptych_operator.api.names import POOLS
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Rollout
from diptych_operator.plan import Phase, RevisionState, Step, plan

Mode = Literal["ReplaceInPlace", "Wait", "Fail"]
ROUNDS = 400
"""Far more than any of these rollouts takes."""
LONG = 3
"""Rounds after which a pod that waits counts as turned away."""


@dataclass
class Pod:
    revision: str
    role: str
    placed: bool = False
    ready: bool = False
    leaving: int = 0
    """Rounds until it has drained, if it is to go."""
    waited: int = 0


@dataclass
class Cluster:
    """Its places are one kind for both pools, or each pool has its own."""

    size: Counts
    rollout: Rollout
    random: Random
    places: dict[str, int]
    """By role; only "any" if one kind suits both."""
    pods: list[Pod] = field(default_factory=list)
    wanted: dict[str, Counts] = field(default_factory=dict)
    tenant: dict[str, int] = field(default_factory=dict)
    """Places that others hold."""
    works: bool = True
    """The new revision gets ready once it has places."""
    failed: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        self.wanted = {"old": self.size}
        for role in POOLS:
            self.pods += [Pod("old", role, True, True) for _ in range(self.size.of(role))]

    def of(self, revision: str, role: str) -> list[Pod]:
        return [
            p for p in self.pods
            if (p.revision, p.role) == (revision, role) and not p.leaving
        ]  # fmt: skip

    def counts(self, revision: str, what: str = "") -> Counts:
        """Pods that stay: all, or those that are `ready`, `placed`, or `away`."""
        each = (self.of(revision, role) for role in POOLS)
        return Counts(*(sum(_is(pod, what) for pod in pods) for pods in each))

    def state(self, revision: str) -> RevisionState:
        wanted, placed = self.wanted.get(revision, NOTHING), self.counts(revision, "placed")
        here = Counts(
            *(sum((p.revision, p.role) == (revision, r) for p in self.pods) for r in POOLS)
        )
        return RevisionState(
            revision,
            wanted=wanted,
            ready=self.counts(revision, "ready"),
            present=here,
            verified=revision == "old" or all(_counted(self.counts(revision, "ready"))),
            unplaced=Counts(*(wanted.of(r) - placed.of(r) for r in POOLS)),
            turned_away=self.counts(revision, "away"),
        )

    def round(self) -> Step:
        before = {name: self.state(name) for name in ("old", "new")}
        step = plan(
            "new", self.size, self.rollout, list(before.values()),
            verify=True, failed=self.failed, full=self.full, routers_serving=[()], suspend=False,
        )  # fmt: skip
        if before["old"].wanted:
            self.check(before["new"], step)
        self.wanted = dict(step.replicas)
        for name in ("old", "new"):
            self.scale(name, step.replicas.get(name, NOTHING))
        self.drain()
        self.bind()
        self.start()
        return step

    def check(self, new: RevisionState, step: Step) -> None:
        asked = step.replicas["new"]
        if any(_counted(new.unplaced)) or self.failed:
            assert all(asked.of(r) <= new.wanted.of(r) for r in POOLS), (new, step)
        elif step.replicas["old"]:
            assert all(asked.of(r) <= new.wanted.of(r) + 1 for r in POOLS), (new, step)

    def scale(self, revision: str, wanted: Counts) -> None:
        """As a ReplicaSet does: what has no node goes first, then what is not ready."""
        for role in POOLS:
            pods = sorted(self.of(revision, role), key=lambda pod: (pod.ready, pod.placed))
            for pod in pods[: max(0, len(pods) - wanted.of(role))]:
                if pod.placed:
                    pod.leaving = self.random.randint(1, 4)
                else:
                    self.pods.remove(pod)
            self.pods += [Pod(revision, role) for _ in range(wanted.of(role) - len(pods))]

    def drain(self) -> None:
        for pod in [pod for pod in self.pods if pod.leaving]:
            pod.leaving -= 1
            if not pod.leaving:
                self.pods.remove(pod)

    def bind(self) -> None:
        waiting = [pod for pod in self.pods if not pod.placed]
        self.random.shuffle(waiting)
        for pod in waiting:
            pod.placed = self.free(pod.role) > 0
            pod.waited += not pod.placed

    def start(self) -> None:
        for pod in self.pods:
            if pod.placed and (self.works or pod.revision == "old") and self.random.random() < 0.4:
                pod.ready = True

    def kind(self, role: str) -> str:
        return "any" if "any" in self.places else role

    def free(self, role: str) -> int:
        kind = self.kind(role)
        taken = sum(pod.placed for pod in self.pods if self.kind(pod.role) == kind)
        return self.places[kind] - taken - self.tenant.get(kind, 0)

    def others_come_and_go(self) -> None:
        kind = self.random.choice(sorted(self.places))
        role = "prefill" if kind == "any" else kind
        held = self.tenant.get(kind, 0)
        if self.random.random() < 0.5 and self.free(role) > 0:
            self.tenant[kind] = held + 1
        else:
            self.tenant[kind] = max(0, held - 1)

    def until_it_ends(self, rounds: int = ROUNDS) -> Iterator[Step]:
        for _ in range(rounds):
            step = self.round()
            yield step
            if step.phase is Phase.Idle and not step.replicas.get("old"):
                return


def _counted(counts: Counts) -> tuple[int, int]:
    return counts.prefill, counts.decode


def _is(pod: Pod, what: str) -> bool:
    known = {
        "ready": pod.ready, "placed": pod.placed,
        "away": not pod.placed and pod.waited >= LONG,
    }  # fmt: skip
    return known.get(what, True)


sizes = st.builds(Counts, st.integers(1, 4), st.integers(1, 5))
limits = st.sampled_from([(0, 1), (1, 0), (1, 1), (2, 0), (3, 2)])
randoms = st.integers(0, 1 << 30).map(Random)


def cluster(
    size: Counts, limit: tuple[int, int], random: Random, spare: Counts, *,
    shared: bool, mode: Mode = "ReplaceInPlace",
) -> Cluster:  # fmt: skip
    places: dict[str, int] = {role: size.of(role) + spare.of(role) for role in POOLS}
    rollout = Rollout(max_surge=limit[0], max_unavailable=limit[1], when_full=mode)
    return Cluster(size, rollout, random, {"any": sum(places.values())} if shared else places)


def ready_pairs(world: Cluster, role: str) -> int:
    """Ready pods of a pool that have a partner of their revision."""
    both = [world.counts(name, "ready") for name in ("old", "new")]
    return sum(counts.of(role) for counts in both if all(_counted(counts)))


@given(
    size=sizes, limit=limits, random=randoms, shared=st.booleans(),
    spare=st.builds(Counts, st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
@example(Counts(2, 2), (1, 1), Random(0), True, NOTHING)
@example(Counts(2, 2), (1, 0), Random(0), True, NOTHING)
@settings(max_examples=50)
def test_a_rollout_ends_in_a_full_cluster_and_lacks_at_most_one_pod_of_a_pool(
    size: Counts, limit: tuple[int, int], random: Random, shared: bool, spare: Counts
) -> None:
    assume(min(_counted(size)) > 1)
    world = cluster(size, limit, random, spare, shared=shared)
    for _ in world.until_it_ends():
        for role in POOLS:
            assert ready_pairs(world, role) >= size.of(role) - max(1, limit[1])
        if size.prefill == size.decode:
            pairs = sum(min(_counted(world.counts(name, "ready"))) for name in ("old", "new"))
            assert pairs >= size.decode - max(1, limit[1])
    assert world.counts("new", "ready") == size, world
    assert not world.counts("old"), world


@given(
    size=sizes, limit=limits, random=randoms, shared=st.booleans(),
    mode=st.sampled_from(["ReplaceInPlace", "Wait"]), moves=st.integers(0, 60),
)  # fmt: skip
@settings(max_examples=50)
def test_with_others_about_it_ends_once_they_leave_or_says_what_it_lacks(
    size: Counts, limit: tuple[int, int], random: Random, shared: bool, mode: Mode, moves: int
) -> None:
    world = cluster(size, limit, random, Counts(1, 1), shared=shared, mode=mode)
    missing = max(1 if mode == "ReplaceInPlace" else 0, limit[1])
    for _ in range(moves):
        step = world.round()
        world.others_come_and_go()
        if any(_counted(world.state("new").turned_away)) and world.counts("old"):
            step = world.round()
            assert "there is no room" in step.message or step.phase is Phase.Idle
            assert "spec.rollout." in step.message
        for role in POOLS:
            if min(_counted(size)) > 1 or not limit[1]:
                assert ready_pairs(world, role) >= min(1, size.of(role)) * (size.of(role) - missing)
    world.tenant.clear()
    world.places = {kind: number + 2 * max(limit) for kind, number in world.places.items()}
    for _ in world.until_it_ends():
        pass
    assert world.counts("new", "ready") == size, world
    assert not world.counts("old"), world


@given(size=sizes, limit=limits, random=randoms, shared=st.booleans(), begun=st.integers(0, 30))
@settings(max_examples=50)
def test_a_failed_revision_gives_up_pods_that_wait_and_the_old_one_comes_back(
    size: Counts, limit: tuple[int, int], random: Random, shared: bool, begun: int
) -> None:
    assume(min(_counted(size)) > 1)
    world = cluster(size, limit, random, NOTHING, shared=shared)
    world.works = random.random() < 0.5
    for _ in range(begun):
        world.round()
    assume(all(_counted(world.counts("old"))))
    world.failed = world.full = True
    world.round()
    assert world.counts("new") == world.counts("new", "placed")
    for _ in range(ROUNDS // 4):
        world.round()
        for role in POOLS:
            assert ready_pairs(world, role) >= size.of(role) - max(1, limit[1])
    assert world.counts("old", "ready") == size, world
    assert not any(not pod.placed for pod in world.pods)


@given(size=sizes, random=randoms, places=st.integers(2, 9))
@settings(max_examples=50)
def test_a_first_start_ends_with_a_pair_wherever_there_are_two_places(
    size: Counts, random: Random, places: int
) -> None:
    """Else one pool could take them all, and nothing would ever be served."""
    world = cluster(size, (1, 0), random, NOTHING, shared=True)
    world.places, world.pods, world.wanted = {"any": places}, [], {}
    for _ in range(ROUNDS // 4):
        world.round()
    ready = world.counts("new", "ready")
    assert all(_counted(ready)), world
    assert sum(_counted(ready)) == min(places, sum(_counted(size))), world


def test_pairs_are_asked_for_one_after_the_other() -> None:
    """Else both free places could go to one pool, and half the service would be missing."""
    world = cluster(Counts(2, 2), (1, 1), Random(1), NOTHING, shared=True)
    steps = [step.replicas for step in world.until_it_ends()]
    assert steps[0] == {"old": Counts(1, 1), "new": Counts(1, 1)}
    assert not any(counts.get("new") == Counts(2, 2) for counts in steps[:2])


def test_where_a_pool_has_one_pod_it_is_not_replaced_in_place_and_the_message_says_why() -> None:
    world = cluster(Counts(1, 2), (1, 0), Random(1), NOTHING, shared=True)
    *_, last = (world.round() for _ in range(50))
    assert last.replicas == {"old": Counts(1, 2), "new": Counts(1, 1)}
    assert "there is no room for 1 prefill and 1 decode pods" in last.message
    assert "set spec.rollout.whenFull to Wait, or maxUnavailable to 1" in last.message
    world.failed = world.full = True
    failed = world.round()
    assert failed.replicas == {"old": Counts(1, 2), "new": NOTHING}
    assert "set spec.rollout.whenFull" in failed.message
    world.places["any"] += 2
    assert world.round().replicas == failed.replicas, "nodes alone do not bring it back, so"
    assert "any change of the spec tries again" in failed.message


@pytest.mark.parametrize(("size", "helps"), [(Counts(2, 2), True), (Counts(1, 2), False)])
def test_a_remedy_that_would_not_help_is_not_named(size: Counts, helps: bool) -> None:
    world = cluster(size, (1, 0), Random(1), NOTHING, shared=True, mode="Fail")
    world.round()
    world.failed = world.full = True
    assert ("to ReplaceInPlace" in world.round().message) is helps
