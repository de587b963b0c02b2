"""Finds what keeps pods from being ready, and says what to do about it. It performs no I/O.

Messages contain nothing that changes while nothing happens: no restart counts, back-off times or
container ids. So a status made of them is equal from one pass to the next.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from diptych_operator.api.names import DRAFT_MODEL_CONTAINER, MODEL_CONTAINER
from diptych_operator.status.observed import (
    IMAGE_REASONS,
    DeploymentView,
    Observed,
    PodView,
    seconds_between,
)
from diptych_operator.status.reasons import Reason
from diptych_operator.status.references import Reference

MAX_QUOTE = 300
"""Characters of the cluster's own message that one finding repeats."""


class Severity(IntEnum):
    WAITING = 1
    """It may pass by itself, when something else in the cluster changes."""
    FAILING = 2
    """It is tried again and again, and will most likely fail again."""
    BLOCKED = 3
    """It cannot continue until somebody changes something."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem that needs attention."""

    reason: Reason
    what: str
    """The pods, and what happens to them."""
    says: str
    """The cluster's own message about it; may be empty."""
    remedy: str
    severity: Severity

    @property
    def message(self) -> str:
        return f"{self.what}{f' ({self.says})' if self.says else ''}. {self.remedy}".rstrip()

    def said_in(self, text: str) -> str | None:
        """Return what an earlier message of the same finding quoted; None if `text` is of another
        finding."""
        _, found, rest = text.partition(f"{self.what} (")
        says, ended, _ = rest.partition(f"). {self.remedy}")
        return says if found and ended and len(says) <= MAX_QUOTE else None


def diagnose(observed: Observed, role: str) -> list[Finding]:
    """Return all problems of the pods of one role, of every revision, the worst first.

    Pods that are only slow are no finding; `progress_text` describes them.
    """
    refused = [
        _refused(view) for view in observed.deployments if view.role == role and view.failure
    ]
    by_case: dict[Finding, list[str]] = {}
    quotes: dict[Finding, str] = {}
    alive = _alive(observed, role)
    starts = {pod.revision: pod.created_at for pod in alive if not pod.ready}
    records = [pod for pod in observed.pods if pod.role == role and pod.gone]
    for pod in (*alive, *records):
        for case in _evicted(pod, starts) if pod.gone else _cases(pod, observed.missing):
            # Pods that fail alike are told of once, with the words of the first that has some.
            key = Finding(case.reason, case.what, "", case.remedy, case.severity)
            by_case.setdefault(key, []).append(pod.name)
            quotes[key] = quotes.get(key) or case.says
    failing = [
        Finding(
            case.reason,
            f"{_who(role, names)}: {case.what}",
            quotes[case],
            case.remedy,
            case.severity,
        )
        for case, names in by_case.items()
    ]
    return sorted(refused + failing, key=lambda f: (-f.severity, f.reason, f.message))


def progress_text(
    observed: Observed, role: str, wanted: int, revisions: Iterable[str] | None = None
) -> str:
    """Describe the progress of a role's pods, such as `1 of 2 pods ready; 1 loading the model`."""
    chosen = None if revisions is None else set(revisions)
    pods = [p for p in _alive(observed, role) if chosen is None or p.revision in chosen]
    steps = Counter(_step(pod) for pod in pods if not pod.ready)
    ready = sum(pod.ready for pod in pods)
    if missing := max(0, wanted - len(pods)):
        steps["not created yet"] = missing
    details = [f"{count} {step}" for step, count in sorted(steps.items())]
    return "; ".join([f"{ready} of {wanted} pods ready", *details])


def shorten(text: str, limit: int) -> str:
    """Return one line of at most `limit` characters, with an ellipsis for what is left out."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


_ERROR_LINE = re.compile(r"^diptych [^:]+: error: (?P<problem>.+)$")
"""Pods of engines write it under their own name."""
_EXCEPTION_LINE = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::|$)")
_LOG_PREFIX = re.compile(r"^(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d\S*\s+")
CORE_EXITED = re.compile(r"the engine core \(pid \d+\) exited")
_CORE_KILLED = re.compile(r"the engine core \(pid \d+\) was killed by signal 9")


def telling_line(log: str) -> str:
    """Return the line of a container's last output that best explains why it ended.

    That is our programs' own error line, else an uncaught exception, else the last line. The
    front-end's message that its core has exited counts only if the core itself did not say why.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [found["problem"] for line in lines if (found := _ERROR_LINE.match(line))]
    causes = [error for error in errors if not CORE_EXITED.match(error)]
    exceptions = [line for line in lines if _EXCEPTION_LINE.match(line)]
    best = causes[-1:] or exceptions[-1:] or errors[-1:] or lines[-1:]
    return shorten(_LOG_PREFIX.sub("", best[0]), MAX_QUOTE) if best else ""


# --- one pod ----------------------------------------------------------------------------------


def _alive(observed: Observed, role: str) -> list[PodView]:
    """Pods that are to stay. Failed ones (evicted, say) are gone already but for their record."""
    return [
        pod for pod in observed.pods if pod.role == role and not pod.terminating and not pod.gone
    ]


def _step(pod: PodView) -> str:
    if _case(pod) is not None:
        return "failing"
    if pod.phase == "Running":
        return "waiting for engines" if pod.role == "router" else "loading the model"
    if pod.waiting_reason == "PodInitializing" and pod.ip:
        return "fetching the model"
    return "being started by the node" if pod.waiting_reason else "waiting for a node"


def _cases(pod: PodView, missing: Mapping[Reference, str]) -> Iterator[Finding]:
    """All that is wrong with one pod: first what it waits for and is not there."""
    lacking = sorted(pod.refers & missing.keys()) if not pod.ready else []
    for reference in lacking:
        what = f'waits for the {reference.kind} "{reference.name}", which is not there'
        reason = Reason.CONTAINER_CONFIG_ERROR
        yield Finding(reason, what, "", missing[reference], Severity.BLOCKED)
    case = _case(pod)
    if case is not None and not (lacking and case.reason is Reason.CONTAINER_CONFIG_ERROR):
        yield case


EVICTED_S = 3600
"""If the next pod was made later than that, one that was evicted is no reason for its state."""


def _evicted(pod: PodView, starts: Mapping[str, str]) -> Iterator[Finding]:
    """Why its node ended a pod, while another of its revision is not ready. `starts` has the time
    when that was made, by the revision."""
    made_at = starts.get(pod.revision, "")
    if pod.evicted and made_at and seconds_between(pod.created_at, made_at) < EVICTED_S:
        reason, says = Reason.POD_EVICTED, shorten(pod.evicted, MAX_QUOTE).rstrip(".")
        yield Finding(reason, "was evicted by its node", says, reason.remedy, Severity.FAILING)


def _case(pod: PodView) -> Finding | None:
    """What is wrong with one pod; the text leaves out which one it is."""
    if pod.ready:
        return None
    if pod.node_silent:
        reason = Reason.NODE_SILENT
        return Finding(reason, "its node is not heard of", "", reason.remedy, Severity.WAITING)
    if pod.unschedulable:
        return _unschedulable(pod)
    if pod.waiting_reason in IMAGE_REASONS:
        return _image(pod)
    if pod.waiting_reason == "CreateContainerConfigError":
        return _config(pod)
    # A crashed container alternates between ended, waiting and running until it is ready: its last
    # exit tells the same story all along.
    if pod.last_exit_reason or pod.waiting_reason == "CrashLoopBackOff":
        return _crash(pod)
    if pod.waiting_reason not in _HARMLESS_REASONS:
        says = f"{pod.waiting_reason}: {_lasting(pod.waiting_message)}".rstrip(": ")
        return _cannot_start(says)
    return None


_HARMLESS_REASONS = frozenset({"", "ContainerCreating", "PodInitializing"})
_PULL_PREFIX = re.compile(
    r'^(?:Back-off pulling image "[^"]*":?\s*|ErrImagePull:\s*|rpc error: code = \w+ desc = '
    r'|failed to pull and unpack image "[^"]*": |failed to resolve reference "[^"]*": )+'
)


_IMAGES_OF = {"router": ("spec.router", "images.router"), "route": ("spec", "images.router")}
"""Where the image of pods that run no engine is named, in the spec and in the chart."""


def _spec(role: str) -> str:
    """Return the path in the spec under which the pods of a role are described."""
    return "spec" if role == "route" else f"spec.{role}"


def _image(pod: PodView) -> Finding:
    # The kubelet tells why in one of two states that take turns; `build_status` remembers it.
    says = _lasting(_PULL_PREFIX.sub("", pod.waiting_message.strip()))
    if len(says) > MAX_QUOTE:  # it wraps errors outside in: the cause stands last
        says = f"…{says[1 - MAX_QUOTE :]}"
    field, chart = _IMAGES_OF.get(pod.role, ("spec.engine", "images.engine"))
    remedy = (
        f"Check {field}.image (left out, it is the chart's {chart}); a "
        f"private registry wants imagePullSecrets in {_spec(pod.role)}.podTemplate"
    )
    if pod.waiting_reason == "InvalidImageName":
        remedy = f"Correct {field}.image, or the image in {_spec(pod.role)}.podTemplate"
    what = f'cannot pull image "{shorten(pod.image, 200)}"'
    return Finding(Reason.IMAGE_CANNOT_BE_PULLED, what, says, f"{remedy}.", Severity.BLOCKED)


_NO_OBJECT = re.compile(r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found', re.I)
_NO_KEY = re.compile(r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) (?P<name>\S+)")
_KINDS = {"secret": "Secret", "configmap": "ConfigMap"}


def _config(pod: PodView) -> Finding:
    remedy = Reason.CONTAINER_CONFIG_ERROR.remedy
    if found := _NO_OBJECT.search(pod.waiting_message):
        kind = _KINDS[found["kind"].lower()]
        remedy = f'Create the {kind} "{found["name"]}" in this namespace.'
    elif found := _NO_KEY.search(pod.waiting_message):
        remedy = f'Add the key "{found["key"]}" to the {found["kind"]} "{found["name"]}".'
    says = shorten(pod.waiting_message, MAX_QUOTE)
    what = "a container cannot be set up"
    return Finding(Reason.CONTAINER_CONFIG_ERROR, what, says, remedy, Severity.BLOCKED)


def _crash(pod: PodView) -> Finding:
    if pod.last_exit_reason in ("StartError", "ContainerCannotRun"):
        return _cannot_start(_lasting(pod.last_exit))
    says = telling_line(pod.last_exit)
    if pod.last_exit_reason == "OOMKilled":
        return _out_of_memory(pod, "was ended at its memory limit", "")
    if _CORE_KILLED.match(says):
        return _out_of_memory(pod, "its engine core was killed, as happens at a memory limit", says)
    if pod.ended_container in (MODEL_CONTAINER, DRAFT_MODEL_CONTAINER):
        reason = Reason.MODEL_CANNOT_BE_FETCHED
        return Finding(reason, "cannot fetch the model", says, reason.remedy, Severity.FAILING)
    reason = Reason.CONTAINER_CRASHING
    return Finding(reason, "keeps crashing", says, reason.remedy, Severity.FAILING)


def _out_of_memory(pod: PodView, what: str, says: str) -> Finding:
    remedy = f"Raise {_spec(pod.role)}.resources.limits.memory"
    if pod.role not in _IMAGES_OF:
        remedy += " or lower spec.engine.kvCacheMemory"
    return Finding(Reason.OUT_OF_MEMORY, what, says, f"{remedy}.", Severity.FAILING)


def _cannot_start(says: str) -> Finding:
    reason = Reason.CONTAINER_CANNOT_START
    says = shorten(says, MAX_QUOTE)
    return Finding(reason, "a container cannot be started", says, reason.remedy, Severity.BLOCKED)


def _lasting(text: str) -> str:
    """Without what differs from one try to the next: container ids and our own side's ports."""
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "…", text)
    return re.sub(r"\b(read|write|dial) (tcp|udp) \S+->", r"\1 \2 ", text)


_LACKING = re.compile(r"Insufficient ([\w.-]+(?:/[\w.-]+)?)")
_NO_CLAIM = re.compile(r'persistentvolumeclaim "(?P<name>[^"]+)" not found', re.I)
_OF_SICK_NODES = re.compile(r"taint \{node\.(?:cloudprovider\.)?kubernetes\.io/[^}]*\}")
"""Kubernetes gives nodes these taints, and takes them off when a node is well."""
_OF_VOLUMES = "volume node affinity conflict"
_PREEMPTION = re.compile(r"\s*(?:preemption|no new claims to deallocate)\b.*$", re.DOTALL)


def _unschedulable(pod: PodView) -> Finding:
    said = _PREEMPTION.sub("", pod.unschedulable)
    template = f"{_spec(pod.role)}.podTemplate.spec"
    claims = "spec.router.batches" if pod.role == "router" else "spec.model"
    remedies = []
    if lacking := sorted({name.rstrip(".") for name in _LACKING.findall(said)}):
        remedies.append(
            f"Add nodes with free {' and '.join(lacking)}, or ask for less in "
            f"{_spec(pod.role)}.resources, or for fewer pods."
        )
    if "were unschedulable" in said:
        remedies.append("Let pods onto nodes again: `kubectl uncordon`.")
    others = _OF_SICK_NODES.sub("", said)
    if others != said:
        remedies.append("Mend the nodes: `kubectl describe nodes` says what they lack.")
    if "taint" in others:
        remedies.append(f"Tolerate the taint in {template}.tolerations.")
    if _OF_VOLUMES in said:
        remedies.append(
            f"Let pods run where their volumes are (`kubectl get pv`), or correct {claims} or the "
            "podTemplate."
        )
    if "selector" in said or "affinity" in said.replace(_OF_VOLUMES, ""):
        remedies.append(f"Check nodeSelector and affinity in {template}.")
    if "topology spread" in said:
        remedies.append(f"Check topologySpreadConstraints in {template}.")
    if found := _NO_CLAIM.search(said):
        remedies.append(
            f'Create the PersistentVolumeClaim "{found["name"]}", or correct {claims} or the '
            "podTemplate."
        )
    elif "persistentvolumeclaim" in said.lower():
        remedies.append(f"Check the PersistentVolumeClaim of {claims}.")
    remedy = " ".join(remedies) or Reason.UNSCHEDULABLE.remedy
    says = shorten(said, MAX_QUOTE).rstrip(".")
    return Finding(Reason.UNSCHEDULABLE, "fits no node", says, remedy, Severity.WAITING)


# --- many pods --------------------------------------------------------------------------------


_POD_REFUSED = re.compile(r'^pods? "[^"]*" (?:is forbidden|is invalid): ', re.I)


_LIMIT_RANGE = re.compile(
    r"(?:minimum|maximum) \S+ usage per|max limit to request ratio|must be less than or equal to"
)
"""Its limits, and those that it gives to containers that have only requests."""
_NO_PART = re.compile(
    r"(?P<kind>serviceaccount|PriorityClass|RuntimeClass)(?: with name)? "
    r"\"?(?P<name>[\w.-]+)\"?(?: was)? (?:not )?found",
    re.I,
)
_PARTS = {
    "serviceaccount": "ServiceAccount",
    "priorityclass": "PriorityClass",
    "runtimeclass": "RuntimeClass",
}
"""What pods refer to that Kubernetes looks for when it creates them, by its words for it."""


def _refused(view: DeploymentView) -> Finding:
    says, spec = shorten(_POD_REFUSED.sub("", view.failure), MAX_QUOTE), _spec(view.role)
    remedy = Reason.PODS_REFUSED.remedy
    if "exceeded quota" in says:
        remedy = f"Raise the namespace's ResourceQuota, or ask for less in {spec}.resources."
    elif "must specify" in says:
        remedy = f"Say in {spec}.resources what it names."
    elif _LIMIT_RANGE.search(says):
        remedy = f"Say in {spec}.resources what the namespace's LimitRange allows, or change that."
    elif found := _NO_PART.search(says):
        remedy = (
            f'Create the {_PARTS[found["kind"].lower()]} "{found["name"]}", or '
            f"correct {spec}.podTemplate."
        )
    elif "PodSecurity" in says:
        remedy = f"Correct {spec}.podTemplate, or the namespace's PodSecurity label."
    what = f"{view.role} pods cannot be created"
    return Finding(Reason.PODS_REFUSED, what, says, remedy, Severity.BLOCKED)


def _who(role: str, names: list[str]) -> str:
    others = len(names) - 1
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"{role} pod {min(names)}{more}"
