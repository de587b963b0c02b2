"""Explains for `kubectl diptych why` what is wrong with a service and what to do, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diptych.kubectl.cluster import Raw
from diptych.kubectl.view import ServiceView, unreported
from diptych_operator.api.names import COMPONENT_LABEL, POOLS, PREFETCH_SUFFIX
from diptych_operator.api.status import Condition
from diptych_operator.status.diagnose import diagnose
from diptych_operator.status.observed import Observed, PodView, pod_view
from diptych_operator.status.reasons import Group, Reason

NEWEST_EVENTS = 5


@dataclass(frozen=True, slots=True)
class ServiceExplanation:
    """`healthy` decides the command's exit code. A healthy service may have causes or events."""

    healthy: bool
    headline: str
    causes: tuple[Cause, ...] = ()
    """The worst first."""
    events: tuple[str, ...] = ()
    """The newest warnings, newest first."""


@dataclass(frozen=True, slots=True)
class Cause:
    what: str
    message: str
    remedy: str = ""


def explain(
    view: ServiceView, warnings: Sequence[Raw] = (), fetching: Sequence[Raw] = ()
) -> ServiceExplanation:
    """Explain a service. `warnings`: Warning events of the namespace; those of other objects are
    ignored. `fetching`: the pods that fetch ahead for it."""
    name = f"{view.namespace}/{view.name}"
    if not view.reported:
        cause = Cause("The status is not up to date", unreported(view))
        headline = f"{name}: nothing is known of its newest spec."
        if view.kept_by is not None:
            headline = f"{name} is being deleted."
        return ServiceExplanation(False, headline, (cause,), tuple(_newest(view.name, warnings)))
    ahead = tuple(_ahead(view, fetching))
    causes = (*_causes(view), *ahead)
    events = tuple(_newest(view.name, warnings))
    available, progressing = view.condition("Available"), view.condition("Progressing")
    serves = available.status == "True"
    degraded = view.condition("Degraded").status == "True"
    if serves and not (degraded or progressing.reason == Reason.ROLLOUT_FAILED):
        headline = f"{name} is available. {available.message}".rstrip()
        return ServiceExplanation(True, headline, causes, events if ahead else ())
    headline = f"{name} {'answers requests, but wants attention' if serves else _down(view)}."
    return ServiceExplanation(False, headline, causes, events)


def _down(view: ServiceView) -> str:
    if view.condition("Available").reason == Reason.SUSPENDED:
        return "is suspended"
    if view.condition("Available").status == "Unknown":
        return "is not known to answer requests"
    progresses = view.condition("Progressing").status == "True"
    if progresses and view.condition("Degraded").status != "True":
        return "is not available yet; it is on its way, and nothing has failed"
    return "is not available"


_WANTED = {
    "Degraded": "False",
    "Available": "True",
    "KVTransferVerified": "True",
    "PrefillReady": "True",
    "DecodeReady": "True",
    "RouterReady": "True",
}
"""In the order in which they are told: the cause before what follows from it."""


def _causes(view: ServiceView) -> Iterable[Cause]:
    """Conditions that are not as wanted; what one has told, the next does not tell again."""
    told: list[str] = []
    progressing = view.condition("Progressing")
    for kind, wanted in _WANTED.items():
        condition = view.status.condition(kind)
        if condition is None or condition.status == wanted:
            continue
        if kind == "KVTransferVerified" and condition.reason == Reason.VERIFICATION_OFF:
            continue
        if any(condition.message in earlier for earlier in told):
            continue
        told.append(condition.message)
        yield _cause(condition, view)
    if progressing.status == "True" or progressing.reason == Reason.ROLLOUT_FAILED:
        yield _cause(progressing, view)


def _ahead(view: ServiceView, pods: Sequence[Raw]) -> Iterable[Cause]:
    """What keeps model and images from nodes that are to have them before an engine comes."""
    there, _, wanted = view.status.prefetched.partition("/")
    if there == wanted:
        return
    what = f"Prefetched on {view.status.prefetched} nodes"
    seen = Observed(pods=tuple(map(_fetching, pods)))
    told = [finding.message for role in POOLS for finding in diagnose(seen, role)]
    said = "Nothing has failed" if pods else "Kubernetes has made no pod for it"
    yield from (Cause(what, message) for message in told or [f"{said}; the warnings tell more."])


def _fetching(raw: Raw) -> PodView:
    """It has no role, or it would be taken for an engine: its component is made of it."""
    component = str((raw["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))
    return replace(pod_view(raw), role=component.removesuffix(PREFETCH_SUFFIX))


def _cause(condition: Condition, view: ServiceView) -> Cause:
    known = next((reason for reason in Reason if reason == condition.reason), None)
    remedy = known.remedy if known else ""
    judged = known is Reason.ROLLOUT_FAILED and "failed" in view.status.rollout.canary
    told = known is not None and known.group is Group.PODS
    if remedy in condition.message or judged or told:  # what these messages say fits better
        remedy = ""
    what = f"{condition.type} is {condition.status} ({condition.reason})"
    return Cause(f"{what} since {condition.last_transition_time}", condition.message, remedy)


def _newest(name: str, warnings: Sequence[Raw]) -> Iterable[str]:
    """Warnings on the service and on what it owns, each text once."""
    ours = [event for event in warnings if _concerns(event, name)]
    ours.sort(key=_time, reverse=True)
    told: set[tuple[str, str]] = set()
    for event in ours:
        about = event.get("involvedObject") or {}
        message = " ".join(str(event.get("message", "")).split())
        key = (str(event.get("reason", "")), message)
        if key in told or len(told) == NEWEST_EVENTS:
            continue
        told.add(key)
        yield f"{_time(event)} {about.get('kind', '')}/{about.get('name', '')}: {key[0]}: {message}"


def _concerns(event: Raw, name: str) -> bool:
    about = str((event.get("involvedObject") or {}).get("name", ""))
    owned = tuple(f"{name}-{part}" for part in ("prefill", "decode", "router", "keys", "serving"))
    return about == name or about.startswith(owned)


def _time(event: Raw) -> str:
    """RFC 3339; empty sorts as the oldest."""
    for key in ("lastTimestamp", "eventTime", "firstTimestamp"):
        if event.get(key):
            return str(event[key])
    return ""
