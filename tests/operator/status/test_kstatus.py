"""What kstatus, by which kubectl, Helm 4 and Flux wait, makes of a service."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from cases import each
from cluster_kit.status_cases import (
    BROKEN,
    NEW,
    OLD,
    PODS,
    RESTED,
    SLEEPING,
    Case,
    canary,
    engine,
    failing,
    given_pods,
    phase,
    pod,
    router,
    service,
)

from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.status import Status
from diptych_operator.plan import Phase, Step
from diptych_operator.status.observed import DeploymentView, Observed, Problem


def kstatus(status: Status, generation: int) -> str:
    """The rules of kstatus for a kind that it does not know by name.

    The status of another generation is in progress. Then the first condition counts that is
    Reconciling or Stalled and true; then Ready, whatever is not true; an object that has none of
    them is current.
    """
    if status.observed_generation != generation:
        return "InProgress"
    for condition in status.conditions:
        if condition.status == "True" and condition.type in ("Reconciling", "Stalled"):
            return "InProgress" if condition.type == "Reconciling" else "Failed"
    ready = next((c.status for c in status.conditions if c.type == "Ready"), "True")
    return "Current" if ready == "True" else "InProgress"


def blocked(reason: str) -> Case:
    """The operator could not even look."""
    problem = Problem(reason, "what is wrong, and what to do")
    step = Step({}, (), Phase.Failed, problem.message, ())
    return Case(observed=Observed(problems=(problem,)), step=step, previous=RESTED)


def with_problem(reason: str) -> Case:
    """All pods are well, and yet something is wrong."""
    found = Observed(pods=PODS, routers=Case().observed.routers)
    return Case(observed=replace(found, problems=(Problem(reason, "mend it"),)))


def in_deployment(role: str, revision: str, *, settled: bool) -> Case:
    view = DeploymentView(f"svc-{role}", role, revision, 1, 1, 0, settled)
    return Case(observed=replace(Case().observed, deployments=(view,)))


SUSPENDED = Case(
    service=service(suspend=True), step=phase(Phase.Suspended), desired=NOTHING,
    observed=given_pods(routers=()),
)  # fmt: skip
TABLE: dict[str, tuple[Case, str]] = {
    "at rest": (Case(), "Current"),
    "asleep": (SLEEPING, "Current"),
    "suspended": (SUSPENDED, "Current"),
    "suspended, and pods are ending": (
        replace(SUSPENDED, observed=given_pods(pod("decode", terminating=True), routers=())),
        "InProgress",
    ),
    "first start": (
        Case(observed=given_pods(routers=()), step=phase(Phase.Progressing)), "InProgress",
    ),
    "a rollout beside what serves": (
        Case(previous=msgspec.structs.replace(RESTED, current_revision=OLD),
             step=phase(Phase.Progressing)),
        "InProgress",
    ),
    "the canary has not come back": (
        Case(observed=given_pods(*PODS, routers=(router(),)), step=phase(Phase.Verifying)),
        "InProgress",
    ),
    "no canary crosses": (
        Case(observed=given_pods(*PODS, routers=(
            router(canary(**BROKEN), engines=[engine("d0", verified=False)]),))),
        "InProgress",
    ),
    "a pod crashes": (Case(observed=given_pods(failing("prefill"), *PODS[1:])), "InProgress"),
    "a pool grows": (Case(desired=Counts(1, 2), previous=RESTED), "InProgress"),
    "routers are replaced": (in_deployment("router", "", settled=False), "InProgress"),
    "routers are there": (in_deployment("router", "", settled=True), "Current"),
    "a changed podTemplate replaces pods": (
        in_deployment("decode", NEW, settled=False), "InProgress",
    ),
    "an older revision's Deployment": (in_deployment("decode", OLD, settled=False), "Current"),
    "a Deployment was changed in this very pass": (
        Case(observed=replace(Case().observed, lags=True)), "InProgress",
    ),
    "no router is ready": (Case(observed=given_pods(*PODS[:2])), "InProgress"),
    "the deadline has passed": (
        Case(observed=given_pods(failing("decode"), PODS[0], PODS[2]), step=phase(Phase.Failed)),
        "Failed",
    ),
    **{
        reason: (case(reason), "Failed")
        for reason, case in {
            "SpecInvalid": blocked, "ObjectNotOurs": blocked, "KeysLost": with_problem,
            "PodTemplateRejected": with_problem, "PoolScalerUnavailable": with_problem,
            "GatewayUnavailable": with_problem,
        }.items()
    },
    "the API server fails": (blocked("OperatorProblem"), "InProgress"),
}  # fmt: skip


@each(("case", "read_as"), TABLE.values(), ids=TABLE.keys())
def test_kstatus_reads_a_service(case: Case, read_as: str) -> None:
    status = case.at()
    told = {c.type: c for c in status.conditions}
    assert kstatus(status, case.service.metadata.generation) == read_as
    # And `kubectl wait` reads each condition by itself.
    true = {kind for kind in ("Ready", "Reconciling", "Stalled") if told[kind].status == "True"}
    assert true == {{"Current": "Ready", "InProgress": "Reconciling", "Failed": "Stalled"}[read_as]}
    assert all(told[kind].message for kind in true)
    assert told["Ready"].observed_generation == case.service.metadata.generation


def test_a_spec_that_nobody_has_read_is_in_progress() -> None:
    assert kstatus(Status(), 1) == "InProgress"
    assert kstatus(RESTED, RESTED.observed_generation + 1) == "InProgress"
    assert RESTED.update_revision == NEW
