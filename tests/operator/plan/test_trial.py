"""Canaries: the steps of a trial by themselves, and with pods and routers around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from cases import each
from cluster_kit.reconciling import KEY, Store, one_pass, operating
from cluster_kit.rollout_sequence import running
from hypothesis import given
from hypothesis import strategies as st

from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Analysis, Canary, CanaryStep, Rollout
from diptych_operator.plan import Evidence, Phase, Step, Trial, plan
from diptych_operator.plan.trial import TrialMemory, advance
from diptych_protocol.admin import RouterReport, TrialReport

STEPS = (10, 50)


def canary_of(*weights: int) -> Canary:
    return Canary(steps=[CanaryStep(weight=weight, pause_seconds=60) for weight in weights])


CANARY = canary_of(*STEPS)
SIZE = Counts(2, 2)
NOON, LATER = "2026-01-01T12:00:00Z", "2026-01-01T12:05:00Z"
GOOD = {"requests": 100, "ended": 100, "handed_over": 100}


def seen(trial: Trial, **counts: int) -> list[TrialReport | None]:
    return [TrialReport(revision=trial.revision, weight=trial.weight, **counts)]


@each(
    ("analysis", "counts", "why"),
    [
        (Analysis(), {"requests": 100, "failed": 2}, ""),
        (Analysis(), {"requests": 100, "failed": 3}, "3 of 100 requests failed (analysis.errors)"),
        (Analysis(), {"requests": 300, "failed": 3}, ""),
        (Analysis(errors=0.1), {"requests": 100, "failed": 10}, ""),
        (Analysis(), {"requests": 100, "late": 100, "ended": 100, "slow": 100}, ""),
        (Analysis(attainment=0.9), {"requests": 100, "late": 11},
         "11 of 100 first tokens missed slo.ttftMs"),
        (Analysis(attainment=0.9), {"requests": 100, "ended": 50, "slow": 6},
         "6 of 50 answers missed slo.interTokenMs"),
        (Analysis(handed_over=0.8), {"requests": 100, "ended": 50, "handed_over": 39},
         "11 of 50 prompts were not handed over (analysis.handedOver)"),
        (Analysis(handed_over=0.8), {"requests": 100, "ended": 50, "handed_over": 40}, ""),
    ],
)  # fmt: skip
def test_a_canary_fails_by_what_its_requests_show(
    analysis: Analysis, counts: dict[str, int], why: str
) -> None:
    canary = Canary(steps=CANARY.steps, analysis=analysis)
    trial = Trial("b", weight=10, since=NOON)
    after = advance(canary, trial, Evidence(reports=seen(trial, **counts)), "")
    assert (after.failed, after.weight) == (why, 0 if why else 10)


@pytest.mark.parametrize(
    ("evidence", "step"),
    [
        ({"held_s": 60.0, "reports": GOOD}, 1),
        ({"held_s": 59.0, "reports": GOOD}, 0),
        ({"held_s": 600.0, "reports": {"requests": 19}}, 0),
        ({"held_s": 600.0, "reports": {"requests": 25, "open": 6}}, 0),
    ],
    ids=["over", "it lasts", "too few requests", "their answers go on"],
)
def test_a_step_ends_when_it_has_lasted_and_enough_is_known(
    evidence: dict[str, object], step: int
) -> None:
    trial = Trial("b", weight=10, since=NOON)
    counts: dict[str, int] = evidence["reports"]  # type: ignore[assignment]
    held_s: float = evidence["held_s"]  # type: ignore[assignment]
    after = advance(CANARY, trial, Evidence(held_s=held_s, reports=seen(trial, **counts)), "")
    assert (after.step, after.weight) == (step, STEPS[step])


def test_a_step_does_not_end_while_a_router_tells_nothing_of_it() -> None:
    trial = Trial("b", weight=10, since=NOON)
    for reports, step in (([*seen(trial, **GOOD), None], 0), (seen(trial, **GOOD) * 2, 1)):
        assert advance(CANARY, trial, Evidence(held_s=600, reports=reports), "").step == step


def test_kv_that_does_not_arrive_fails_it_and_so_does_the_loss_of_a_pool() -> None:
    trial = Trial("b", weight=10, since=NOON)
    assert advance(CANARY, trial, Evidence(untrusted=["no KV"]), "").failed == "no KV"
    assert advance(CANARY, trial, Evidence(), "lost").failed == "lost"


def test_a_step_begins_when_every_router_follows() -> None:
    trial = advance(CANARY, Trial("b"), Evidence(now=NOON), "")
    assert trial == Trial("b", weight=10)
    (told,) = seen(trial)
    for reports, since in (((), ""), ((told, None), ""), ((told, told), NOON)):
        assert advance(CANARY, trial, Evidence(now=NOON, reports=reports), "").since == since


def test_what_a_router_saw_still_counts_after_it_restarted_or_fell_silent() -> None:
    trial, memory = Trial("b", weight=10, since=NOON), TrialMemory()

    def told(**counts: int) -> TrialReport:
        return TrialReport(revision="b", weight=10, **counts)

    first, other = told(requests=30, failed=2, open=4, ended=24), told(requests=9)
    over = told(requests=26, failed=2, ended=24)
    assert memory.earlier(trial, {"a": first, "z": other}) == []
    assert memory.earlier(trial, {"a": None, "z": other}) == [over]
    assert memory.earlier(trial, {"a": first, "z": other}) == [], "it was only silent"
    assert memory.earlier(trial, {"a": told(requests=1), "z": other}) == [over], "it restarted"
    assert memory.earlier(trial, {"z": other}) == [over, told(requests=1)], "it is gone"
    again = {"z": told(requests=2), "y": None}
    assert memory.earlier(trial, again) == [over, other, told(requests=1)]
    assert memory.earlier(replace_step(trial), again) == [], "another step counts for itself"


def replace_step(trial: Trial) -> Trial:
    return msgspec.structs.replace(trial, step=trial.step + 1, weight=50)


@pytest.mark.parametrize(
    ("earlier", "now", "after"),
    [
        ({"requests": 90, "failed": 2}, {"requests": 20, "failed": 2}, ("failed", 0)),
        ({"requests": 900}, {"requests": 20, "failed": 3}, ("", 1)),
        ({"requests": 19}, {"requests": 1}, ("", 1)),
        ({"requests": 19}, {}, ("", 0)),
    ],
    ids=["bad ones", "good ones", "enough", "too few"],
)
def test_a_restart_of_a_router_neither_helps_nor_harms_a_canary(
    earlier: dict[str, int], now: dict[str, int], after: tuple[str, int]
) -> None:
    trial = Trial("b", weight=10, since=NOON)
    (before,) = (report for report in seen(trial, **earlier) if report)
    evidence = Evidence(held_s=60, reports=seen(trial, **now), earlier=[before])
    found = advance(CANARY, trial, evidence, "")
    assert ("failed" if found.failed else "", found.step) == after


async def test_an_operator_remembers_what_a_router_saw_before_it_restarted() -> None:
    store = Store()
    canary = {"steps": [{"weight": 10, "pauseSeconds": 3600}]}
    store.spec = {"transfer": {"verify": "Off"}, "rollout": {"type": "Canary", "canary": canary}}
    report = RouterReport(
        ready=True, reason="", open_requests=0, held_requests=0, serving_revisions=[],
        engines=[], canaries=[],
    )  # fmt: skip
    store.reports = [report]
    for _ in range(2):
        await one_pass(store)
        store.settle()
    store.spec |= {"engine": {"blockSize": 32}}
    bad = iter([{"requests": 100, "failed": 2}, {"requests": 50, "failed": 2}])
    async with operating(store) as reconciler:
        for _ in range(10):
            await reconciler.reconcile(KEY)
            store.settle()
            path = next(p for p in store.objects if p.endswith("configmaps/svc-serving"))
            told = msgspec.json.decode(store.objects[path]["data"]["serving.json"])
            counts = next(bad, {}) if told.get("canary") else {}
            trial = TrialReport(revision=told.get("canary", ""), weight=10, **counts)
            store.reports = [
                msgspec.structs.replace(report, serving_revisions=told["revisions"], trial=trial)
            ]
    assert "4 of 150 requests failed" in store.service(KEY)["status"]["rollout"]["message"]


trials = st.builds(
    Trial, st.just("b"), st.integers(0, 3), st.integers(0, 100), st.sampled_from(["", NOON]),
    st.sampled_from(["", "3 of 9 requests failed"]),
)  # fmt: skip


@given(trial=trials)
def test_the_status_keeps_all_of_a_trial(trial: Trial) -> None:
    assert Trial.read(trial.text()) == trial
    assert Trial.read({}) is None
    for part in ({"step": "many"}, {"step": "-9"}, {"weight": "101"}):
        assert Trial.read(trial.text() | part) is None, "nobody wrote this but a person"


class Fleet:
    """Two routers, pods that are ready at once, and an operator that forgets everything else."""

    def __init__(self) -> None:
        self.rollout = Rollout(type="Canary", canary=CANARY)
        self.target, self.size = "b", SIZE
        self.states = {"a": running("a", SIZE)}
        self.status: dict[str, str] = {}
        self.stable = "a"
        self.told: list[tuple[tuple[str, ...], Trial | None]] = [(("a",), None)] * 2
        self.again = self.suspend = False

    def weights(self) -> list[int]:
        """Percent of new requests that go to `b`, by each router."""
        return [
            100 if serving == ("b",) else 0 if trial is None or "b" not in serving else trial.weight
            for serving, trial in self.told
        ]

    def step(
        self, counts: dict[str, int], *, held_s: float = 60.0, follow: Sequence[int] = (0, 1)
    ) -> Step:
        before = Trial.read(self.status)
        reports = [
            TrialReport(revision=trial.revision, weight=trial.weight, **counts) if trial else None
            for _, trial in self.told
        ]
        step = plan(
            self.target, self.size, self.rollout, list(self.states.values()),
            verify=True, failed=False,
            routers_serving=[serving for serving, _ in self.told], suspend=self.suspend,
            evidence=Evidence(self.stable, before, LATER, held_s, reports, again=self.again),
        )  # fmt: skip
        self.status = step.trial.text() if step.trial else {}
        self.again = False
        on_trial = step.trial if len(step.serving) > 1 else None
        for router in follow:
            self.told[router] = step.serving, on_trial
        self.states = {
            name: replace(running(name, counts), verified=name == self.stable or bool(counts))
            for name, counts in step.replicas.items()
            if name not in step.removable
        }
        if step.serving == (self.target,) and step.replicas[self.target]:
            self.stable = self.target
        return step


def test_a_good_canary_gets_more_and_more_and_at_last_all() -> None:
    fleet = Fleet()
    weights: list[int] = []
    for _ in range(20):
        step = fleet.step(GOOD)
        weights += [w for w in fleet.weights()[:1] if w not in weights[-1:]]
    assert weights == [0, 10, 50, 100]
    assert (step.phase, set(fleet.states), fleet.status) == (Phase.Idle, {"b"}, {})


def test_a_pause_is_held() -> None:
    fleet = Fleet()
    for _ in range(20):
        step = fleet.step(GOOD, held_s=59.0)
    assert fleet.weights() == [10, 10]
    assert step.message == (f"b gets 10 % of new requests (step 1 of 2), for 60 s from {LATER} on")
    assert step.replicas == {"a": SIZE, "b": SIZE}


@given(st.data())
def test_whatever_happens_weights_only_grow_until_a_failure_which_ends_with_none(
    data: st.DataObject,
) -> None:
    fleet = Fleet()
    given, failed = [0], False
    for _ in range(data.draw(st.integers(1, 25))):
        counts = data.draw(st.sampled_from([GOOD, {}, {"requests": 50, "failed": 25}]))
        held_s = data.draw(st.sampled_from([0.0, 60.0]))
        step = fleet.step(
            counts, held_s=held_s, follow=data.draw(st.sampled_from([(), (0,), (1,), (0, 1)]))
        )
        trial = step.trial
        if failed:
            assert (step.serving, step.phase) == (("a",), Phase.Failed)
        failed = trial is not None and bool(trial.failed)
        if trial is not None and not failed:
            given.append(trial.weight)
        assert step.replicas.get("a", SIZE) == SIZE, "the old one can take all back"
    assert given == sorted(given)
    if failed:
        for _ in range(2):
            step = fleet.step(GOOD)
        assert fleet.weights() == [0, 0]
        assert step.replicas == {"a": SIZE, "b": Counts(1, 1)}
        assert "b failed as a canary: " in step.message


def test_a_canary_that_failed_is_tried_again_when_the_spec_changes() -> None:
    fleet = Fleet()
    while not fleet.status:
        fleet.step({})
    fleet.step({"requests": 9, "failed": 9})
    fleet.step({})
    assert fleet.status["failed"]
    fleet.again = True
    for _ in range(12):
        step = fleet.step(GOOD)
    assert (step.phase, set(fleet.states)) == (Phase.Idle, {"b"})


@pytest.mark.parametrize("left", [(5,), (50,), (20, 30)])
def test_fewer_steps_than_it_has_passed_are_no_proof(left: tuple[int, ...]) -> None:
    """It goes on with the last one that is left, and is judged by what it shows there."""
    fleet = Fleet()
    fleet.rollout = Rollout(type="Canary", canary=canary_of(1, 2, 50, 80))
    while fleet.weights() != [50, 50]:
        fleet.step(GOOD)
    fleet.rollout = Rollout(type="Canary", canary=canary_of(*left))
    step = fleet.step({})
    assert step.serving == ("a", "b")
    assert f"b gets {left[-1]} % of new requests (step {len(left)} of {len(left)})" in step.message
    fleet.step({})
    assert fleet.step({"requests": 9, "failed": 9}).phase is Phase.Failed


def test_the_way_back_needs_no_trial() -> None:
    fleet = Fleet()
    while fleet.weights() != [50, 50]:
        fleet.step(GOOD)
    fleet.target = "a"
    step = fleet.step({})
    assert (step.serving, step.replicas) == (("a",), {"a": SIZE, "b": SIZE})
    for _ in range(2):
        step = fleet.step({})
    assert (step.phase, set(fleet.states)) == (Phase.Idle, {"a"})


def test_a_newer_change_begins_its_own_trial_beside_the_revision_that_served() -> None:
    fleet = Fleet()
    while fleet.weights() != [50, 50]:
        fleet.step(GOOD)
    fleet.target = "c"
    step = fleet.step(GOOD)
    assert step.serving == ("a",)
    assert step.replicas["b"] == SIZE, "until no router sends anything there"
    step = fleet.step(GOOD)
    assert "b" not in step.replicas or not step.replicas["b"]
    while fleet.target not in step.serving:
        step = fleet.step(GOOD)
    assert (step.serving, step.trial) == (("a", "c"), Trial("c", weight=10))


@pytest.mark.parametrize("failed", [False, True])
def test_a_suspended_canary_comes_back_beside_the_revision_that_served(failed: bool) -> None:
    """And from its first step on, however long there were no pods."""
    fleet = Fleet()
    while fleet.weights() != [50, 50]:
        fleet.step(GOOD)
    if failed:
        fleet.step({"requests": 9, "failed": 9})
    fleet.suspend = fleet.again = True
    for _ in range(4):
        step = fleet.step({})
    assert (step.phase, step.removable, any(map(bool, step.replicas.values()))) == (
        Phase.Suspended, (), False,
    )  # fmt: skip
    fleet.suspend, fleet.again = False, True
    step = fleet.step({})
    assert (step.serving, step.replicas) == (("a",), {"a": SIZE, "b": Counts(0, 0)})
    is_tried_and_taken(fleet)


def is_tried_and_taken(fleet: Fleet) -> None:
    """The target gets one weight after the other, and is left alone in the end."""
    weights: list[int] = []
    for _ in range(20):
        step = fleet.step(GOOD)
        weights += [w for w in fleet.weights()[:1] if w not in weights[-1:]]
    assert weights == [0, 10, 50, 100]
    assert (step.phase, set(fleet.states)) == (Phase.Idle, {"b"})


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_spec_that_changes_while_there_are_no_pods_is_tried_beside_what_served(
    sleeps: bool,
) -> None:
    fleet = Fleet()
    fleet.target, fleet.suspend, fleet.size = "a", not sleeps, NOTHING if sleeps else SIZE
    fleet.step({})
    fleet.target = "c"
    fleet.step({})
    fleet.target = "b"
    for _ in range(2):
        step = fleet.step({})
    assert (step.removable, any(map(bool, step.replicas.values()))) == ((), False)
    assert step.serving == ("a",) or not sleeps, "routers know it before the first request"
    fleet.suspend, fleet.size = False, SIZE
    step = fleet.step({})
    assert (step.serving, step.replicas) == (("a",), {"a": SIZE, "b": NOTHING})
    is_tried_and_taken(fleet)


def test_only_a_canary_keeps_what_served_before_without_pods() -> None:
    fleet = Fleet()
    while fleet.weights() != [10, 10]:
        fleet.step(GOOD)
    fleet.suspend = True
    for _ in range(3):
        fleet.step({})
    fleet.target = "c"
    assert fleet.step({}).removable == ("b",)
    fleet.rollout = Rollout()
    assert fleet.step({}).removable == ("a",)


def test_a_canary_that_passed_stays_alone_though_it_lacks_a_pod() -> None:
    """What it replaced has no pods any more, and is not yet forgotten."""
    fleet = Fleet()
    while set(fleet.states) != {"b"} and fleet.stable == "a":
        fleet.step(GOOD)
    fleet.stable, fleet.status = "a", {}
    fleet.states["a"] = running("a", NOTHING)
    fleet.states["b"] = replace(fleet.states["b"], ready=Counts(1, 2))
    step = fleet.step({})
    assert (step.serving, step.replicas) == (("b",), {"a": NOTHING, "b": SIZE})


def test_a_canary_that_only_waits_for_requests_says_so() -> None:
    """An upgrade of other services need not wait for what may never come."""
    fleet = Fleet()
    told = []
    for counts, held_s in (({}, 59.0), ({}, 60.0), (GOOD, 60.0)):
        while "since" not in fleet.status:
            fleet.step({})
        told.append(fleet.step(counts, held_s=held_s).unjudged)
    assert told == [False, True, False]


def test_a_canary_that_loses_a_pool_fails() -> None:
    fleet = Fleet()
    while fleet.weights() != [10, 10]:
        fleet.step({})
    fleet.states["b"] = replace(fleet.states["b"], ready=Counts(0, 2))
    step = fleet.step({})
    assert (step.serving, step.phase) == (("a",), Phase.Failed)
