"""The conditions that tools wait for: Ready, Reconciling and Stalled, as kstatus reads them.

kstatus (`kubectl wait`, `helm --wait`, Flux, Argo CD) calls an object failed while Stalled is True,
in progress while Reconciling is True or Ready is not, and current otherwise. So Reconciling and
Stalled are never True together, and Ready is True when neither is.
"""

from __future__ import annotations

from collections.abc import Mapping

from diptych_operator.status.reasons import ConditionType, Reason
from diptych_operator.status.situation import Situation, Verdict

Verdicts = Mapping[ConditionType, Verdict]

_WANTS_SOMEBODY = frozenset(
    {
        *(Reason.SPEC_INVALID, Reason.POD_TEMPLATE_REJECTED, Reason.OBJECT_NOT_OURS),
        *(Reason.KEYS_LOST, Reason.POOL_SCALER_UNAVAILABLE),
    }
)
"""Problems that stay until somebody changes an object. Pods that fail are none of them: what they
lack may come with the next object that is applied, and the rollout has a deadline."""


def readiness(seen: Situation, judged: Verdicts) -> dict[ConditionType, Verdict]:
    """Compute the three conditions from all others."""
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
    routers = seen.observed.deployment("router")
    if seen.observed.lags or (routers is not None and not routers.settled):
        return Verdict("True", Reason.ROLLING_OUT, "Kubernetes replaces pods.")
    return None


_PARTS = (
    *(ConditionType.AVAILABLE, ConditionType.PREFILL_READY, ConditionType.DECODE_READY),
    ConditionType.ROUTER_READY,
)
