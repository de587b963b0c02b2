"""One function for each way of replacing a revision; all of them look at a Scene.

Here the target wants pods, nothing is suspended, and at least one old revision is alive, except
where a function says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from diptych_operator.counts import NOTHING, Counts
from diptych_operator.plan.roll import Bounds, roll
from diptych_operator.plan.state import (
    Phase,
    RevisionState,
    Scene,
    Step,
    at_least,
    both,
    both_or_none,
    each,
    least,
    less,
    most,
    total,
)
from diptych_operator.plan.words import falling_back, fencing, leaving, progress, stuck, switching

ONE_OF_EACH = Counts(1, 1)


def alone(scene: Scene) -> Step:
    """No old revision is alive: all of the target at once, beside what may still leave."""
    target = scene.target.revision
    serving = (target,) if scene.rollout.type == "BlueGreen" else ()
    replicas = {target: scene.desired}
    if scene.target_whole:
        return Step(replicas, serving, Phase.Idle, progress(scene, replicas))
    if scene.failed:
        return Step(replicas, serving, Phase.Failed, stuck(scene, replicas))
    phase = Phase.Verifying if scene.target_ready else Phase.Progressing
    return Step(replicas, serving, phase, progress(scene, replicas))


def paired_rolling(scene: Scene) -> Step:
    """The target grows and old revisions give way, both pools in step."""
    if scene.failed:
        return _rolling_back(scene)
    bounds = Bounds(
        size=scene.desired,
        floor=less(scene.desired, each(scene.rollout.max_unavailable)),
        ceiling=scene.desired + each(scene.rollout.max_surge),
    )
    replicas = roll(scene.target, scene.living, bounds, trusted=_trusted(scene))
    return Step(replicas, (), _phase(scene, replicas), progress(scene, replicas))


def _rolling_back(scene: Scene) -> Step:
    """The failed target gives way to the largest old revision; the other ones stay as they are.

    It keeps one pod of each pool to look at, if there is surge to hold them. What the old revision
    has ready counts without a new canary: it has been serving.
    """
    rollout = scene.rollout
    *others, keeper = scene.living
    beside = total([other.serving for other in others])
    bounds = Bounds(
        size=most(less(scene.desired, beside), ONE_OF_EACH),
        floor=less(less(scene.desired, each(rollout.max_unavailable)), beside),
        ceiling=less(
            scene.desired + each(rollout.max_surge), total([other.wanted for other in others])
        ),
    )
    leave = ONE_OF_EACH if rollout.max_surge else NOTHING
    failing = scene.target
    if not failing.alive:
        failing = replace(failing, wanted=both_or_none(least(failing.wanted, leave)))
    replicas = roll(keeper, [failing], bounds, trusted={keeper.revision}, leave=leave)
    replicas |= {other.revision: other.wanted for other in others}
    return Step(replicas, (), Phase.Failed, falling_back(scene, keeper.revision, replicas))


def _trusted(scene: Scene) -> set[str]:
    return {
        state.revision
        for state in (scene.target, *scene.olds)
        if scene.proven(state) and scene.admitted(state.revision)
    }


def _phase(scene: Scene, replicas: dict[str, Counts]) -> Phase:
    planned = replicas[scene.target.revision]
    waiting_only_for_proof = (
        both(planned)
        and planned == scene.target.wanted
        and at_least(scene.target.ready, planned)
        and not scene.proven(scene.target)
    )
    return Phase.Verifying if waiting_only_for_proof else Phase.Progressing


def recreate(scene: Scene) -> Step:
    """Old revisions go first; once nothing of them is left, the target comes.

    Also asked while old revisions are merely leaving.
    """
    target = scene.target
    if not any(old.wanted or old.present for old in scene.olds):
        return alone(scene)
    stays = both_or_none(least(target.wanted, scene.desired))
    phase = Phase.Failed if scene.failed else Phase.Progressing
    return Step({target.revision: stays}, (), phase, leaving(scene))


def blue_green(scene: Scene) -> Step:
    """The target comes up whole beside the old, then routers switch, then the old goes.

    Old revisions that no router uses any more, as a target that was overtaken by another, go at
    once. Routers must have been told to stay with the old before the first pod of the target
    starts, or some would use it early.
    """
    target, name = scene.target, scene.target.revision
    carrying = [old for old in scene.living if _in_use(scene, old.revision)] or scene.living
    fenced = not _in_use(scene, name)
    whole = scene.target_whole and at_least(target.usable, scene.desired)
    switched = bool(scene.routers) and all(serving == (name,) for serving in scene.routers)
    begun = any(serving == (name,) for serving in scene.routers) and both(target.serving)
    kept = _at_full_size(scene, carrying) if fenced else {o.revision: o.wanted for o in carrying}
    stay = tuple(sorted(kept))
    enough = at_least(total([old.serving for old in carrying]), scene.desired)
    if target.serving and not fenced and not enough:
        stay = tuple(sorted((*stay, name)))  # It carries a share that the old would lack.

    if switched and whole:
        return Step({name: scene.desired}, (name,), Phase.Switching, switching(scene, kept))
    if scene.failed:
        rest = both_or_none(least(target.wanted, ONE_OF_EACH if fenced else scene.desired))
        kept = _at_full_size(scene, carrying)
        message = falling_back(scene, carrying[-1].revision, kept | {name: rest})
        return Step(kept | {name: rest}, stay, Phase.Failed, message)
    replicas = kept | {name: scene.desired}
    if begun or whole:
        return Step(replicas, (name,), Phase.Switching, switching(scene, kept))
    if not target.wanted and not fenced:
        return Step(kept | {name: NOTHING}, stay, Phase.Progressing, fencing(scene, stay))
    return Step(replicas, stay, _phase(scene, replicas), progress(scene, replicas))


def _in_use(scene: Scene, revision: str) -> bool:
    """A router sends requests to it, or may: one that does not answer, or may use every one."""
    return not scene.routers or any(not used or revision in used for used in scene.routers)


def _at_full_size(scene: Scene, carrying: list[RevisionState]) -> dict[str, Counts]:
    """Old revisions that carry the service alone follow the desired size, the largest for all."""
    *others, keeper = carrying
    beside = total([other.serving for other in others])
    size = most(less(scene.desired, beside), ONE_OF_EACH)
    return {other.revision: other.wanted for other in others} | {keeper.revision: size}
