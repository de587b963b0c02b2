"""What a pass finds: whose keys routers are to hold, and how revisions look to the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_operator.api.images import Images
from diptych_operator.api.names import (
    CURRENT_KEYS_ANNOTATION,
    KEYS_LABEL,
    PREVIOUS_KEYS_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
)
from diptych_operator.api.parse import parse_object
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.executor import told_to_routers
from diptych_operator.kube.children import belongs_to, child_id, with_owner
from diptych_operator.plan import Phase, RevisionState, Step
from diptych_operator.render import KeySets
from diptych_operator.service_snapshot import ServiceSnapshot, key_sets, keys_in_pods
from diptych_operator.status.observed import PodView, observe, pod_view
from diptych_protocol.admin import CanaryReport, RouterReport

Raw = dict[str, Any]
NOW = "2026-11-21T07:00:30Z"
A, B, C = "keys-a", "keys-b", "keys-c"


def service(uid: str = "u1", **status: Any) -> InferenceService:
    return parse_object(
        {
            "apiVersion": "diptych.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc", "namespace": "ns", "uid": uid},
            "spec": {"model": {"uri": "dummy://"}, "prefill": {}, "decode": {}},
            "status": status,
        },
        Images(),
    )


def engines(revision: str, keys: str, *, ready: int = 1, wanted: int = 1) -> list[Raw]:
    return [
        _deployment(
            f"svc-{role}-{revision}",
            {ROLE_LABEL: role, REVISION_LABEL: revision, KEYS_LABEL: keys},
            {}, wanted, ready,
        )
        for role in ("prefill", "decode")
    ]  # fmt: skip


def routers(current: str, previous: str = "", *, updated: int = 1) -> Raw:
    marks = {CURRENT_KEYS_ANNOTATION: current, PREVIOUS_KEYS_ANNOTATION: previous}
    return _deployment("svc-router", {ROLE_LABEL: "router"}, marks, 1, 1, updated)


def _deployment(
    name: str, labels: Raw, annotations: Raw, wanted: int, ready: int, updated: int | None = None
) -> Raw:
    return {
        "kind": "Deployment",
        "metadata": {
            "name": name, "namespace": "ns", "generation": 1,
            "labels": labels, "annotations": annotations,
        },
        "spec": {"replicas": wanted},
        "status": {
            "observedGeneration": 1, "replicas": wanted, "readyReplicas": ready,
            "updatedReplicas": wanted if updated is None else updated,
        },
    }  # fmt: skip


def snapshot(
    keys: KeySets, deployments: list[Raw], *reports: RouterReport, pods: list[Raw] | None = None,
    **status: Any,
) -> ServiceSnapshot:  # fmt: skip
    found = observe(deployments, pods or [], reports)
    children = {child_id(raw): raw for raw in deployments}
    return ServiceSnapshot(service(**status), "target00", keys, children, pods or [], found)


# --- what routers are told --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "served", "replicas", "asleep"),
    [
        (0, "", {"target00": Counts(1, 1)}, False),  # keep users away until a canary was answered
        (0, "target00", {"target00": Counts(1, 1)}, True),  # the file comes later than sleep does
        (0, "target00", {"target00": NOTHING}, True),
        (0, "old", {"target00": Counts(1, 1), "old": NOTHING}, True),  # changed while asleep
        (0, "old", {"target00": Counts(1, 1), "old": Counts(1, 1)}, False),
        (1, "target00", {"target00": Counts(1, 1)}, False),
    ],
)
def test_routers_hear_of_sleep_before_it_and_until_after_it(
    least: int, served: str, replicas: dict[str, Counts], asleep: bool
) -> None:
    pool = {"autoscaling": {"minReplicas": least, "maxReplicas": 2}}
    raw = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "ns", "uid": "u1"},
        "spec": {"model": {"uri": "dummy://"}, "prefill": pool, "decode": pool},
        "status": {"currentRevision": served},
    }
    found = replace(snapshot(KeySets(A), []), service=parse_object(raw, Images()))
    told = told_to_routers(found, Step(replicas, (), Phase.Idle, "", ()))
    assert told.asleep is asleep


# --- which keys routers are to hold -----------------------------------------------------------


def test_a_first_install_has_one_set() -> None:
    assert key_sets(A, []) == KeySets(A)


def test_what_somebody_wrote_for_keys_of_routers_leads_to_no_other_object() -> None:
    assert key_sets(A, [routers(A, "../../secrets/x")]) == KeySets(A)
    assert key_sets(A, [routers("..", B)]) == KeySets(A)


@each(
    ("wanted", "deployments", "expected"),
    [
        ("at rest", [routers(A), *engines("r1", A)], KeySets(A)),
        # A rotation: from its first moment to long after.
        (B, [routers(A), *engines("r1", A)], KeySets(B, A)),
        (B, [routers(B, A), *engines("r1", A)], KeySets(B, A)),
        (B, [routers(B, A), *engines("r1", A), *engines("r2", B)], KeySets(B, A)),
        (B, [routers(B, A), *engines("r2", B)], KeySets(B, A)),
        # The next one, which drops what is long gone.
        (C, [routers(B, A), *engines("r2", B)], KeySets(C, B)),
        # A second one before any engine has the keys of the first.
        (C, [routers(B, A), *engines("r1", A)], KeySets(C, A)),
        # A second one in the midst of the first: most engines still have the oldest, or do not.
        (C, [routers(B, A), *engines("r1", A, ready=3), *engines("r2", B)], KeySets(C, A)),
        (C, [routers(B, A), *engines("r1", A), *engines("r2", B, ready=3)], KeySets(C, B)),
        # As many of each: routers keep what they hold as theirs.
        (C, [routers(B, A), *engines("r1", A), *engines("r2", B)], KeySets(C, B)),
        # Once chosen it stays, whatever becomes ready meanwhile.
        (C, [routers(C, A), *engines("r1", A), *engines("r2", B, ready=3)], KeySets(C, A)),
        # Back again while it is under way.
        (A, [routers(B, A), *engines("r1", A)], KeySets(A, B)),
        (A, [routers(B, A), *engines("r1", A), *engines("r2", B)], KeySets(A, B)),
        # Somebody deleted the routers in the midst of a rotation.
        (B, [*engines("r1", A), *engines("r2", B)], KeySets(B, A)),
        # All sleeps, or nothing has come up yet.
        (B, [routers(A), *engines("r1", A, ready=0, wanted=0)], KeySets(B, A)),
        (B, [routers(A)], KeySets(B, A)),
        # Somebody's hand was in it.
        (A, [routers(A, A), *engines("r1", A)], KeySets(A)),
    ],
)
def test_routers_hold_what_is_wanted_and_what_engines_have(
    wanted: str, deployments: list[Raw], expected: KeySets
) -> None:
    assert key_sets(A if wanted == "at rest" else wanted, deployments) == expected


HELD = st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 3)), max_size=3)


@given(
    wanted=st.sampled_from([A, B, C]),
    marks=st.none() | st.tuples(st.sampled_from([A, B, C]), st.sampled_from(["", A, B, C])),
    held=HELD,
)
def test_the_answer_is_stable_and_never_the_same_set_twice(
    wanted: str, marks: tuple[str, str] | None, held: list[tuple[str, int]]
) -> None:
    pools = [
        raw for n, (keys, ready) in enumerate(held) for raw in engines(f"r{n}", keys, ready=ready)
    ]
    found = key_sets(wanted, [*([routers(*marks)] if marks else []), *pools])
    assert found.current == wanted
    assert found.previous != wanted
    # As soon as routers are told, the answer is the same, whatever engines do.
    told = routers(found.current, found.previous)
    assert key_sets(wanted, [told, *pools]) == key_sets(wanted, [told]) == found


# --- who waits for whom, and which keys may go ------------------------------------------------


@each(
    ("deployments", "lack"),
    [
        ([], False),  # a first install waits for nobody
        (engines("r1", B), False),
        ([routers(B), *engines("r1", B)], False),
        (engines("r1", A), True),  # there are no routers to hold both
        ([routers(A), *engines("r1", A)], True),
        ([routers(B, A, updated=0), *engines("r1", A)], True),  # some router is of the older make
        ([routers(B, A), *engines("r1", A)], False),
        ([routers(B, A), *engines("r1", A), *engines("r2", B)], False),
    ],
)
def test_engines_with_new_keys_wait_until_all_routers_have_them(
    deployments: list[Raw], lack: bool
) -> None:
    assert snapshot(KeySets(B, A), deployments).routers_lack_keys() is lack


def test_keys_in_use_are_those_of_engines_that_stay_and_those_wanted() -> None:
    older, newer = engines("r1", A), engines("r2", B)
    found = snapshot(KeySets(C, A), [routers(B, A), *older, *newer])
    assert found.known_keys() == {A, B, C}
    assert found.held_keys() == {A, B, C}
    leaving = {child_id(raw) for raw in older}
    assert found.held_keys(without=leaving) == {B, C}
    # A set that no engine ever held is known of only by the routers.
    assert snapshot(KeySets(C, A), [routers(B, A), *older]).held_keys() == {A, C}
    assert snapshot(KeySets(C, A), [routers(B, A), *older]).known_keys() == {A, B, C}


def pod(role: str, revision: str = "", **status: Any) -> PodView:
    labels = {ROLE_LABEL: role, REVISION_LABEL: revision}
    return pod_view({"metadata": {"name": "x", "labels": labels}, "status": status})


@pytest.mark.parametrize(
    ("pods", "held"),
    [
        ([], set()),
        ([pod("decode", "r1", podIP="10.0.0.1")], {A}),
        ([pod("decode", "r2", phase="Running"), pod("prefill", "r1", phase="Running")], {A, B}),
        ([pod("decode", "r1", phase="Pending")], set()),  # it waits for its volumes
        ([pod("decode", "r1", phase="Failed", podIP="10.0.0.1")], set()),
        ([pod("router", phase="Running")], {C}),
        ([pod("decode", "unheard-of", phase="Running")], set()),
    ],
)
def test_keys_in_pods_are_those_that_running_ones_have_read(
    pods: list[PodView], held: set[str]
) -> None:
    deployments = [routers(C, B), *engines("r1", A), *engines("r2", B)]
    assert keys_in_pods(deployments, pods) == held


def test_engines_do_not_wait_for_routers_to_hold_what_is_lost() -> None:
    found = snapshot(KeySets(B, A), [routers(A), *engines("r1", A)])
    assert found.routers_lack_keys()
    assert not replace(found, lost_keys=frozenset({A})).routers_lack_keys()


# --- revisions --------------------------------------------------------------------------------


def canary(revision: str, *, ok: bool = True) -> CanaryReport:
    return CanaryReport(
        prefill="p", decode="d", ok=ok, revision=revision, unix_time=1.0,
        **({} if ok else {"error": "no way"}),  # type: ignore[arg-type]
    )  # fmt: skip


def test_revisions_as_the_planner_wants_to_see_them() -> None:
    leaving = {
        "metadata": {"name": "x", "labels": {ROLE_LABEL: "decode", REVISION_LABEL: "r0"}},
        "status": {"phase": "Running"},
    }
    report = RouterReport(
        ready=True, reason="", open_requests=0, held_requests=0, serving_revisions=[], engines=[],
        canaries=[canary("r2"), canary("r1", ok=False)],
    )  # fmt: skip
    found = snapshot(
        KeySets(A), [routers(A), *engines("r1", A, ready=0), *engines("r2", A, wanted=2)], report,
        pods=[leaving],
    ).revision_states(NOW)  # fmt: skip
    assert found == [
        RevisionState("r0", present=Counts(0, 1)),
        RevisionState("r1", wanted=Counts(1, 1), unplaced=Counts(1, 1)),
        RevisionState(
            "r2", wanted=Counts(2, 2), ready=Counts(1, 1), unplaced=Counts(1, 1), verified=True
        ),
    ]


def test_a_pod_counts_as_turned_away_once_the_scheduler_has_looked_long_enough() -> None:
    def waiting(role: str, since: str, reason: str) -> Raw:
        gated = reason == "SchedulingGated"
        time = None if gated else since
        unplaced = {"status": "False", "reason": reason, "lastTransitionTime": time}
        return {
            "metadata": {
                "name": f"{role}-{since}", "labels": {ROLE_LABEL: role, REVISION_LABEL: "r1"},
                **({"creationTimestamp": since} if gated else {}),
            },
            "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", **unplaced}]},
        }  # fmt: skip

    placed = waiting("prefill", "2026-11-21T06:00:00Z", "")
    placed["status"]["conditions"][0]["status"] = "True"
    pods = [
        placed,
        waiting("prefill", "2026-11-21T07:00:00Z", "Unschedulable"),
        waiting("decode", "2026-11-21T07:00:01Z", "Unschedulable"),
        waiting("decode", "2026-11-21T07:00:00Z", "SchedulingGated"),
    ]
    seen = snapshot(KeySets(A), engines("r1", A, ready=0, wanted=3), pods=pods)
    (state,) = seen.revision_states(NOW)
    assert (state.unplaced, state.turned_away) == (Counts(2, 3), Counts(1, 1))


@pytest.mark.parametrize(
    ("since", "away"), [("2026-11-21T07:00:00Z", Counts(0, 2)), ("2026-11-21T07:00:01Z", NOTHING)]
)
def test_pods_that_a_full_quota_refuses_are_turned_away_though_they_do_not_exist(
    since: str, away: Counts
) -> None:
    prefill, decode = engines("r1", A, ready=1, wanted=3)
    decode["status"]["conditions"] = [
        {"type": "ReplicaFailure", "status": "True", "lastTransitionTime": since,
         "message": 'pods "x" is forbidden: exceeded quota: small, requested: pods=1'}
    ]  # fmt: skip
    pod = {
        "metadata": {"name": "d0", "labels": {ROLE_LABEL: "decode", REVISION_LABEL: "r1"}},
        "status": {"phase": "Running"},
    }
    (state,) = snapshot(KeySets(A), [prefill, decode], pods=[pod]).revision_states(NOW)
    assert (state.turned_away, state.unplaced) == (away, Counts(2, 2))


@pytest.mark.parametrize(
    "status", [{"currentRevision": "r1"}, {"transfer": {"verifiedRevision": "r1"}}]
)
def test_what_once_worked_is_believed_while_no_router_tells(status: Raw) -> None:
    (state,) = snapshot(KeySets(A), engines("r1", A), **status).revision_states(NOW)
    assert state.verified


def test_a_controller_that_lags_behind_makes_no_living_revision_a_dead_one() -> None:
    """As just after a pod of it was given up: it serves on."""
    prefill, decode = engines("r1", A, ready=2, wanted=1)
    for raw in (prefill, decode):
        raw["metadata"]["generation"] = 2
    (state,) = snapshot(KeySets(A), [prefill, decode]).revision_states(NOW)
    assert state.alive


# --- whose child it is ------------------------------------------------------------------------


def test_a_child_belongs_to_its_service_and_to_no_namesake_of_it() -> None:
    plain = {"kind": "ConfigMap", "metadata": {"name": "svc-x", "namespace": "ns"}}
    owned = with_owner(plain, service("u1"))
    assert belongs_to(owned, service("u1"))
    assert not belongs_to(owned, service("u2"))
    assert not belongs_to(plain, service("u1"))
    assert "ownerReferences" not in plain["metadata"]  # a copy was made


def test_somebody_who_merely_depends_on_it_does_not_control_it() -> None:
    owner = {"kind": "Other", "name": "x", "uid": "u1", "controller": False}
    child = {"metadata": {"name": "svc-x", "namespace": "ns", "ownerReferences": [owner]}}
    assert not belongs_to(child, service("u1"))
