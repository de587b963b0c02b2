"""Computes the conditions of a service: one function for each, from one situation, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from diptych_operator.api.names import ROLES
from diptych_operator.api.pools import PoolName
from diptych_operator.api.status import MAX_MESSAGE, TransferStatus
from diptych_operator.plan import Phase
from diptych_operator.status.canaries import failures, figures
from diptych_operator.status.diagnose import progress_text, shorten
from diptych_operator.status.observed import Observed
from diptych_operator.status.reasons import ConditionType, Reason
from diptych_operator.status.situation import Situation, Verdict

MAX_PART = 600
"""Characters of each item that a message lists."""


def verified(observed: Observed, revision: str, known: TransferStatus) -> bool:
    """Whether a canary received KV in this revision, or `known` while no router reports."""
    if observed.routers:
        return observed.verified(revision)
    return bool(revision) and known.verified_revision == revision


def judge(seen: Situation) -> dict[ConditionType, Verdict]:
    """Return all conditions, in their order."""
    if seen.blind:
        problem = seen.observed.problems[0]
        unknown = Verdict("Unknown", Reason.named(problem.reason), "Not known; see Degraded.")
        verdicts = dict.fromkeys(ConditionType, unknown)
    else:
        verdicts = {
            ConditionType.AVAILABLE: _available(seen),
            ConditionType.PROGRESSING: _progressing(seen),
            ConditionType.PREFILL_READY: _pods(seen, "prefill"),
            ConditionType.DECODE_READY: _pods(seen, "decode"),
            ConditionType.ROUTER_READY: _pods(seen, "router"),
            ConditionType.KV_TRANSFER_VERIFIED: _transfer(seen),
        }
    verdicts[ConditionType.DEGRADED] = _degraded(seen)
    verdicts |= readiness(seen, verdicts)
    return {condition: verdicts[condition] for condition in ConditionType}


# --- are requests answered? -------------------------------------------------------------------


def _available(seen: Situation) -> Verdict:
    if seen.service.spec.suspend:
        return Verdict("False", Reason.SUSPENDED, "spec.suspend is true: requests are refused.")
    pairs = [name for name in seen.serving if seen.pair_ready(name)]
    trusted = [
        name
        for name in pairs
        if seen.service.verification != "Required" or verified(seen.observed, name, seen.transfer)
    ]
    if not trusted and _sleeps(seen):
        return _asleep(seen)
    for role, reason in _POOL_REASONS.items():
        if not pairs and role in seen.service.pools and not seen.ready(role, seen.serving):
            return Verdict("False", reason, f"No {role} pod is ready. {_state(seen, role)}")
    if not pairs:
        message = "Ready prefill and decode pods are of different revisions, which never pair."
        return Verdict("False", Reason.NO_MATCHING_PAIR, message)
    if not trusted:
        message = "Pods are ready, but no canary has crossed between prefill and decode yet. "
        message += _transfer(seen).message
        return Verdict("False", Reason.TRANSFER_NOT_VERIFIED, message)
    if not _router_answers(seen):
        message = f"No router is ready. {_state(seen, 'router')}"
        return Verdict("False", Reason.ROUTER_NOT_READY, message)
    if seen.keyless and all(report.admits_nobody for report in seen.observed.routers):
        return Verdict("False", Reason.CONTAINER_CONFIG_ERROR, seen.keyless)
    pools = "both pools" if len(seen.observed.pools(trusted[0])) == 2 else "the pool"
    message = f"A router and {pools} of revision {trusted[0]} are ready."
    return Verdict("True", Reason.SERVING, message)


_POOL_REASONS: Mapping[PoolName, Reason] = {
    "prefill": Reason.PREFILL_NOT_READY,
    "decode": Reason.DECODE_NOT_READY,
}


def _router_answers(seen: Situation) -> bool:
    """By the kubelet's word, unless every router tells otherwise of itself."""
    reports = seen.observed.routers
    all_told = bool(reports) and not seen.observed.unreachable_routers
    refused = all_told and not any(report.ready for report in reports)
    return seen.ready("router") > 0 and not refused


def _sleeps(seen: Situation) -> bool:
    """Scaled to zero or on the way back, as intended: routers hold what arrives."""
    failing = (
        seen.step.phase is Phase.Failed
        or seen.findings["prefill"]
        or seen.findings["decode"]
        or failures(seen.observed, seen.serving)
    )
    has_served = bool(seen.current)
    return seen.service.sleeps_when_idle and has_served and _router_answers(seen) and not failing


def _asleep(seen: Situation) -> Verdict:
    hold = seen.service.spec.router.hold_seconds
    if seen.desired:
        return Verdict(
            "True", Reason.WAKING, f"Pods start; routers hold requests up to {hold:g} s."
        )
    message = f"Scaled to zero; the next request wakes pods and is held up to {hold:g} s."
    return Verdict("True", Reason.ASLEEP, message)


# --- are the pods there? ----------------------------------------------------------------------


def _pods(seen: Situation, role: str) -> Verdict:
    of_routers = role == "router"
    ready, wanted = seen.ready(role, None if of_routers else seen.serving), seen.wanted(role)
    if resting := _resting(seen, role):
        return resting
    if ready >= wanted:
        turned = seen.observed.turned(role)
        now = f"; {turned} took the other pool's role" if turned else ""
        return Verdict("True", Reason.PODS_READY, f"{ready} ready, {wanted} wanted{now}.")
    says = of_routers and _router_words(seen)
    reason = Reason.ROUTER_NOT_READY if says else Reason.STARTING
    if findings := seen.findings[role]:
        reason = findings[0].reason
    return Verdict("False", reason, _state(seen, role))


def _resting(seen: Situation, role: str) -> Verdict | None:
    if seen.service.spec.suspend:
        return Verdict("False", Reason.SUSPENDED, "spec.suspend is true: no pods are wanted.")
    if role == "prefill" and role not in seen.service.pools:
        return Verdict("True", Reason.ONE_POOL, Reason.ONE_POOL.meaning)
    if seen.wanted(role) == 0:
        return Verdict("True", Reason.ASLEEP, "No pods are wanted while the service sleeps.")
    return None


def _state(seen: Situation, role: str) -> str:
    """How far a role's pods have come, and the worst that keeps them."""
    revisions = None if role == "router" else seen.serving
    text = f"{progress_text(seen.observed, role, seen.wanted(role), revisions)}."
    if findings := seen.findings[role]:
        return f"{text} {findings[0].message}"
    words = _router_words(seen) if role == "router" else ""
    return f"Starting: {text}{f' The router says: {words}.' if words else ''}"


def _router_words(seen: Situation) -> str:
    """Why a router calls itself not ready."""
    words = sorted(
        {report.reason for report in seen.observed.routers if not report.ready and report.reason}
    )
    return shorten("; ".join(words), MAX_PART).rstrip(".")


# --- is it changing? --------------------------------------------------------------------------


_PHASE_REASONS = {
    Phase.Idle: Reason.IDLE,
    Phase.Suspended: Reason.SUSPENDED,
    Phase.Failed: Reason.ROLLOUT_FAILED,
    Phase.Verifying: Reason.VERIFYING,
    Phase.Switching: Reason.SWITCHING,
}


def _progressing(seen: Situation) -> Verdict:
    step = seen.step
    under_way = Reason.ROLLING_OUT if seen.current else Reason.STARTING
    reason = _PHASE_REASONS.get(step.phase, under_way)
    message = step.message or reason.meaning
    if reason is Reason.ROLLOUT_FAILED:
        return Verdict("False", reason, _failure(seen))
    resting = reason in (Reason.IDLE, Reason.SUSPENDED)
    return Verdict("False" if resting else "True", reason, message)


def _failure(seen: Situation) -> str:
    """Why the newest revision came no further."""
    causes = [findings[0] for role in ROLES if (findings := seen.findings[role])]
    if causes:
        cause = max(causes, key=lambda finding: finding.severity).message
    elif seen.step.trial is not None:
        return seen.step.message  # what its requests showed; its pods may be well
    elif failed := failures(seen.observed, (seen.target,)):
        cause = failed[0]
    else:
        states = [
            f"{role} {progress_text(seen.observed, role, seen.wanted(role), (seen.target,))}"
            for role in seen.service.pools
        ]
        cause = f"{', '.join(states)}. {Reason.ROLLOUT_FAILED.remedy}"
    return f"{seen.step.message.rstrip('. ') or 'The rollout has stopped'}. {cause}"


# --- does the hinge work? ---------------------------------------------------------------------


def _transfer(seen: Situation) -> Verdict:
    """The verdict on the newest revision whose KV transfer could be tried. While none can be tried,
    an earlier success is kept."""
    if "prefill" not in seen.service.pools:
        return Verdict("Unknown", Reason.ONE_POOL, Reason.ONE_POOL.meaning)
    if seen.service.verification == "Off":
        return Verdict("Unknown", Reason.VERIFICATION_OFF, "transfer.verify is Off.")
    if good := seen.observed.newest_canary(seen.target):
        return Verdict("True", Reason.TRANSFER_VERIFIED, figures(good))
    if failed := failures(seen.observed, (seen.target,)):
        return Verdict("False", Reason.TRANSFER_FAILED, failed[0])
    if good := seen.observed.newest_canary(seen.current):
        return Verdict("True", Reason.TRANSFER_VERIFIED, figures(good))
    pair_ready = any(seen.pair_ready(name) for name in {seen.target, seen.current})
    if not (seen.observed.routers and pair_ready) and (kept := _kept_transfer(seen)):
        return kept
    if not pair_ready:
        reason = Reason.WAITING_FOR_ENGINES
    elif unreachable_routers(seen) and not seen.observed.routers:
        reason = Reason.ROUTER_UNREACHABLE
    else:
        reason = Reason.VERIFYING
    return Verdict("Unknown", reason, reason.meaning)


def _kept_transfer(seen: Situation) -> Verdict | None:
    if seen.transfer.verified_revision not in {seen.target, seen.current} - {""}:
        return None
    before = seen.previous.condition(ConditionType.KV_TRANSFER_VERIFIED)
    if before is None or before.status != "True":
        return None
    return Verdict("True", Reason.TRANSFER_VERIFIED, before.message)


# --- does anything want attention? ------------------------------------------------------------


def _degraded(seen: Situation) -> Verdict:
    issues = list(_issues(seen))
    if issues:
        return Verdict("True", issues[0][0], join([text for _, text in issues]))
    return Verdict("False", Reason.AS_EXPECTED, "Nothing wants attention.")


def _issues(seen: Situation) -> Iterable[tuple[Reason, str]]:
    """The worst first: what stops the operator, then what stops pods, then the hinge."""
    for problem in seen.observed.problems:
        reason = Reason.named(problem.reason)
        name = "" if reason == problem.reason else f"{problem.reason}: "
        text = shorten(f"{name}{problem.message}".rstrip("."), MAX_PART) or reason.meaning
        yield reason, f"{text.rstrip('.')}."
    findings = [finding for role in ROLES for finding in seen.findings[role]]
    for finding in sorted(findings, key=lambda finding: -finding.severity):
        yield finding.reason, finding.message
    if seen.blind:
        return
    if seen.step.phase is Phase.Failed:
        text = _failure(seen) if not findings else seen.step.message
        yield Reason.ROLLOUT_FAILED, shorten(text or Reason.ROLLOUT_FAILED.meaning, MAX_PART)
    if seen.service.verification != "Off":
        for failure in failures(seen.observed, {*seen.serving, seen.target}):
            yield Reason.TRANSFER_FAILED, failure
    for text in seen.refused_settings:
        yield Reason.ROUTER_SETTING_REFUSED, text
    for text in seen.unusable_secrets:
        yield Reason.CONTAINER_CONFIG_ERROR, text
    if (count := unreachable_routers(seen)) and not seen.observed.routers:
        reason = Reason.ROUTER_UNREACHABLE
        text = f"{count} ready router pods give no report. {reason.remedy}"
        yield reason, text.replace("1 ready router pods give", "1 ready router pod gives")


def unreachable_routers(seen: Situation) -> int:
    """Return ready routers that gave no report. Starting ones need not answer yet."""
    return min(seen.observed.unreachable_routers, seen.ready("router"))


def join(parts: Sequence[str]) -> str:
    """Join as many whole parts as fit into a message, and say how many more there are."""
    text = ""
    for index, part in enumerate(parts):
        more = f" {len(parts) - index} more; see the pods." if index else ""
        if len(text) + 1 + len(part) > MAX_MESSAGE - 40:
            return f"{text}{more}" if text else shorten(part, MAX_MESSAGE)
        text = f"{text} {part}".strip()
    return text


Verdicts = Mapping[ConditionType, Verdict]

_WANTS_SOMEBODY = frozenset(
    {
        *(Reason.SPEC_INVALID, Reason.POD_TEMPLATE_REJECTED, Reason.OBJECT_NOT_OURS),
        *(Reason.KEYS_LOST, Reason.POOL_SCALER_UNAVAILABLE, Reason.GATEWAY_UNAVAILABLE),
        Reason.SET_UNAVAILABLE,
    }
)
"""Problems that stay until somebody changes an object. Pods that fail are none of them: what they
lack may come with the next object that is applied, and the rollout has a deadline."""


def readiness(seen: Situation, judged: Verdicts) -> dict[ConditionType, Verdict]:
    """Compute the three conditions that tools wait for from all others.

    kstatus (`kubectl wait`, `helm --wait`, Flux, Argo CD) calls an object failed while Stalled is
    True, in progress while Reconciling is True or Ready is not, and current otherwise. So
    Reconciling and Stalled are never True together, and Ready is True when neither is.
    """
    stall = _stall(seen, judged)
    work = None if stall else _work(seen, judged)
    well = judged[ConditionType.AVAILABLE]
    still = Verdict("False", Reason.IDLE, Reason.IDLE.meaning)
    ready = Verdict("True", well.reason, well.message)
    if keeps := stall or work:
        ready = Verdict("False", keeps.reason, keeps.message)
    return {
        ConditionType.READY: ready,
        ConditionType.RECONCILING: work or still,
        ConditionType.STALLED: stall or still,
    }


def _stall(seen: Situation, judged: Verdicts) -> Verdict | None:
    """What keeps the service from its spec until somebody changes something."""
    for problem in seen.observed.problems:
        if (reason := Reason.named(problem.reason)) in _WANTS_SOMEBODY:
            return Verdict("True", reason, problem.message or reason.meaning)
    progress = judged[ConditionType.PROGRESSING]
    if progress.reason is Reason.ROLLOUT_FAILED:
        return Verdict("True", progress.reason, progress.message)
    if refused := seen.refused_settings:
        return Verdict("True", Reason.ROUTER_SETTING_REFUSED, refused[0])
    return None


def _work(seen: Situation, judged: Verdicts) -> Verdict | None:
    """What is on its way, or has to come back, until everything is as the spec asks."""
    if seen.blind:
        reason = Reason.named(seen.observed.problems[0].reason)
        return Verdict("True", reason, f"The operator tries again. {reason.remedy}")
    progress = judged[ConditionType.PROGRESSING]
    if progress.status == "True":
        return Verdict("True", progress.reason, progress.message)
    if seen.service.spec.suspend:
        left = sum(not pod.gone for pod in seen.observed.pods)
        return Verdict("True", Reason.SUSPENDED, f"{left} pods are ending.") if left else None
    for condition in _PARTS:
        if judged[condition].status != "True":
            return Verdict("True", judged[condition].reason, judged[condition].message)
    views = seen.observed.deployments
    kept = any(not view.settled for view in views if view.revision in ("", seen.target))
    if seen.observed.lags or kept:
        return Verdict("True", Reason.ROLLING_OUT, "Kubernetes replaces pods.")
    return None


_PARTS = (
    *(ConditionType.AVAILABLE, ConditionType.PREFILL_READY, ConditionType.DECODE_READY),
    ConditionType.ROUTER_READY,
)
