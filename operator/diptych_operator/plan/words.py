"""The sentences of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diptych_operator.counts import Counts
from diptych_operator.plan.state import Scene, at_least, less, most


def pods(counts: Counts) -> str:
    """Such as `1 prefill and 2 decode pods`."""
    if counts.prefill and counts.decode:
        return f"{counts.prefill} prefill and {counts.decode} decode pods"
    role, number = ("prefill", counts.prefill) if counts.prefill else ("decode", counts.decode)
    return f"{number} {role} pod{'s' * (number != 1)}" if number else "no pods"


def progress(scene: Scene, replicas: Mapping[str, Counts]) -> str:
    target = scene.target
    planned = replicas[target.revision]
    said = f"{target.revision}: {pods(planned)} of {_both(scene.desired)} wanted"
    if planned == scene.desired:
        said = f"{target.revision}: {pods(planned)}"
    parts = [f"{said}, {_awaited(scene, planned)}"]
    parts += [
        f"{old.revision}: {pods(replicas[old.revision])} stay"
        for old in scene.living
        if replicas.get(old.revision)
    ]
    return "; ".join(parts + _on_their_way_out(scene, replicas))


def _awaited(scene: Scene, planned: Counts) -> str:
    target = scene.target
    if not planned:
        return "waiting for a place"
    if not at_least(target.ready, planned):
        return f"waiting for {pods(less(planned, target.ready))} to be ready"
    if not scene.proven(target):
        return "ready, waiting for a canary to cross from prefill to decode"
    if not scene.admitted(target.revision):
        return "ready, waiting for every router to take it into service"
    return "ready"


def _on_their_way_out(scene: Scene, replicas: Mapping[str, Counts]) -> list[str]:
    return [
        f"{old.revision}: {pods(old.present)} on the way out"
        for old in scene.olds
        if old.present and not replicas.get(old.revision)
    ]


def stuck(scene: Scene, replicas: Mapping[str, Counts]) -> str:
    """The target failed and nothing is there to fall back on."""
    return (
        f"no further in {scene.rollout.progress_deadline_seconds} s, and no old revision is there "
        f"to fall back on: {progress(scene, replicas)}"
    )


def falling_back(scene: Scene, keeper: str, replicas: Mapping[str, Counts]) -> str:
    target = scene.target.revision
    rest = replicas[target]
    look = f"; {pods(rest)} of {target} stay to be looked at" if rest else ""
    return (
        f"{target} got no further in {scene.rollout.progress_deadline_seconds} s; {keeper} keeps "
        f"serving{look}; change the spec again, or back, to go on"
    )


def leaving(scene: Scene) -> str:
    left = [f"{old.revision}: {pods(most(old.present, old.wanted))}" for old in scene.olds]
    return f"{scene.target.revision} waits until old pods are gone ({', '.join(left)})"


def fencing(scene: Scene, serving: Iterable[str]) -> str:
    stay = tuple(serving)
    return (
        f"{scene.target.revision} waits for routers to stay with {', '.join(stay)} "
        f"({_told(scene, stay)} do)"
    )


def switching(scene: Scene, olds: Iterable[str]) -> str:
    target = scene.target.revision
    return (
        f"routers switch to {target} ({_told(scene, (target,))} have); "
        f"{', '.join(olds)} leaves when all have and {target} is wholly ready"
    )


def _told(scene: Scene, serving: tuple[str, ...]) -> str:
    told = sum(1 for reported in scene.routers if reported == serving)
    return f"{told} of {len(scene.routers)}"


def _both(counts: Counts) -> str:
    return f"{counts.prefill} and {counts.decode}"
