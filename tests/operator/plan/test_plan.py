"""Rollouts as complete sequences, and each rule of the planner by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from cases import each
from cluster_kit.rollout_sequence import running, sequence, table

from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Rollout
from diptych_operator.plan import Phase, RevisionState, Step, plan

FOUR = Counts(4, 4)
NONE = (0, 0)


def state(
    revision: str,
    wanted: tuple[int, int],
    ready: tuple[int, int] | None = None,
    *,
    present: tuple[int, int] | None = None,
    verified: bool = True,
) -> RevisionState:
    return RevisionState(
        revision,
        wanted=Counts(*wanted),
        ready=Counts(*(wanted if ready is None else ready)),
        present=Counts(*(wanted if present is None else present)),
        verified=verified,
    )


def step(
    revisions: Sequence[RevisionState],
    desired: Counts = FOUR,
    *,
    target: str = "b",
    strategy: str = "PairedRolling",
    surge: int = 1,
    unavailable: int = 0,
    verify: bool = True,
    failed: bool = False,
    routers: Sequence[tuple[str, ...] | None] = ((),),
    suspend: bool = False,
) -> Step:
    rollout = Rollout(type=strategy, max_surge=surge, max_unavailable=unavailable)  # type: ignore[arg-type]
    return plan(
        target,
        desired,
        rollout,
        revisions,
        verify=verify,
        failed=failed,
        routers_serving=routers,
        suspend=suspend,
    )


def pairs(planned: Step) -> dict[str, tuple[int, int]]:
    return {name: (counts.prefill, counts.decode) for name, counts in planned.replicas.items()}


SEQUENCES = {
    # name: (from, to, surge, unavailable, [(old, new), ...])
    "1p1d_surge1": ((1, 1), (1, 1), 1, 0, [((1, 1), (1, 1)), (NONE, (1, 1))]),
    "1p1d_surge0_empties_first": ((1, 1), (1, 1), 0, 1, [(NONE, (1, 1))]),
    "2p2d_surge1": ((2, 2), (2, 2), 1, 0,
        [((2, 2), (1, 1)), ((1, 1), (2, 2)), (NONE, (2, 2))]),
    "2p2d_surge0": ((2, 2), (2, 2), 0, 1, [((1, 1), (1, 1)), (NONE, (2, 2))]),
    "2p2d_surge2": ((2, 2), (2, 2), 2, 0,
        [((2, 2), (1, 1)), ((1, 1), (2, 2)), (NONE, (2, 2))]),
    "3p4d_surge1_old_rounds_up_new_down": ((3, 4), (3, 4), 1, 0,
        [((3, 4), (1, 1)), ((3, 3), (1, 2)), ((2, 2), (2, 3)), ((1, 1), (3, 4)), (NONE, (3, 4))]),
    "2p4d_surge1": ((2, 4), (2, 4), 1, 0,
        [((2, 4), (1, 1)), ((2, 3), (1, 2)), ((1, 2), (1, 3)), ((1, 1), (2, 4)),
         (NONE, (2, 4))]),
    "4p2d_surge1_is_its_mirror": ((4, 2), (4, 2), 1, 0,
        [((4, 2), (1, 1)), ((3, 2), (2, 1)), ((2, 1), (3, 1)), ((1, 1), (4, 2)),
         (NONE, (4, 2))]),
    "1p4d_surge1": ((1, 4), (1, 4), 1, 0,
        [((1, 4), (1, 1)), ((1, 3), (1, 2)), ((1, 2), (1, 3)), ((1, 1), (1, 4)),
         (NONE, (1, 4))]),
    "1p4d_surge0_has_no_place_for_two": ((1, 4), (1, 4), 0, 1, [(NONE, (1, 4))]),
    "2p8d_surge0_old_makes_room": ((2, 8), (2, 8), 0, 2,
        [((1, 6), (1, 1)), ((1, 5), (1, 2)), ((1, 4), (1, 3)), ((1, 3), (1, 4)),
         ((1, 2), (1, 5)), ((1, 1), (1, 6)), (NONE, (1, 7)), (NONE, (2, 8))]),
    "grows_meanwhile": ((2, 2), (4, 4), 1, 0,
        [((2, 2), (1, 1)), ((2, 2), (2, 2)), ((2, 2), (3, 3)), ((1, 1), (4, 4)),
         (NONE, (4, 4))]),
    "shrinks_meanwhile": ((4, 4), (2, 2), 1, 0,
        [((2, 2), (1, 1)), ((1, 1), (2, 2)), (NONE, (2, 2))]),
    "turns_its_ratio": ((2, 4), (4, 2), 1, 0,
        [((2, 2), (1, 1)), ((2, 1), (2, 1)), ((2, 1), (3, 1)), ((1, 1), (4, 2)),
         (NONE, (4, 2))]),
}  # fmt: skip


@each("name", SEQUENCES)
def test_the_complete_sequence_of_a_paired_rollout(name: str) -> None:
    before, after, surge, unavailable, expected = SEQUENCES[name]
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    steps = sequence("b", Counts(*after), rollout, [running("a", Counts(*before))])
    seen = [(pairs(s).get("a", NONE), pairs(s)["b"]) for s in steps]
    assert [one for i, one in enumerate(seen) if i == 0 or one != seen[i - 1]] == expected


def test_first_install_wants_everything_at_once_and_ends_verified() -> None:
    phases = [
        step([], FOUR),
        step([state("b", (4, 4), (4, 3), verified=False)]),
        step([state("b", (4, 4), verified=False)]),
        step([state("b", (4, 4))]),
    ]
    assert [s.phase for s in phases] == ["Progressing", "Progressing", "Verifying", "Idle"]
    assert [pairs(s) for s in phases] == [{"b": (4, 4)}] * 4
    assert "1 decode pod to be ready" in phases[1].message


def test_a_single_revision_follows_the_desired_size_at_once() -> None:
    assert pairs(step([state("b", (8, 2))], Counts(1, 5))) == {"b": (1, 5)}


def test_ready_pods_that_no_canary_crossed_replace_nothing() -> None:
    waiting = step([state("a", (4, 4)), state("b", (1, 1), verified=False)])
    assert pairs(waiting) == {"a": (4, 4), "b": (1, 1)}
    assert waiting.phase is Phase.Verifying
    unverified = step([state("a", (4, 4)), state("b", (1, 1), verified=False)], verify=False)
    assert pairs(unverified) == {"a": (3, 3), "b": (2, 2)}


def test_ready_pods_count_in_the_proportion_in_which_they_are_wanted() -> None:
    lopsided = step([state("a", (4, 4)), state("b", (4, 4), (4, 1))], surge=4)
    assert pairs(lopsided) == {"a": (3, 3), "b": (4, 4)}


def test_nothing_gives_way_to_pods_that_a_router_leaves_out() -> None:
    held = [state("a", (4, 4)), state("b", (1, 1))]
    assert pairs(step(held, routers=[("a",), ()]))["a"] == (4, 4)
    assert pairs(step(held, routers=[("a", "b"), (), None]))["a"] == (3, 3)


def test_unready_old_pods_go_first() -> None:
    """Although the smaller revision would be the first to go."""
    revisions = [state("a", (2, 2)), state("c", (3, 3), (2, 2)), state("b", (1, 1))]
    assert pairs(step(revisions, Counts(5, 5))) == {"a": (2, 2), "b": (2, 2), "c": (2, 2)}


def test_an_old_revision_that_never_worked_goes_at_once() -> None:
    after = step([state("a", (4, 4), (2, 0), verified=False)])
    assert pairs(after) == {"a": NONE, "b": (4, 4)}


def test_an_old_revision_that_worked_and_is_unready_for_a_moment_is_kept() -> None:
    after = step([state("a", (4, 4), (0, 0))])
    assert pairs(after) == {"a": (4, 4), "b": (1, 1)}


def test_routers_out_of_reach_do_not_cost_the_old_revision_its_pods() -> None:
    after = step([state("a", (4, 4), verified=False)], routers=[None])
    assert pairs(after) == {"a": (4, 4), "b": (1, 1)}


def test_a_third_revision_waits_while_two_old_ones_fill_the_smaller_pool() -> None:
    """1P:4D with one surge pod has two places for prefill: the old ones become one first."""
    rollout = Rollout(max_surge=1)
    both = [running("a", Counts(1, 2)), running("b", Counts(1, 2))]
    steps = [pairs(s) for s in sequence("c", Counts(1, 4), rollout, both)]
    assert steps[:4] == [
        {"a": (1, 2), "b": (1, 3), "c": NONE},
        {"a": (1, 1), "b": (1, 4), "c": NONE},
        {"a": NONE, "b": (1, 4), "c": (1, 1)},
        {"b": (1, 3), "c": (1, 2)},
    ]


def test_the_larger_pool_leaves_the_line_if_the_smaller_cannot_follow() -> None:
    """Three old pairs fill the prefill pool: decode grows beyond the ratio until one may go."""
    olds = [state("x", (1, 1)), state("y", (1, 1)), state("z", (1, 1))]
    grown = step([*olds, state("b", (1, 5))], Counts(3, 9))
    assert pairs(grown) == {"b": (1, 6), "x": (1, 1), "y": (1, 1), "z": (1, 1)}
    freed = step([*olds, state("b", (1, 7))], Counts(3, 9))
    assert pairs(freed) == {"b": (2, 8), "x": NONE, "y": (1, 1), "z": (1, 1)}


def test_otherwise_the_larger_pool_waits_for_the_smaller_at_the_line() -> None:
    """Decode was doubled twice: there is room for 7 of its pods, but for 1 of prefill."""
    olds = state("a", (4, 2))
    waits = [step([olds, state("b", (1, n), (0, 0))], Counts(4, 8)) for n in (1, 2, 3)]
    assert [pairs(each)["b"] for each in waits] == [(1, 2), (1, 3), (1, 3)]


def test_of_several_old_revisions_those_that_carry_nothing_go_at_once() -> None:
    after = step([state("a", (3, 3)), state("z", (1, 1), (0, 1))])
    assert pairs(after) == {"a": (3, 3), "b": (1, 1), "z": NONE}


def test_a_smaller_size_cuts_a_target_that_nothing_gives_way_to() -> None:
    shrunk = step([state("a", (6, 6)), state("b", (2, 2), verified=False)], Counts(2, 2))
    assert pairs(shrunk) == {"a": (2, 2), "b": (1, 1)}


def test_rolling_back_in_the_middle_is_a_rollout_to_the_old_revision() -> None:
    back = step([state("a", (3, 3)), state("b", (2, 2), (1, 1))], target="a")
    assert pairs(back) == {"a": (4, 4), "b": (1, 1)}


def test_a_failed_revision_keeps_a_pair_to_look_at_and_the_old_becomes_whole() -> None:
    middle = [state("a", (3, 3)), state("b", (2, 2), (1, 1))]
    first = step(middle, failed=True)
    assert pairs(first) == {"a": (4, 4), "b": (1, 1)}
    assert first.phase is Phase.Failed
    settled = step([state("a", (4, 4)), state("b", (1, 1), (0, 0))], failed=True)
    assert pairs(settled) == {"a": (4, 4), "b": (1, 1)}
    assert "b got no further in 600 s; a keeps serving" in settled.message


def test_a_failed_revision_gives_up_what_it_serves_only_for_ready_pods() -> None:
    partly = [state("a", (2, 2)), state("b", (3, 3), (2, 2))]
    first = step(partly, failed=True)
    assert pairs(first) == {"a": (3, 3), "b": (2, 2)}
    second = step([state("a", (3, 3), (2, 2)), state("b", (2, 2))], failed=True)
    assert pairs(second) == {"a": (3, 3), "b": (2, 2)}
    third = step([state("a", (3, 3)), state("b", (2, 2))], failed=True)
    assert pairs(third) == {"a": (4, 4), "b": (1, 1)}


def test_without_surge_a_failed_revision_keeps_nothing() -> None:
    first = step([state("a", (3, 3)), state("b", (1, 1), (0, 0))], surge=0, unavailable=1,
                 failed=True)  # fmt: skip
    assert pairs(first) == {"a": (4, 4), "b": NONE}


def test_a_first_install_that_failed_keeps_trying() -> None:
    first = step([state("b", (4, 4), (0, 4), verified=False)], failed=True)
    assert (pairs(first), first.phase) == ({"b": (4, 4)}, Phase.Failed)
    assert step([state("b", (4, 4))], failed=True).phase is Phase.Idle


def test_recreate_waits_until_nothing_of_the_old_is_left() -> None:
    def recreate(*revisions: RevisionState) -> Step:
        return step(revisions, strategy="Recreate")

    stopping = recreate(state("a", (4, 4)))
    assert pairs(stopping) == {"a": NONE, "b": NONE}
    draining = recreate(state("a", NONE, present=(0, 1)))
    assert pairs(draining) == {"a": NONE, "b": NONE}
    assert draining.message == "b waits until old pods are gone (a: 1 decode pod)"
    starting = recreate(state("a", NONE))
    assert (pairs(starting), starting.removable) == ({"b": (4, 4)}, ("a",))


BLUE_GREEN = [
    # what is there, what routers report -> replicas, serving, phase
    ([state("a", (4, 4))], [()], {"a": (4, 4), "b": NONE}, ("a",), "Progressing"),
    ([state("a", (4, 4))], [("a",), None], {"a": (4, 4), "b": NONE}, ("a",), "Progressing"),
    ([state("a", (4, 4))], [("a",)], {"a": (4, 4), "b": (4, 4)}, ("a",), "Progressing"),
    ([state("a", (4, 4)), state("b", (4, 4), (4, 3))], [("a",)],
     {"a": (4, 4), "b": (4, 4)}, ("a",), "Progressing"),
    ([state("a", (4, 4)), state("b", (4, 4), verified=False)], [("a",)],
     {"a": (4, 4), "b": (4, 4)}, ("a",), "Verifying"),
    ([state("a", (4, 4)), state("b", (4, 4))], [("a",), ("a",)],
     {"a": (4, 4), "b": (4, 4)}, ("b",), "Switching"),
    ([state("a", (4, 4)), state("b", (4, 4))], [("a",), ("b",)],
     {"a": (4, 4), "b": (4, 4)}, ("b",), "Switching"),
    ([state("a", (4, 4)), state("b", (4, 4))], [None, ("b",)],
     {"a": (4, 4), "b": (4, 4)}, ("b",), "Switching"),
    ([state("a", (4, 4)), state("b", (4, 4))], [],
     {"a": (4, 4), "b": (4, 4)}, ("b",), "Switching"),
    ([state("a", (4, 4)), state("b", (4, 4))], [("b",), ("b",)],
     {"a": NONE, "b": (4, 4)}, ("b",), "Switching"),
    ([state("a", NONE, present=(2, 1)), state("b", (4, 4))], [("b",)],
     {"a": NONE, "b": (4, 4)}, ("b",), "Idle"),
    # A pod lost during the switch does not turn it back; a target that is gone does.
    ([state("a", (4, 4)), state("b", (4, 4), (3, 4))], [("b",)],
     {"a": (4, 4), "b": (4, 4)}, ("b",), "Switching"),
    ([state("a", (4, 4)), state("b", (4, 4), (0, 4))], [("b",)],
     {"a": (4, 4), "b": (4, 4)}, ("a",), "Progressing"),
    # An old pod that is down does not put a target into service that has nothing yet.
    (
        [state("a", (4, 4), (3, 4))],
        [()],
        {"a": (4, 4), "b": NONE},
        ("a",),
        "Progressing",
    ),
    # A target that was overtaken before any router used it.
    ([state("a", (4, 4)), state("z", (4, 4), (2, 2))], [("a",)],
     {"a": (4, 4), "b": (4, 4), "z": NONE}, ("a",), "Progressing"),
    # BlueGreen chosen in the middle of a PairedRolling: the old alone would be too few.
    ([state("a", (2, 2)), state("b", (3, 3))], [()],
     {"a": (2, 2), "b": (4, 4)}, ("a", "b"), "Progressing"),
    # First install.
    ([], [], {"b": (4, 4)}, ("b",), "Progressing"),
]  # fmt: skip


@each(("revisions", "routers", "replicas", "serving", "phase"), BLUE_GREEN)
def test_blue_green_switches_only_to_a_whole_target(
    revisions: list[RevisionState],
    routers: list[tuple[str, ...] | None],
    replicas: dict[str, tuple[int, int]],
    serving: tuple[str, ...],
    phase: str,
) -> None:
    planned = step(revisions, strategy="BlueGreen", routers=routers)
    assert (pairs(planned), planned.serving, planned.phase) == (replicas, serving, phase)


def test_the_old_of_a_blue_green_rollout_follows_the_desired_size() -> None:
    old = step([state("a", (2, 2))], FOUR, strategy="BlueGreen", routers=[("a",)])
    assert pairs(old)["a"] == (4, 4)


def test_a_failed_blue_green_target_shrinks_once_no_router_uses_it() -> None:
    revisions = [state("a", (4, 4)), state("b", (4, 4), (2, 2))]
    used = step(revisions, strategy="BlueGreen", routers=[("a",), ("b",)], failed=True)
    assert (pairs(used), used.serving) == ({"a": (4, 4), "b": (4, 4)}, ("a",))
    left = step(revisions, strategy="BlueGreen", routers=[("a",), ("a",)], failed=True)
    assert (pairs(left), left.phase) == ({"a": (4, 4), "b": (1, 1)}, Phase.Failed)


@pytest.mark.parametrize("strategy", ["PairedRolling", "BlueGreen", "Recreate"])
def test_suspend_stops_everything_and_sleep_is_idle(strategy: str) -> None:
    revisions = [state("a", (4, 4)), state("b", (1, 1))]
    suspended = step(revisions, strategy=strategy, suspend=True)
    assert (pairs(suspended), suspended.phase) == ({"a": NONE, "b": NONE}, Phase.Suspended)
    assert suspended.message == "suspended: 5 prefill and 5 decode pods on the way out"
    asleep = step(revisions, NOTHING, strategy=strategy)
    assert (pairs(asleep), asleep.phase) == ({"a": NONE, "b": NONE}, Phase.Idle)


def test_a_revision_is_removable_when_nothing_of_it_is_wanted_or_left() -> None:
    planned = step([state("a", NONE, present=(1, 0)), state("c", NONE), state("b", (4, 4))])
    assert planned.removable == ("c",)
    assert pairs(planned) == {"a": NONE, "b": (4, 4)}
    assert (
        planned.message == "b: 4 prefill and 4 decode pods, ready; a: 1 prefill pod on the way out"
    )


def test_prefill_alone_cannot_be_desired() -> None:
    with pytest.raises(ValueError, match="without decode pods"):
        step([], Counts(1, 0))


def test_the_table_in_the_documents_is_what_the_planner_does() -> None:
    old = running("old", Counts(3, 4))
    steps = sequence("new", Counts(3, 4), Rollout(max_surge=1, max_unavailable=0), [old])
    page = Path(__file__).parents[3] / "docs" / "rollouts.md"
    assert "\n".join(table(steps)) in page.read_text(encoding="utf-8")


def test_an_old_pod_stays_until_routers_trust_its_successor() -> None:
    old = RevisionState("old", Counts(2, 2), Counts(2, 2), Counts(2, 2), verified=True)
    one = Counts(1, 1)

    def after(trusted: Counts | None) -> Counts:
        new = RevisionState("new", one, one, one, verified=True, trusted=trusted)
        rollout = Rollout(max_surge=1, max_unavailable=0)
        step = plan(
            "new", Counts(2, 2), rollout, [old, new],
            verify=True, failed=False, routers_serving=[()], suspend=False,
        )  # fmt: skip
        return step.replicas["old"]

    assert after(trusted=Counts(0, 0)) == Counts(2, 2)
    assert after(trusted=Counts(1, 0)) == Counts(2, 2)
    assert after(trusted=one) == Counts(1, 1)
    assert after(trusted=None) == Counts(1, 1)
