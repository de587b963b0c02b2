"""The messages for users in a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diptych_operator.api.pools import Counts
from diptych_operator.api.service import Canary
from diptych_operator.plan.state import RolloutView, at_least, less, most
from diptych_operator.plan.trial import Trial, all_follow, lacks_requests, place


def pods(counts: Counts) -> str:
    """Return a phrase such as `1 prefill and 2 decode pods`."""
    if counts.prefill and counts.decode:
        return f"{counts.prefill} prefill and {counts.decode} decode pods"
    role, number = ("prefill", counts.prefill) if counts.prefill else ("decode", counts.decode)
    return f"{number} {role} pod{'s' * (number != 1)}" if number else "no pods"


def progress(view: RolloutView, replicas: Mapping[str, Counts]) -> str:
    target = view.target
    planned = replicas[target.revision]
    here = _pods(view, target.revision, planned)
    said = f"{target.revision}: {here} of {_wanted(view)} wanted"
    if planned == view.desired:
        said = f"{target.revision}: {here}"
    parts = [f"{said}, {_awaited(view, planned)}"]
    parts += [
        f"{old.revision}: {_pods(view, old.revision, replicas[old.revision])} stay"
        for old in view.living
        if replicas.get(old.revision)
    ]
    return "; ".join(parts + _on_their_way_out(view, replicas))


def _awaited(view: RolloutView, planned: Counts) -> str:
    target = view.target
    if not planned:
        return "waiting for a place"
    if target.turned_away and not view.failed:
        return _turned_away(view)
    if not at_least(target.ready, planned):
        missing = _pods(view, target.revision, less(planned, target.ready))
        return f"waiting for {missing} to be ready"
    if not view.proven(target):
        return "ready, waiting for a canary to cross from prefill to decode"
    if not view.admitted(target.revision):
        return "ready, waiting for every router to take it into service"
    return "ready"


def _turned_away(view: RolloutView) -> str:
    waits = f"there is no room for {_pods(view, view.target.revision, view.target.turned_away)}"
    if not view.living:
        return waits
    if view.rollout.when_full == "Wait":
        return f"{waits}, for which it waits (spec.rollout.whenFull)"
    if view.rollout.type == "PairedRolling" and view.replaces_in_place(view.target):
        return f"{waits}, so old ones make room (spec.rollout.whenFull)"
    return f"{waits}; {_remedy(view)}"


def _remedy(view: RolloutView) -> str:
    if view.rollout.switches:
        rest = "spec.rollout.type to PairedRolling"
    elif view.rollout.when_full == "ReplaceInPlace":
        rest = "maxUnavailable to 1, by which a pool of one pod is empty for a while"
    else:
        rest = "maxSurge to 0 and maxUnavailable to 1"
        if min(view.desired.prefill, view.desired.decode) > 1:  # a pool's only pod stays
            rest = f"to ReplaceInPlace, or {rest}"
    return f"add nodes (or quota), or set spec.rollout.whenFull to Wait, or {rest}"


def _on_their_way_out(view: RolloutView, replicas: Mapping[str, Counts]) -> list[str]:
    return [
        f"{old.revision}: {_pods(view, old.revision, old.present)} on the way out"
        for old in view.olds
        if old.present and not replicas.get(old.revision)
    ]


def stuck(view: RolloutView, replicas: Mapping[str, Counts]) -> str:
    """Return the message for a failed target without another revision to fall back on."""
    return (
        f"no further in {view.rollout.progress_deadline_seconds} s, and no old revision is there "
        f"to fall back on: {progress(view, replicas)}"
    )


def falling_back(view: RolloutView, keeper: str, replicas: Mapping[str, Counts]) -> str:
    target = view.target.revision
    rest = replicas[target]
    look = f"; {_pods(view, target, rest)} of {target} stay to be looked at" if rest else ""
    why = f"{target} got no further in {view.rollout.progress_deadline_seconds} s"
    remedy = "change the spec again, or back, to go on"
    if view.verdict:
        why = f"{target} failed as a canary: {view.verdict}"
    elif view.full:
        why = f"there was no room for all pods of {target}"
        remedy = f"{_remedy(view)}; any change of the spec tries again"
    return f"{why}; {keeper} keeps serving{look}; {remedy}"


def leaving(view: RolloutView) -> str:
    left = [
        f"{old.revision}: {_pods(view, old.revision, most(old.present, old.wanted))}"
        for old in view.olds
    ]
    return f"{view.target.revision} waits until old pods are gone ({', '.join(left)})"


def fencing(view: RolloutView, serving: Iterable[str]) -> str:
    stay = tuple(serving)
    return (
        f"{view.target.revision} waits for routers to stay with {', '.join(stay)} "
        f"({_told(view, stay)} do)"
    )


def on_trial(view: RolloutView, canary: Canary, trial: Trial) -> str:
    number, seen, now = len(canary.steps), view.evidence, place(canary, trial)
    said = f"{trial.revision} gets {trial.weight} % of new requests (step {now + 1} of {number})"
    if not (trial.since and all_follow(trial, seen)):
        return f"{said}, waiting for every router to follow"
    step = canary.steps[now]
    if missing := lacks_requests(canary, trial, seen):
        return f"{said}, waiting for {missing} more requests to judge it by"
    return f"{said}, for {step.pause_seconds} s from {trial.since} on"


def switching(view: RolloutView, olds: Iterable[str]) -> str:
    target = view.target.revision
    return (
        f"routers switch to {target} ({_told(view, (target,))} have); "
        f"{', '.join(olds)} leaves when all have and {target} is wholly ready"
    )


def _told(view: RolloutView, serving: tuple[str, ...]) -> str:
    told = sum(1 for reported in view.routers if reported == serving)
    return f"{told} of {len(view.routers)}"


def _pods(view: RolloutView, revision: str, counts: Counts) -> str:
    return pods(view.as_it_is(revision, counts))


def _wanted(view: RolloutView) -> str:
    counts = view.as_it_is(view.target.revision, view.desired)
    return f"{counts.prefill} and {counts.decode}" if counts.prefill else str(counts.decode)
