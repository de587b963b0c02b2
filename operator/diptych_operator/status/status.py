"""Builds the status of a service from what is wanted, planned and observed. It performs no I/O.

At rest a pass builds exactly the status that the pass before built, whatever the time, so that
nothing is written. A time changes only with the field that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import msgspec

from diptych_operator.api.names import HTTP_PORT, POOLS, ROLES, object_name
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import (
    MAX_MESSAGE,
    Condition,
    EventNote,
    ImagesStatus,
    PoolStatus,
    Status,
    TransferStatus,
)
from diptych_operator.plan import Phase, Step
from diptych_operator.plan.state import sum_of
from diptych_operator.status.canaries import transfer_status
from diptych_operator.status.conditions import judge, verified
from diptych_operator.status.diagnose import Finding, diagnose, shorten
from diptych_operator.status.observed import Observed
from diptych_operator.status.progress import AT_REST, Progress, rollout_status
from diptych_operator.status.reasons import ConditionType, Reason
from diptych_operator.status.situation import Situation, Verdict, ready_pods


def build_status(
    service: InferenceService,
    observed: Observed,
    step: Step,
    previous: Status,
    *,
    target: str,
    desired: Counts,
    now: str,
) -> Status:
    """Build the whole status.

    `target` is the revision that the spec asks for, `desired` the engine pods that are wanted now,
    and `now` an RFC 3339 time. Passing the result back as `previous` gives an equal status.
    """
    current = _current_revision(service, observed, step, previous, target, desired)
    seen = Situation(
        service=service,
        observed=observed,
        step=step,
        previous=previous,
        target=target,
        desired=desired,
        current=current,
        transfer=transfer_status(observed, previous.transfer, current, target),
        findings=_findings(observed, previous.conditions),
    )
    conditions = _conditions(seen, now)
    generation = service.metadata.generation
    if seen.blind:  # what is told of pods and revisions is all that is known
        return msgspec.structs.replace(
            previous, observed_generation=generation, conditions=conditions
        )
    return Status(
        observed_generation=generation,
        url=_url(service),
        access=access(service),
        current_revision=current,
        update_revision=target,
        images=ImagesStatus(engine=service.spec.engine.image, router=service.spec.router.image),
        prefill=_pool(seen, "prefill"),
        decode=_pool(seen, "decode"),
        router=_pool(seen, "router"),
        prefetched=observed.prefetched,
        transfer=seen.transfer,
        rollout=rollout_status(
            step, count(observed, target, seen.transfer, now), previous.rollout, now
        ),
        conditions=conditions,
    )


def _url(service: InferenceService) -> str:
    host = f"{object_name(service, 'router')}.{service.metadata.namespace}.svc"
    scheme = "http" if service.spec.router.tls is None else "https"
    return f"{scheme}://{host}:{HTTP_PORT}/v1"


def access(service: InferenceService) -> str:
    """Describe who may use the API."""
    keys, tls = service.spec.router.api_keys, service.spec.router.tls
    who = "open to whoever reaches it" if keys is None else f"API keys of Secret {keys.secret_name}"
    router = f"{who}, {'no TLS' if tls is None else f'TLS of Secret {tls.secret_name}'}"
    network = service.spec.network
    if network.engine_api == "OwnPods" and network.policy == "None":
        return f"{router}; engines open to the cluster, without a policy"
    return router


def _current_revision(
    service: InferenceService,
    observed: Observed,
    step: Step,
    previous: Status,
    target: str,
    desired: Counts,
) -> str:
    """The newest revision once it serves with all its pods; until then the one before."""
    may_serve = step.serving in ((), (target,))
    trusted = service.verification != "Required" or verified(observed, target, previous.transfer)
    complete = bool(desired) and all(
        ready_pods(observed, role, (target,)) >= desired.of(role) for role in POOLS
    )
    return target if target and may_serve and trusted and complete else previous.current_revision


def _findings(observed: Observed, previous: Iterable[Condition]) -> Mapping[str, list[Finding]]:
    """By role. Quotes that the cluster gives only now and then are kept from earlier messages."""
    earlier = "\n".join(condition.message for condition in previous)

    def with_quote(finding: Finding) -> Finding:
        return finding if finding.says else replace(finding, says=finding.said_in(earlier) or "")

    return {role: [with_quote(f) for f in diagnose(observed, role)] for role in ROLES}


def _pool(seen: Situation, role: str) -> PoolStatus:
    ready, desired = seen.ready(role), seen.wanted(role)
    if role == "router":
        deployment = seen.observed.deployment("router")
        updated = min(deployment.updated, ready) if deployment else 0
    else:
        updated = seen.ready(role, (seen.target,))
    draining = sum(pod.terminating for pod in seen.observed.pods if pod.role == role)
    return PoolStatus(
        summary=f"{ready}/{desired}",
        desired=desired,
        ready=ready,
        updated=updated,
        draining=draining,
    )


def count(observed: Observed, target: str, transfer: TransferStatus, now: str) -> Progress:
    """Measure how far the rollout of `target` is at an RFC 3339 time."""
    others = [pod for pod in observed.pods if pod.role != "router" and pod.revision != target]
    return Progress(
        revision=target,
        ready=Counts(*(ready_pods(observed, role, (target,)) for role in POOLS)),
        verified=verified(observed, target, transfer),
        old=len(others),
        draining=sum(pod.terminating for pod in others),
        waiting=sum_of(observed.turned_away(target, now)) if others else 0,
    )


def _conditions(seen: Situation, now: str) -> list[Condition]:
    generation, before = seen.service.metadata.generation, seen.previous.condition
    return [
        _condition(kind, verdict, before(kind), generation, now)
        for kind, verdict in judge(seen).items()
    ]


def _condition(
    kind: ConditionType, verdict: Verdict, before: Condition | None, generation: int, now: str
) -> Condition:
    same = before is not None and before.status == verdict.status
    return Condition(
        type=str(kind),
        status=verdict.status,
        reason=str(verdict.reason),
        message=shorten(verdict.message, MAX_MESSAGE),
        last_transition_time=before.last_transition_time if before and same else now,
        observed_generation=generation,
    )


# --- events -----------------------------------------------------------------------------------


def events_between(old: Status, new: Status) -> list[EventNote]:
    """Return the changes from one status to the next as events; none if nothing has changed."""
    notes: list[EventNote] = []
    for kind, judged in _JUDGES.items():
        now = new.condition(kind)
        if now is not None and (note := judged(old.condition(kind), now)):
            notes.append(note)
    notes.extend(_rollout_events(old, new))
    # One thing may show in several conditions; it is told once.
    return list({note.reason: note for note in reversed(notes)}.values())[::-1]


def _available_event(old: Condition | None, new: Condition) -> EventNote | None:
    if old is not None and old.status == new.status:
        return None
    if new.status == "True":
        return EventNote("Normal", Reason.named(new.reason), new.message)
    if new.status == "False" and old is not None and old.status == "True":
        kind: Literal["Normal", "Warning"] = (
            "Normal" if new.reason == Reason.SUSPENDED else "Warning"
        )
        return EventNote(kind, Reason.named(new.reason), new.message)
    return None


def _degraded_event(old: Condition | None, new: Condition) -> EventNote | None:
    was = old is not None and old.status == "True"
    if new.status == "True" and not (was and old is not None and old.reason == new.reason):
        return EventNote("Warning", Reason.named(new.reason), new.message)
    if new.status == "False" and was:
        return EventNote("Normal", Reason.RECOVERED, new.message)
    return None


def _transfer_event(old: Condition | None, new: Condition) -> EventNote | None:
    if new.status == "Unknown" or (old is not None and old.status == new.status):
        return None
    kind: Literal["Normal", "Warning"] = "Normal" if new.status == "True" else "Warning"
    return EventNote(kind, Reason.named(new.reason), new.message)


_JUDGES = {
    ConditionType.AVAILABLE: _available_event,
    ConditionType.DEGRADED: _degraded_event,
    ConditionType.KV_TRANSFER_VERIFIED: _transfer_event,
}


def _rollout_events(old: Status, new: Status) -> Iterable[EventNote]:
    phase, was = new.rollout.phase, old.rollout.phase
    message = new.rollout.message
    revision = new.update_revision
    moving = phase not in AT_REST and phase != Phase.Failed
    if moving and (was in AT_REST or old.update_revision != revision):
        text = f"Revision {revision} is on its way. {message}"
        yield EventNote("Normal", Reason.ROLLOUT_STARTED, shorten(text, MAX_MESSAGE))
    if phase == Phase.Idle and was not in AT_REST:
        text = f"Revision {revision} serves in full. {message}"
        yield EventNote("Normal", Reason.ROLLOUT_FINISHED, shorten(text, MAX_MESSAGE))
    if phase == Phase.Failed and was != Phase.Failed:
        failed = new.condition(ConditionType.PROGRESSING)
        text = failed.message if failed else message
        yield EventNote("Warning", Reason.ROLLOUT_FAILED, shorten(text, MAX_MESSAGE))
