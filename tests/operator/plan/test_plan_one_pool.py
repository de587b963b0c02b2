"""Rollouts of services with one pool, whose engines compute prompts too, and to and from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_kit.rollout_sequence import running, sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Rollout
from diptych_operator.plan import Phase, RevisionState, Step, plan

numbers = st.integers(1, 6)
one_pool = st.builds(Counts, st.just(0), numbers)
any_size = one_pool | st.builds(Counts, numbers, numbers)
surges = st.sampled_from([(0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (3, 2)])
kinds = st.sampled_from(["PairedRolling", "BlueGreen", "Recreate"])

ONE_MORE = Rollout(max_surge=1, max_unavailable=0)


def step(
    olds: list[RevisionState],
    desired: Counts,
    rollout: Rollout = ONE_MORE,
    *,
    failed: bool = False,
    suspend: bool = False,
) -> Step:
    return plan(
        "new", desired, rollout, olds,
        verify=False, failed=failed, routers_serving=[()], suspend=suspend,
    )  # fmt: skip


@given(size=one_pool, olds=st.lists(one_pool, min_size=1, max_size=3), limits=surges)
@settings(max_examples=200)
def test_one_pool_rolls_within_its_limits(
    size: Counts, olds: list[Counts], limits: tuple[int, int]
) -> None:
    surge, unavailable = limits
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    states = [running(f"old{number}", counts) for number, counts in enumerate(olds)]
    before = {state.revision: state.wanted for state in states}
    for planned in sequence("new", size, rollout, states):
        wanted = sum(counts.decode for counts in planned.replicas.values())
        now = sum(counts.decode for counts in before.values())
        assert not any(counts.prefill for counts in planned.replicas.values())
        assert "prefill" not in planned.message
        assert wanted <= max(now, size.decode + surge)
        if size.decode + surge > 1:  # else there is no place for two revisions
            kept = sum(min(planned.replicas[name].decode, c.decode) for name, c in before.items())
            assert kept >= min(now, size.decode - unavailable), (before, planned)
        before = {name: counts for name, counts in planned.replicas.items() if counts}
    assert planned.replicas["new"] == size


@given(
    size=any_size,
    olds=st.lists(any_size, min_size=1, max_size=3),
    begun=st.booleans(),
    limits=surges,
    kind=kinds,
)
@settings(max_examples=300)
def test_a_rollout_between_one_pool_and_two_ends(
    size: Counts, olds: list[Counts], begun: bool, limits: tuple[int, int], kind: str
) -> None:
    rollout = Rollout(type=kind, max_surge=limits[0], max_unavailable=limits[1])  # type: ignore[arg-type]
    states = [running(f"old{number}", counts) for number, counts in enumerate(olds)]
    states += [running("new", Counts(min(1, size.prefill), 1))] if begun else []
    shapes = {state.revision: state.whole for state in states} | {"new": not size.prefill}
    pods = sum(counts.prefill + counts.decode for counts in (size, *olds))
    for planned in sequence("new", size, rollout, states, limit=2 * pods + 8):
        for name, counts in planned.replicas.items():
            assert not counts or bool(counts.prefill) != shapes[name], (name, planned)
            assert not counts or counts.decode
    assert planned.replicas["new"] == size


@given(old=st.builds(Counts, numbers, numbers), size=one_pool, limits=surges)
@settings(max_examples=150)
def test_two_pools_become_one_without_a_gap(
    old: Counts, size: Counts, limits: tuple[int, int]
) -> None:
    """Whatever the sizes: while the old pair gives way there is always somebody who answers."""
    rollout = Rollout(max_surge=max(1, limits[0]), max_unavailable=limits[1])
    before = {"old": old}
    for planned in sequence("new", size, rollout, [running("old", old)]):
        kept = [
            Counts(min(c.prefill, planned.replicas[name].prefill),
                   min(c.decode, planned.replicas[name].decode))
            for name, c in before.items()
        ]  # fmt: skip
        if size.decode - rollout.max_unavailable > 0:
            assert any(counts.decode for counts in kept), (before, planned)
        before = {name: counts for name, counts in planned.replicas.items() if counts}


def test_the_words_speak_of_the_pods_that_there_are() -> None:
    planned = step([running("old", Counts(0, 4))], Counts(0, 4))
    assert planned.message == (
        "new: 1 decode pod of 4 wanted, waiting for 1 decode pod to be ready; "
        "old: 4 decode pods stay"
    )
    assert dict(planned.replicas) == {"new": Counts(0, 1), "old": Counts(0, 4)}


def test_old_pods_give_way_to_pods_that_are_ready_though_no_canary_crosses() -> None:
    new = replace(running("new", Counts(0, 1)), verified=False)
    planned = step([running("old", Counts(0, 4)), new], Counts(0, 4))
    assert dict(planned.replicas) == {"new": Counts(0, 2), "old": Counts(0, 3)}


def test_a_failed_revision_of_one_pool_keeps_a_pod_to_look_at() -> None:
    stuck = RevisionState("new", Counts(0, 1), NOTHING, Counts(0, 1), whole=True)
    planned = step([running("old", Counts(0, 4)), stuck], Counts(0, 4), failed=True)
    assert planned.phase is Phase.Failed
    assert dict(planned.replicas) == {"new": Counts(0, 1), "old": Counts(0, 4)}
    assert "1 decode pod of new stay" in planned.message


@pytest.mark.parametrize("suspend", [True, False])
def test_a_service_of_one_pool_rests(suspend: bool) -> None:
    planned = step([running("new", Counts(0, 2))], NOTHING, suspend=suspend)
    assert dict(planned.replicas) == {"new": NOTHING}
