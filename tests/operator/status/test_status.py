"""The status of a service: each clause of each condition, and that it rests when nothing moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from cases import each
from cluster_kit.status_cases import (
    BROKEN,
    FIXED,
    NEW,
    OLD,
    PODS,
    RESTED,
    ROUTERS,
    SLEEPER,
    SLEEPING,
    T0,
    T1,
    T2,
    WHOLE,
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
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_operator.api.images import published
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import Condition, EventNote, RolloutStatus, Status, TransferStatus
from diptych_operator.plan import Phase, Step, Trial
from diptych_operator.status.observed import DeploymentView, Observed, Problem
from diptych_operator.status.progress import Progress, deadline_missed, lacks_room, rollout_status
from diptych_operator.status.reasons import ConditionType, Reason
from diptych_operator.status.status import access, events_between
from diptych_protocol.admin import RefusedSetting

REFUSING = router(
    reason="policy",
    refused=[
        RefusedSetting(
            setting="policy", why="this router has no policy fulest_first, only least_loaded"
        )
    ],
)
TURNED = msgspec.structs.replace(engine("d0"), role="prefill", home="decode")
KEYLESS = Case(
    service=service(router='{"apiKeys": {"secretName": "clients"}}'),
    observed=given_pods(*PODS, routers=(msgspec.structs.replace(ROUTERS[0], admits_nobody=True),)),
)
CLAUSES: dict[str, tuple[Case, ConditionType, str, Reason, str]] = {
    "available": (
        Case(), ConditionType.AVAILABLE, "True", Reason.SERVING,
        f"A router and both pools of revision {NEW} are ready.",
    ),
    "available during a rollout, by the old revision": (
        Case(
            observed=given_pods(pod("prefill", 0, OLD), pod("decode", 0, OLD), failing("prefill"),
                                PODS[2], routers=(router(canary(OLD)),)),
            step=phase(Phase.Progressing, serving=(OLD, NEW)), previous=RESTED,
        ), ConditionType.AVAILABLE, "True", Reason.SERVING, OLD,
    ),
    "no prefill": (
        Case(observed=given_pods(failing("prefill"), *PODS[1:])),
        ConditionType.AVAILABLE, "False", Reason.PREFILL_NOT_READY,
        "No prefill pod is ready. 0 of 1 pods ready; 1 failing. prefill pod p0: keeps crashing "
        "(no model). ",
    ),
    "no decode": (
        Case(observed=given_pods(PODS[0], PODS[2])),
        ConditionType.AVAILABLE, "False", Reason.DECODE_NOT_READY, "Starting: 0 of 1 pods ready",
    ),
    "only leaving decode pods": (
        Case(observed=given_pods(PODS[0], pod("decode", terminating=True), PODS[2])),
        ConditionType.AVAILABLE, "False", Reason.DECODE_NOT_READY, "0 of 1 pods ready",
    ),
    "ready pods of a revision that does not serve": (
        Case(step=phase(Phase.Switching, serving=(OLD,))),
        ConditionType.AVAILABLE, "False", Reason.PREFILL_NOT_READY, "No prefill pod",
    ),
    "revisions that never pair": (
        Case(
            observed=given_pods(pod("prefill", 0, OLD), pod("decode"), PODS[2]),
            step=phase(Phase.Progressing, serving=(OLD, NEW)),
        ), ConditionType.AVAILABLE, "False", Reason.NO_MATCHING_PAIR, "different revisions",
    ),
    "nothing verified": (
        Case(observed=given_pods(*PODS, routers=(router(),))),
        ConditionType.AVAILABLE, "False", Reason.TRANSFER_NOT_VERIFIED, "has not come back yet",
    ),
    "nothing verified, and why": (
        Case(observed=given_pods(
            *PODS, routers=(router(canary(**BROKEN), engines=[engine("d0", verified=False)]),))),
        ConditionType.AVAILABLE, "False", Reason.TRANSFER_NOT_VERIFIED, "no route to 10.0.0.7",
    ),
    "nothing verified, and nobody asked for it": (
        Case(service=service("Warn"), observed=given_pods(*PODS, routers=(router(),))),
        ConditionType.AVAILABLE, "True", Reason.SERVING, "",
    ),
    "verified before, and no report now": (
        Case(observed=Observed(pods=PODS, unreachable_routers=1), previous=RESTED),
        ConditionType.AVAILABLE, "True", Reason.SERVING, "",
    ),
    "never verified, and no report": (
        Case(observed=Observed(pods=PODS, unreachable_routers=1)),
        ConditionType.AVAILABLE, "False", Reason.TRANSFER_NOT_VERIFIED, "no report",
    ),
    "no router": (
        Case(observed=given_pods(*PODS[:2])),
        ConditionType.AVAILABLE, "False", Reason.ROUTER_NOT_READY, "0 of 1 pods ready",
    ),
    "a router that says it is not ready": (
        Case(observed=given_pods(*PODS, routers=(router(canary(), reason="no decode engine"),))),
        ConditionType.AVAILABLE, "False", Reason.ROUTER_NOT_READY,
        "The router says: no decode engine.",
    ),
    "routers that have no such policy": (
        Case(observed=given_pods(*PODS, routers=(*ROUTERS, REFUSING))),
        ConditionType.DEGRADED, "True", Reason.ROUTER_SETTING_REFUSED,
        "spec.router.policy: this router has no policy fulest_first, only least_loaded. Correct",
    ),
    "the same keeps a service from its spec": (
        Case(observed=given_pods(*PODS, routers=(*ROUTERS, REFUSING))),
        ConditionType.STALLED, "True", Reason.ROUTER_SETTING_REFUSED, "spec.router.policy: ",
    ),
    "the same while former routers serve": (
        Case(observed=given_pods(*PODS, routers=(*ROUTERS, REFUSING))),
        ConditionType.AVAILABLE, "True", Reason.SERVING, "A router and both pools",
    ),
    "suspended": (
        Case(service=service(suspend=True), step=phase(Phase.Suspended)),
        ConditionType.AVAILABLE, "False", Reason.SUSPENDED, "spec.suspend",
    ),
    "asleep": (SLEEPING, ConditionType.AVAILABLE, "True", Reason.ASLEEP, "held up to 30 s"),
    "asleep without a router": (
        replace(SLEEPING, observed=Observed()),
        ConditionType.AVAILABLE, "False", Reason.PREFILL_NOT_READY, "",
    ),
    "waking": (
        replace(SLEEPING, desired=Counts(1, 1)),
        ConditionType.AVAILABLE, "True", Reason.WAKING, "routers hold requests",
    ),
    "cannot wake": (
        replace(SLEEPING, desired=Counts(1, 1), observed=given_pods(failing("decode"), PODS[2])),
        ConditionType.AVAILABLE, "False", Reason.PREFILL_NOT_READY, "",
    ),
    "first start of one that may sleep": (
        replace(SLEEPING, desired=Counts(1, 1), previous=Status()),
        ConditionType.AVAILABLE, "False", Reason.PREFILL_NOT_READY, "Starting",
    ),
    "idle": (Case(), ConditionType.PROGRESSING, "False", Reason.IDLE, "Nothing"),
    "first start": (
        Case(observed=Observed(), step=phase(Phase.Progressing, "prefill 0/1, decode 0/1")),
        ConditionType.PROGRESSING, "True", Reason.STARTING, "prefill 0/1, decode 0/1",
    ),
    "rolling out": (
        Case(previous=RESTED, step=phase(Phase.Progressing, "one by one")),
        ConditionType.PROGRESSING, "True", Reason.ROLLING_OUT, "one by one",
    ),
    "verifying": (
        Case(step=phase(Phase.Verifying)), ConditionType.PROGRESSING, "True", Reason.VERIFYING,
        "canary",
    ),
    "switching": (
        Case(step=phase(Phase.Switching)), ConditionType.PROGRESSING, "True", Reason.SWITCHING, "",
    ),
    "rollout suspended": (
        Case(service=service(suspend=True), step=phase(Phase.Suspended)),
        ConditionType.PROGRESSING, "False", Reason.SUSPENDED, "",
    ),
    "failed, as a pod crashes": (
        Case(observed=given_pods(failing("decode"), PODS[0], PODS[2]),
             step=phase(Phase.Failed, "No progress for 600 s.")),
        ConditionType.PROGRESSING, "False", Reason.ROLLOUT_FAILED,
        "No progress for 600 s. decode pod d0: keeps crashing (no model). ",
    ),
    "failed, as the hinge does": (
        Case(observed=given_pods(*PODS, routers=(
                router(canary(**BROKEN), engines=[engine("d0", verified=False)]),)),
             step=phase(Phase.Failed, "No progress for 600 s.")),
        ConditionType.PROGRESSING, "False", Reason.ROLLOUT_FAILED, "KV transfer from p0 to d0",
    ),
    "failed, as it just takes long": (
        Case(observed=given_pods(pod("prefill", ready=False), *PODS[1:]),
             step=phase(Phase.Failed)),
        ConditionType.PROGRESSING, "False", Reason.ROLLOUT_FAILED,
        "The rollout has stopped. prefill 0 of 1 pods ready; 1 loading the model, decode 1 of 1",
    ),
    "nothing wants attention": (
        Case(), ConditionType.DEGRADED, "False", Reason.AS_EXPECTED, "Nothing wants attention.",
    ),
    "two pods fail, the worse one first": (
        Case(observed=given_pods(
            *PODS, failing("prefill", 1),
            pod("decode", 1, ready=False, phase="Pending", waiting_reason="InvalidImageName"))),
        ConditionType.DEGRADED, "True", Reason.IMAGE_CANNOT_BE_PULLED, "prefill pod p1: keeps",
    ),
    "the API server refuses": (
        Case(observed=replace(WHOLE, problems=(Problem("PodTemplateRejected", "spec.x: no"),))),
        ConditionType.DEGRADED, "True", Reason.POD_TEMPLATE_REJECTED, "spec.x: no",
    ),
    "two problems, each a sentence": (
        Case(observed=replace(WHOLE, problems=(Problem("KeysLost", "ask: `a -b`"),
                                               Problem("ObjectNotOurs", "it is x's.")))),
        ConditionType.DEGRADED, "True", Reason.KEYS_LOST, "ask: `a -b`. it is x's.",
    ),
    "a Secret without an API key": (
        KEYLESS, ConditionType.DEGRADED, "True", Reason.CONTAINER_CONFIG_ERROR,
        'The Secret "clients" of spec.router.apiKeys has no entry that routers take as a key',
    ),
    "nobody is let in": (
        KEYLESS, ConditionType.AVAILABLE, "False", Reason.CONTAINER_CONFIG_ERROR,
        "so they refuse everybody. Add one: a line of visible ASCII.",
    ),
    "a certificate that routers cannot use": (
        Case(
            service=service(router='{"tls": {"secretName": "cert"}}'),
            observed=given_pods(
                *PODS, routers=(msgspec.structs.replace(ROUTERS[0], refused_certificate="other"),)
            ),
        ), ConditionType.DEGRADED, "True", Reason.CONTAINER_CONFIG_ERROR,
        'Routers cannot use the Secret "cert" of spec.router.tls (other). They keep the former',
    ),
    "an API key that is none": (
        Case(
            service=service(router='{"apiKeys": {"secretName": "clients"}}'),
            observed=given_pods(
                *PODS, routers=(msgspec.structs.replace(ROUTERS[0], left_out_keys=["bob is out"]),)
            ),
        ), ConditionType.DEGRADED, "True", Reason.CONTAINER_CONFIG_ERROR,
        'In the Secret "clients" of spec.router.apiKeys, bob is out. Correct or remove',
    ),
    "a certificate that has ended": (
        Case(
            service=service(router='{"tls": {"secretName": "cert"}}'),
            observed=given_pods(
                *PODS, routers=(msgspec.structs.replace(ROUTERS[0], expired_certificate="noon"),)
            ),
        ), ConditionType.DEGRADED, "True", Reason.CONTAINER_CONFIG_ERROR,
        'The certificate of the Secret "cert" of spec.router.tls ended at noon, and clients',
    ),
    "a problem of no known name": (
        Case(observed=replace(WHOLE, problems=(Problem("Odd", "very"),))),
        ConditionType.DEGRADED, "True", Reason.OPERATOR_PROBLEM, "Odd: very",
    ),
    "a failed rollout": (
        Case(step=phase(Phase.Failed, "No progress for 600 s.")),
        ConditionType.DEGRADED, "True", Reason.ROLLOUT_FAILED, "No progress for 600 s.",
    ),
    "a canary that fails": (
        Case(observed=given_pods(*PODS, routers=(
            router(canary(), canary(decode="d1", **BROKEN),
                   engines=[engine("p0"), engine("d0"), engine("d1", verified=False)]),))),
        ConditionType.DEGRADED, "True", Reason.TRANSFER_FAILED,
        "KV transfer from p0 to d1 failed: no route to 10.0.0.7:5558. "
        "Check spec.transfer.transport, and that pods",
    ),
    "a canary that failed, and then another went through": (
        Case(observed=given_pods(*PODS, routers=(
            router(canary(prefill="p1", **BROKEN), canary()),))),
        ConditionType.DEGRADED, "False", Reason.AS_EXPECTED, "",
    ),
    "a router that gives no report": (
        Case(observed=Observed(pods=PODS, unreachable_routers=1), previous=RESTED),
        ConditionType.DEGRADED, "True", Reason.ROUTER_UNREACHABLE, "1 ready router pod gives no",
    ),
    "a router that starts gives no report yet": (
        Case(observed=Observed(pods=(*PODS[:2], pod("router", ready=False)),
                               unreachable_routers=1), previous=RESTED),
        ConditionType.DEGRADED, "False", Reason.AS_EXPECTED, "",
    ),
    "prefill is there": (
        Case(), ConditionType.PREFILL_READY, "True", Reason.PODS_READY, "1 ready, 1 wanted.",
    ),
    "an engine has the other role": (
        Case(observed=Observed(pods=PODS, routers=(router(canary(), engines=[TURNED]),))),
        ConditionType.DECODE_READY, "True", Reason.PODS_READY,
        "1 ready, 1 wanted; 1 took the other pool's role.",
    ),
    "decode starts": (
        Case(observed=given_pods(*PODS, pod("decode", 1, ready=False)), desired=Counts(1, 2)),
        ConditionType.DECODE_READY, "False", Reason.STARTING,
        "Starting: 1 of 2 pods ready; 1 loading the model.",
    ),
    "decode fails": (
        Case(observed=given_pods(*PODS, failing("decode", 1)), desired=Counts(1, 2)),
        ConditionType.DECODE_READY, "False", Reason.CONTAINER_CRASHING,
        "1 of 2 pods ready; 1 failing. decode pod d1: keeps crashing (no model). ",
    ),
    "no pods wanted": (SLEEPING, ConditionType.DECODE_READY, "True", Reason.ASLEEP, ""),
    "no pods while suspended": (
        Case(service=service(suspend=True)),
        ConditionType.PREFILL_READY, "False", Reason.SUSPENDED, "",
    ),
    "router is there": (Case(), ConditionType.ROUTER_READY, "True", Reason.PODS_READY, "1 ready"),
    "router starts": (
        Case(observed=given_pods(pod("router", ready=False), routers=())),
        ConditionType.ROUTER_READY, "False", Reason.STARTING,
        "Starting: 0 of 1 pods ready; 1 waiting for engines.",
    ),
    "router waits": (
        Case(observed=given_pods(pod("router", ready=False),
                                 routers=(router(reason="the decode pool is empty"),))),
        ConditionType.ROUTER_READY, "False", Reason.ROUTER_NOT_READY,
        "The router says: the decode pool is empty.",
    ),
    "router fails": (
        Case(observed=given_pods(failing("router"), routers=())),
        ConditionType.ROUTER_READY, "False", Reason.CONTAINER_CRASHING, "router pod r0: keeps",
    ),
    "verified": (
        Case(), ConditionType.KV_TRANSFER_VERIFIED, "True", Reason.TRANSFER_VERIFIED,
        "16 blocks, 1.2 MB in 4.0 ms over tcp from p0 to d0; decode computed 0 of 33 prompt "
        "tokens.",
    ),
    "verified by the newest": (
        Case(observed=given_pods(*PODS, routers=(
            router(canary(at=2e9, blocks=7)), router(canary(at=1e9, blocks=5))))),
        ConditionType.KV_TRANSFER_VERIFIED, "True", Reason.TRANSFER_VERIFIED, "7 blocks",
    ),
    "not verified": (
        Case(observed=given_pods(*PODS, routers=(
            router(canary(**BROKEN), engines=[engine("d0", verified=False)]),))),
        ConditionType.KV_TRANSFER_VERIFIED, "False", Reason.TRANSFER_FAILED, "no route",
    ),
    "the new revision has not been tried, the old one works": (
        Case(
            observed=given_pods(*PODS, routers=(router(canary(OLD)),)),
            previous=msgspec.structs.replace(RESTED, current_revision=OLD),
        ), ConditionType.KV_TRANSFER_VERIFIED, "True", Reason.TRANSFER_VERIFIED, "16 blocks",
    ),
    "waiting for the canary": (
        Case(observed=given_pods(*PODS, routers=(router(),))),
        ConditionType.KV_TRANSFER_VERIFIED, "Unknown", Reason.VERIFYING, "",
    ),
    "waiting for engines": (
        Case(observed=given_pods(PODS[0], PODS[2], routers=(router(),))),
        ConditionType.KV_TRANSFER_VERIFIED, "Unknown", Reason.WAITING_FOR_ENGINES, "",
    ),
    "nobody tells": (
        Case(observed=Observed(pods=PODS, unreachable_routers=1)),
        ConditionType.KV_TRANSFER_VERIFIED, "Unknown", Reason.ROUTER_UNREACHABLE, "",
    ),
    "nobody tells, and it was verified": (
        Case(observed=Observed(pods=PODS, unreachable_routers=1), previous=RESTED),
        ConditionType.KV_TRANSFER_VERIFIED, "True", Reason.TRANSFER_VERIFIED, "16 blocks",
    ),
    "asleep, and it was verified": (
        SLEEPING, ConditionType.KV_TRANSFER_VERIFIED, "True", Reason.TRANSFER_VERIFIED, "16 blocks",
    ),
    "verification is off": (
        Case(service=service("Off")),
        ConditionType.KV_TRANSFER_VERIFIED, "Unknown", Reason.VERIFICATION_OFF, "verify is Off",
    ),
}  # fmt: skip


@each(("case", "kind", "status", "reason", "words"), CLAUSES.values(), ids=CLAUSES.keys())
def test_each_clause_of_each_condition(
    case: Case, kind: ConditionType, status: str, reason: Reason, words: str
) -> None:
    found = case.says(kind)
    assert found[:2] == (status, reason)
    assert words in found[2]


def test_a_spec_that_cannot_be_read_leaves_everything_else_unknown() -> None:
    """The pods of the last good spec may well serve; nobody has looked."""
    broken = Problem("SpecInvalid", "spec.engine.blockSize: must be a power of two")
    case = Case(
        observed=Observed(problems=(broken,)), previous=RESTED, target="cccccccc",
        step=Step({}, (), Phase.Failed, broken.message, ()),
    )  # fmt: skip
    status = case.at()
    told = {c.type: (c.status, c.reason) for c in status.conditions}
    assert told.pop("Degraded") == told.pop("Stalled") == ("True", "SpecInvalid")
    assert told.pop("Ready") == ("False", "SpecInvalid")
    assert told.pop("Reconciling") == ("False", "Idle")
    assert set(told.values()) == {("Unknown", "SpecInvalid")}
    assert msgspec.structs.replace(status, conditions=RESTED.conditions) == RESTED
    assert kinds(events_between(RESTED, status)) == [("Warning", "SpecInvalid")]


@pytest.mark.parametrize(
    ("engine_api", "policy", "said"),
    [
        ("None", "Managed", ""), ("None", "None", ""), ("OwnPods", "Managed", ""),
        ("OwnPods", "None", "; engines open to the cluster, without a policy"),
    ],
)  # fmt: skip
def test_access_says_who_passes_the_routers_by(
    engine_api: Literal["None", "OwnPods"], policy: Literal["None", "Managed"], said: str
) -> None:
    asked = service()
    network = msgspec.structs.replace(asked.spec.network, engine_api=engine_api, policy=policy)
    spec = msgspec.structs.replace(asked.spec, network=network)
    assert (
        access(msgspec.structs.replace(asked, spec=spec))
        == f"open to whoever reaches it, no TLS{said}"
    )


def test_the_fields_around_the_conditions() -> None:
    pods = (*PODS, pod("prefill", 1, OLD), pod("prefill", 2, OLD, terminating=True, ready=False),
            pod("router", 1, ready=False))  # fmt: skip
    deployment = DeploymentView("svc-router", "router", "", 2, 1, 2, True)
    observed = Observed((deployment,), pods, ROUTERS)
    status = Case(observed=observed, desired=Counts(1, 1)).at()
    assert status.observed_generation == 7
    assert status.url == "http://svc-router.ns.svc:8000/v1"
    assert status.access == "open to whoever reaches it, no TLS"
    pools = [
        (p.summary, p.desired, p.ready, p.updated, p.draining)
        for p in (status.prefill, status.decode, status.router)
    ]
    assert pools == [("2/1", 1, 2, 1, 1), ("1/1", 1, 1, 1, 0), ("1/1", 1, 1, 1, 0)]
    assert status.transfer == TransferStatus(
        verified_revision=NEW, verified_at="2001-09-09T01:46:40Z", verified_engines=2, blocks=16,
        bytes=1_200_000, milliseconds=4.04, transport="tcp",
    )  # fmt: skip


ON_TRIAL = replace(
    phase(Phase.Switching, serving=(OLD, NEW)), trial=Trial(NEW, weight=10, since=T1)
)


def test_a_canary_is_given_as_long_as_its_steps_last() -> None:
    seen = Progress(NEW, Counts(1, 0), verified=False, old=2, draining=1)
    assert deadline_missed(rollout(STUCK), service(), seen, T2)
    begun = rollout_status(ON_TRIAL, seen, rollout(STUCK), T2)
    assert begun.canary == {"revision": NEW, "weight": "10", "since": T1}
    assert begun.last_progress_at == T2, "a step is progress"
    assert not deadline_missed(begun, service(), seen, "2026-11-23T07:00:00Z")
    assert rollout_status(phase(Phase.Idle), seen, begun, T2).canary == {}


def test_the_current_revision_is_the_last_that_served_at_full_size() -> None:
    old = msgspec.structs.replace(RESTED, current_revision=OLD)
    base = Case(previous=old)
    assert base.at().current_revision == NEW
    kept = [
        replace(base, desired=Counts(1, 2)),
        replace(base, step=phase(Phase.Switching, serving=(OLD,))),
        replace(base, step=ON_TRIAL),
        replace(base, step=phase(Phase.Verifying, serving=(NEW, OLD))),
        replace(base, observed=given_pods(*PODS, routers=(router(canary(OLD)),))),
        replace(base, desired=NOTHING),
    ]
    assert [case.at().current_revision for case in kept] == [OLD] * len(kept)
    assert base.at().update_revision == NEW
    unverified = replace(base, service=service("Off"), observed=given_pods(*PODS, routers=()))
    assert unverified.at().current_revision == NEW


def test_a_canary_from_outside_any_calendar_has_no_date() -> None:
    observed = given_pods(*PODS, routers=(router(canary(at=1e300)),))
    assert Case(observed=observed).at().transfer.verified_at == ""


def test_times_move_only_when_a_condition_flips() -> None:
    broken = replace(Case(previous=RESTED), observed=given_pods(failing("prefill"), *PODS[1:]))
    status = broken.at(T1)
    moved = {c.type for c in status.conditions if c.last_transition_time == T1}
    assert moved == {"Available", "Degraded", "PrefillReady", "Ready", "Reconciling"}
    other = replace(broken, observed=given_pods(failing("prefill", words="x"), *PODS[1:]),
                    previous=status).at(T2)  # fmt: skip
    assert "(x)" in other.conditions[0].message
    assert [c.last_transition_time for c in other.conditions] == [
        c.last_transition_time for c in status.conditions
    ]


def test_the_status_says_which_images_the_spec_stands_for() -> None:
    images = Case().at().images
    assert (images.engine, images.router) == (published("engine"), published("router"))


def test_why_an_image_cannot_be_pulled_is_remembered() -> None:
    """The kubelet says it in one of two states that take turns; the status must not."""

    def stuck(reason: str, message: str) -> Observed:
        return given_pods(*PODS[:1], PODS[2], pod(
            "decode", ready=False, phase="Pending", waiting_reason=reason, image="e:1",
            waiting_message=message))  # fmt: skip

    told = Case(observed=stuck("ErrImagePull", "no such host"), previous=RESTED).at(T1)
    silent = Case(observed=stuck("ImagePullBackOff", ""), previous=told).at(T2)
    assert '"e:1" (no such host). Check' in told.conditions[4].message
    assert silent == told


def test_a_message_names_as_many_findings_as_fit() -> None:
    problems = tuple(Problem("Odd", f"{number} " + "x" * 500) for number in range(5))
    degraded = Case(observed=replace(WHOLE, problems=problems)).at().conditions[2]
    assert len(degraded.message) <= 1024
    assert degraded.message.endswith(" 4 more; see the pods.")


# --- rollouts and their deadline --------------------------------------------------------------


ROLLING = phase(Phase.Progressing, "one by one", (OLD, NEW))
HALF = given_pods(
    pod("prefill"), pod("prefill", 0, OLD), pod("decode", 0, OLD), PODS[2],
    routers=(router(canary(OLD), canary(NEW)),),
)  # fmt: skip
BEFORE = msgspec.structs.replace(
    RESTED, current_revision=OLD, update_revision=OLD,
    rollout=RolloutStatus(phase="Idle", last_progress_at=T0, progress=""),
)  # fmt: skip


def test_a_rollout_counts_its_progress() -> None:
    begun = Case(observed=HALF, step=ROLLING, previous=BEFORE).at(T1)
    assert begun.rollout == RolloutStatus(
        phase="Progressing", message="one by one", last_progress_at=T1,
        progress=f"{NEW} prefill=1 decode=0 verified=1 old=2 draining=0",
    )  # fmt: skip
    still = Case(observed=HALF, step=ROLLING, previous=begun)
    assert still.at(T2) == begun
    further = replace(still, observed=replace(HALF, pods=(*HALF.pods, pod("decode"))))
    assert further.at(T2).rollout.last_progress_at == T2
    fewer_old = replace(still, observed=replace(HALF, pods=(HALF.pods[0], *HALF.pods[2:])))
    assert fewer_old.at(T2).rollout.last_progress_at == T2


def test_a_pod_that_comes_and_goes_is_progress_only_once() -> None:
    begun = Case(observed=HALF, step=ROLLING, previous=BEFORE).at(T1)
    gone = replace(HALF, pods=HALF.pods[1:])
    without = Case(observed=gone, step=ROLLING, previous=begun).at(T2)
    again = Case(observed=HALF, step=ROLLING, previous=without).at(T2)
    assert [s.rollout.last_progress_at for s in (without, again)] == [T1, T1]


def test_at_rest_nothing_is_counted_and_a_new_rollout_counts_anew() -> None:
    begun = Case(observed=HALF, step=ROLLING, previous=BEFORE).at(T1)
    rested = Case(previous=begun).at(T2)
    assert (rested.rollout.phase, rested.rollout.last_progress_at) == ("Idle", T1)
    resumed = Case(observed=HALF, step=ROLLING, previous=rested).at(T2)
    assert resumed.rollout.last_progress_at == T2


def rollout(progress: str, name: str = "Progressing", at: str = T0) -> RolloutStatus:
    return RolloutStatus(phase=name, last_progress_at=at, progress=progress)


STUCK = f"{NEW} prefill=1 decode=0 verified=0 old=2 draining=0"


@each(
    ("status", "now", "missed"),
    [
        (rollout(STUCK), "2026-11-21T07:10:00Z", False),
        (rollout(STUCK), "2026-11-21T07:10:01Z", True),
        (rollout(STUCK, "Failed"), T2, True),
        (rollout(STUCK, "Verifying"), T2, True),
        (rollout(STUCK, "Idle"), T2, False),
        (rollout(STUCK, "Suspended"), T2, False),
        (rollout(STUCK.replace(NEW, OLD)), T2, False),
        (rollout(STUCK.replace("draining=0", "draining=1")), "2026-11-21T07:10:59Z", False),
        (rollout(STUCK.replace("draining=0", "draining=1")), "2026-11-21T07:11:01Z", True),
        (rollout("nonsense"), T2, False),
        (rollout(STUCK, at="yesterday"), T2, False),
        (rollout(STUCK, at="2026-11-21T07:00:00"), T2, False),
        (RolloutStatus(), T2, False),
    ],
)  # fmt: skip
def test_the_deadline(status: RolloutStatus, now: str, missed: bool) -> None:
    seen = Progress(NEW, Counts(1, 0), verified=False, old=2, draining=1)
    assert deadline_missed(status, full("ReplaceInPlace"), seen, now) is missed


def test_what_came_closer_while_no_operator_looked_missed_no_deadline() -> None:
    seen = Progress(NEW, Counts(1, 1), verified=False, old=2, draining=0)
    assert not deadline_missed(rollout(STUCK), service(), seen, T2)


WAITING = f"{STUCK} waiting=1"


def full(when_full: str, *, changed: bool = False) -> InferenceService:
    """A service whose spec may have changed since its status was written."""
    made = service()
    rollout = msgspec.structs.replace(made.spec.rollout, when_full=when_full)
    return msgspec.structs.replace(
        made,
        spec=msgspec.structs.replace(made.spec, rollout=rollout),
        status=Status(observed_generation=made.metadata.generation - changed),
    )


@each(
    ("when_full", "status", "waiting", "now", "missed"),
    [
        ("ReplaceInPlace", rollout(WAITING), 1, T1, False),
        ("ReplaceInPlace", rollout(WAITING), 1, T2, True),
        ("ReplaceInPlace", rollout(WAITING), 0, T2, False),  # it has found a node just now
        ("ReplaceInPlace", rollout(WAITING, "Failed"), 0, T2, True),  # it was given up
        ("Wait", rollout(WAITING), 1, T2, False),
        ("Wait", rollout(STUCK), 0, T2, True),
        ("Wait", rollout(WAITING, "Failed"), 0, T2, False),
        ("Fail", rollout(STUCK), 1, T0, True),
        ("Fail", rollout(WAITING, "Failed"), 0, T0, True),
    ],
)
def test_whether_pods_that_find_no_node_fail_a_rollout(
    when_full: str, status: RolloutStatus, waiting: int, now: str, missed: bool
) -> None:
    seen = Progress(NEW, Counts(1, 0), verified=False, old=2, draining=1, waiting=waiting)
    assert deadline_missed(status, full(when_full), seen, now) is missed


def test_a_changed_spec_tries_again_for_a_whole_deadline_though_the_revision_is_the_same() -> None:
    seen = Progress(NEW, Counts(0, 0), verified=False, old=2, draining=0)
    failed, spec = rollout(STUCK, "Failed"), full("ReplaceInPlace", changed=True)
    assert not deadline_missed(failed, spec, seen, T2)
    begun = rollout_status(phase(Phase.Progressing), seen, failed, T2)
    assert (begun.last_progress_at, begun.progress) == (T2, seen.text())
    assert not deadline_missed(begun, full("ReplaceInPlace"), seen, T2)


@pytest.mark.parametrize("when_full", ["ReplaceInPlace", "Wait", "Fail"])
def test_a_changed_spec_tries_again_for_the_places_that_were_lacking(when_full: str) -> None:
    gone = Progress(NEW, Counts(1, 0), verified=False, old=2, draining=1)
    failed = rollout(WAITING, "Failed")
    assert not deadline_missed(failed, full(when_full, changed=True), gone, T2)
    begun = rollout_status(phase(Phase.Progressing), gone, failed, T2)
    assert begun.last_progress_at == T2


def test_that_pods_found_no_node_is_remembered_as_long_as_the_failure_lasts() -> None:
    gone = Progress(NEW, Counts(1, 0), verified=False, old=2, draining=1)
    failed = rollout_status(phase(Phase.Failed), gone, rollout(WAITING), T1)
    assert (failed.progress, failed.last_progress_at) == (
        WAITING.replace("draining=0", "draining=1"), T0,
    )  # fmt: skip
    assert lacks_room(failed, gone)
    assert not lacks_room(rollout(WAITING), gone)


# --- events -----------------------------------------------------------------------------------


def kinds(notes: list[EventNote]) -> list[tuple[str, str]]:
    return [(note.type, note.reason) for note in notes]


def test_a_first_start_is_told_from_its_first_step_to_its_end() -> None:
    started = Case(observed=Observed(), step=phase(Phase.Progressing)).at(T0)
    assert kinds(events_between(Status(), started)) == [("Normal", "RolloutStarted")]
    served = Case(previous=started).at(T1)
    assert kinds(events_between(started, served)) == [
        ("Normal", "Serving"), ("Normal", "TransferVerified"), ("Normal", "RolloutFinished"),
    ]  # fmt: skip
    assert events_between(served, Case(previous=served).at(T2)) == []


def test_a_loss_and_its_end_are_told() -> None:
    lost = Case(observed=given_pods(failing("decode"), PODS[0], PODS[2]), previous=RESTED).at(T1)
    assert kinds(events_between(RESTED, lost)) == [
        ("Warning", "DecodeNotReady"), ("Warning", "ContainerCrashing"),
    ]  # fmt: skip
    assert kinds(events_between(lost, Case(previous=lost).at(T2))) == [
        ("Normal", "Serving"), ("Normal", "Recovered"),
    ]  # fmt: skip


def test_a_rollout_that_fails_is_told_once() -> None:
    begun = Case(observed=HALF, step=ROLLING, previous=BEFORE).at(T1)
    assert kinds(events_between(BEFORE, begun)) == [("Normal", "RolloutStarted")]
    failed = Case(observed=HALF, step=phase(Phase.Failed, "No progress.", (OLD, NEW)),
                  previous=begun).at(T2)  # fmt: skip
    assert kinds(events_between(begun, failed)) == [("Warning", "RolloutFailed")]
    assert events_between(failed, failed) == []


def test_a_canary_that_fails_is_told_with_what_its_requests_showed_and_no_other_remedy() -> None:
    said = f"{NEW} failed as a canary: 3 of 9 requests failed (analysis.errors); change the spec"
    step = replace(phase(Phase.Failed, said, (OLD,)), trial=Trial(NEW, failed="3 of 9"))
    failed = Case(observed=HALF, step=step, previous=BEFORE).at(T1)
    assert [c.message for c in failed.conditions if c.type == "Progressing"] == [said]


def test_a_broken_hinge_is_told_and_a_suspension_is_no_warning() -> None:
    broken = router(canary(**BROKEN), engines=[engine("d0", verified=False)])
    lost = Case(observed=given_pods(*PODS, routers=(broken,)), previous=RESTED).at(T1)
    assert kinds(events_between(RESTED, lost)) == [
        ("Warning", "TransferNotVerified"), ("Warning", "TransferFailed"),
    ]  # fmt: skip
    halted = Case(service=service(suspend=True), observed=Observed(), previous=RESTED,
                  step=phase(Phase.Suspended)).at(T1)  # fmt: skip
    assert kinds(events_between(RESTED, halted)) == [("Normal", "Suspended")]


# --- properties -------------------------------------------------------------------------------


ROLE = st.sampled_from(["prefill", "decode", "router"])
REVISION = st.sampled_from([OLD, NEW])
WORDS = st.sampled_from(["", "no such host", "x" * 2000, 'secret "s" not found', "a). b (c"])
POD = st.builds(
    lambda role, number, revision, rest: pod(role, number, revision, **rest),
    ROLE, st.integers(0, 2), REVISION,
    st.fixed_dictionaries(
        {"ready": st.booleans(), "terminating": st.booleans()},
        optional={
            "phase": st.sampled_from(["Pending", "Running", "Failed"]),
            "unschedulable": WORDS,
            "waiting_reason": st.sampled_from(
                ["", "ImagePullBackOff", "ErrImagePull", "CrashLoopBackOff", "PodInitializing"]
            ),
            "waiting_message": WORDS,
            "last_exit": WORDS,
            "last_exit_reason": st.sampled_from(["", "Error", "OOMKilled", "StartError"]),
        },
    ),
)  # fmt: skip
CANARY = st.builds(
    lambda revision, at, ok, error: canary(revision, at, ok=ok, error=error),
    REVISION, st.sampled_from([1e9, 2e9, 1e300]), st.booleans(), WORDS,
)  # fmt: skip
ROUTER = st.builds(
    lambda canaries, trusted, words: router(
        *canaries, engines=[engine("p0"), engine("d0", verified=trusted)], reason=words
    ),
    st.lists(CANARY, max_size=3), st.booleans(), WORDS,
)  # fmt: skip
DEPLOYMENT = st.builds(
    lambda role, words: DeploymentView(
        f"svc-{role}", role, "" if role == "router" else NEW, 1, 1, 1, True, words
    ),
    ROLE, WORDS,
)  # fmt: skip
OBSERVED = st.builds(
    Observed,
    st.lists(DEPLOYMENT, max_size=2).map(tuple),
    st.lists(POD, max_size=7).map(tuple),
    st.lists(ROUTER, max_size=2).map(tuple),
    st.integers(0, 2),
    st.lists(
        st.builds(Problem, st.sampled_from(["Odd", "PodTemplateRejected"]), WORDS), max_size=1
    ).map(tuple),
)
COUNTS = st.sampled_from([NOTHING, Counts(1, 1), Counts(2, 1)])
STEP = st.builds(
    lambda serving, name, message: Step({}, serving, name, message, ()),
    st.sampled_from([(), (OLD,), (NEW,), (OLD, NEW)]), st.sampled_from(list(Phase)), WORDS,
)  # fmt: skip
SERVICES = st.sampled_from(
    [service(v, p, s) for v in ("Required", "Off") for p in (FIXED, SLEEPER) for s in (True, False)]
)
CASE = st.builds(Case, SERVICES, OBSERVED, STEP, st.just(Status()), REVISION, COUNTS)


@settings(max_examples=150)
@given(st.lists(CASE, min_size=1, max_size=3))
def test_whatever_is_seen_the_status_is_whole_and_rests(cases: list[Case]) -> None:
    """Each case follows the one before, as passes do; then time goes on and nothing else."""
    status = Status()
    for case, now in zip(cases, (T0, T1, T2), strict=False):
        before, status = status, replace(case, previous=status).at(now)
        assert [c.type for c in status.conditions] == list(ConditionType)
        for condition in status.conditions:
            assert condition.reason in list(Reason)
            assert 0 < len(condition.message) <= 1024
            assert "\n" not in condition.message
        for note in events_between(before, status):
            assert note.reason in list(Reason)
            assert 0 < len(note.message) <= 1024
        later = replace(case, previous=status).at("2026-11-22T00:00:00Z")
        assert msgspec.json.encode(later) == msgspec.json.encode(status)
        assert events_between(status, later) == []


def test_conditions_of_another_operator_are_read_and_replaced() -> None:
    foreign = Condition(type="Odd", status="True", reason="?", message="?", last_transition_time="")
    status = Case(previous=msgspec.structs.replace(RESTED, conditions=[foreign])).at()
    assert [c.type for c in status.conditions] == list(ConditionType)


# --- the reference ----------------------------------------------------------------------------


ROOT = Path(__file__).parents[3]


def test_every_reason_is_given_by_somebody() -> None:
    sources = (ROOT / "operator/diptych_operator").rglob("*.py")
    code = "".join(path.read_text() for path in sources if path.name != "reasons.py")
    unused = [r for r in Reason if f"Reason.{r.name}" not in code and f'"{r}"' not in code]
    assert unused == []


def test_an_engine_that_changed_its_role_counts_for_the_pool_of_its_pod() -> None:
    turned = msgspec.structs.replace(engine("d0"), role="prefill", home="decode")
    seen = replace(WHOLE, routers=(router(engines=[engine("p0"), turned]),))
    assert seen.trusted(NEW) == Counts(1, 1)
