"""The strategies that replace a revision: one function each, which takes a RolloutView.

Except where a function says otherwise, the target wants pods, nothing is suspended, and at least
one old revision is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from diptych_operator.api.names import POOLS
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.plan.messages import (
    falling_back,
    fencing,
    leaving,
    on_trial,
    progress,
    stuck,
    switching,
)
from diptych_operator.plan.roll import Bounds, roll
from diptych_operator.plan.state import (
    ONE_OF_EACH,
    Phase,
    RevisionState,
    RolloutView,
    Step,
    at_least,
    both,
    both_or_none,
    each,
    least,
    less,
    most,
    total,
    with_count,
)
from diptych_operator.plan.trial import Trial, advance, has_passed, is_unjudged


def alone(view: RolloutView) -> Step:
    """No old revision is alive: start all of the target, beside pods that terminate."""
    target = view.target.revision
    serving = (target,) if view.rollout.switches else ()
    replicas = {target: _sharing_places(view)}
    if view.target_whole:
        return Step(replicas, serving, Phase.Idle, progress(view, replicas))
    if view.failed:
        return Step(replicas, serving, Phase.Failed, stuck(view, replicas))
    phase = Phase.Verifying if view.target_ready else Phase.Progressing
    return Step(replicas, serving, phase, progress(view, replicas))


def _sharing_places(view: RolloutView) -> Counts:
    """The desired size; but one pod of a pool that may hold the places of the other, as long as the
    scheduler turns all pods of the other away."""
    target, wanted = view.target, view.desired
    here = less(target.wanted, target.unplaced)
    for lacking, holding in (POOLS, POOLS[::-1]):
        if target.turned_away.of(lacking) and not here.of(lacking) and here.of(holding):
            wanted = with_count(wanted, holding, 1)
    return wanted


def paired_rolling(view: RolloutView) -> Step:
    """The target grows and old revisions shrink, both pools in step."""
    if view.failed:
        return _rolling_back(view)
    bounds = Bounds(
        size=view.desired,
        floor=_floor(view, view.target),
        ceiling=view.desired + each(view.rollout.max_surge),
    )
    replicas = roll(view.target, view.living, bounds, trusted=_trusted(view))
    return Step(replicas, (), _phase(view, replicas), progress(view, replicas))


def _floor(view: RolloutView, growing: RevisionState) -> Counts:
    """Ready pods that must stay: a pair fewer where old pods are to make room for new ones. It is
    a pair although one pool may have room, because old pods leave along the line."""
    missing = each(view.rollout.max_unavailable)
    if view.replaces_in_place(growing):
        missing = most(missing, least(less(view.desired, ONE_OF_EACH), ONE_OF_EACH))
    return less(view.desired, missing)


def _rolling_back(view: RolloutView) -> Step:
    """The failed target gives way to the largest old revision; the other ones stay as they are.

    It keeps one pod of each pool to look at, if there is surge to hold them and the old revision
    needs no place of theirs, but none that waits for a node. What the old revision has ready counts
    without a new canary: it has been serving.
    """
    rollout = view.rollout
    *others, keeper = view.living
    beside = total([other.serving for other in others])
    bounds = Bounds(
        size=most(less(view.desired, beside), ONE_OF_EACH),
        floor=less(_floor(view, keeper), beside),
        ceiling=less(
            view.desired + each(rollout.max_surge), total([other.wanted for other in others])
        ),
    )
    failing = replace(view.target, wanted=view.target.placed)
    may_stay = rollout.max_surge and not keeper.turned_away
    leave = least(failing.wanted, ONE_OF_EACH) if may_stay else NOTHING
    if not failing.alive:
        failing = replace(failing, wanted=leave)
    replicas = roll(keeper, [failing], bounds, trusted={keeper.revision}, leave=leave)
    replicas |= {other.revision: other.wanted for other in others}
    return Step(replicas, (), Phase.Failed, falling_back(view, keeper.revision, replicas))


def _trusted(view: RolloutView) -> set[str]:
    return {
        state.revision
        for state in (view.target, *view.olds)
        if view.proven(state) and view.admitted(state.revision)
    }


def _phase(view: RolloutView, replicas: dict[str, Counts]) -> Phase:
    planned = replicas[view.target.revision]
    waiting_only_for_proof = (
        both(planned)
        and planned == view.target.wanted
        and at_least(view.target.ready, planned)
        and not view.proven(view.target)
    )
    return Phase.Verifying if waiting_only_for_proof else Phase.Progressing


def recreate(view: RolloutView) -> Step:
    """Old revisions are removed first; the target starts when nothing of them is left.

    It also applies while old revisions are terminating.
    """
    target = view.target
    if not any(old.wanted or old.present for old in view.olds):
        return alone(view)
    stays = both_or_none(least(target.wanted, view.desired))
    phase = Phase.Failed if view.failed else Phase.Progressing
    return Step({target.revision: stays}, (), phase, leaving(view))


def blue_green(view: RolloutView) -> Step:
    """The target starts at full size beside the old one, routers switch, the old one goes.

    Old revisions that no router uses any more, such as a superseded target, are removed at once.
    """
    target, name = view.target, view.target.revision
    used = [old for old in view.living if _in_use(view, old.revision)] or view.living
    carrying = [old for old in used if old.revision == view.stable] or used
    fenced = not _in_use(view, name)
    whole = _can_take_over(view)
    begun = both(target.serving) and (_switches(view, any) or name == view.stable)
    stay = tuple(sorted(old.revision for old in carrying))
    kept = {old.revision: old.wanted for old in used}
    if fenced:
        kept |= _at_full_size(view, carrying)
    enough = at_least(total([old.serving for old in carrying]), view.desired)
    if target.serving and not (fenced or enough or view.verdict):
        stay = tuple(sorted((*stay, name)))  # It carries a share that the old would lack.

    if _switches(view, all) and whole:
        return Step({name: view.desired}, (name,), Phase.Switching, switching(view, kept))
    if view.failed:
        rest = least(target.placed, ONE_OF_EACH if fenced else view.desired)
        kept |= _at_full_size(view, carrying)
        message = falling_back(view, carrying[-1].revision, kept | {name: rest})
        return Step(kept | {name: rest}, stay, Phase.Failed, message)
    replicas = kept | {name: view.desired}
    if begun or whole:
        return Step(replicas, (name,), Phase.Switching, switching(view, kept))
    if not target.wanted and not fenced:
        # Before its first pod starts, or some routers would use it early.
        return Step(kept | {name: NOTHING}, stay, Phase.Progressing, fencing(view, stay))
    return Step(replicas, stay, _phase(view, replicas), progress(view, replicas))


def canary(view: RolloutView) -> Step:
    """As `blue_green`, but routers turn to the target by weights, and back if it does badly.

    The way back to the revision that served before needs no trial.
    """
    target, name, how = view.target, view.target.revision, view.rollout.canary
    trial = view.evidence.of(name)
    if how is None or name == view.stable or _switches(view, all):
        return blue_green(view)
    if trial is None and (view.failed or not _can_take_over(view)):
        return blue_green(view)
    problem = "" if both(target.serving) else "it lost all ready pods of a pool"
    if view.failed:
        problem = f"no further in {view.rollout.progress_deadline_seconds} s"
    trial = advance(how, trial or Trial(name), view.evidence, problem)
    if trial.failed:
        back = blue_green(replace(view, failed=True, verdict=trial.failed))
        return replace(back, trial=trial)
    if has_passed(how, trial):
        proven = replace(view, evidence=replace(view.evidence, stable=name))
        return replace(blue_green(proven), trial=trial)
    olds = [old for old in view.living if old.revision == view.stable] or view.living
    kept = {old.revision: old.wanted for old in view.living if _in_use(view, old.revision)}
    replicas = kept | _at_full_size(view, olds) | {name: view.desired}
    serving = tuple(sorted((name, *(old.revision for old in olds))))
    said, unjudged = on_trial(view, how, trial), is_unjudged(how, trial, view.evidence)
    return Step(replicas, serving, Phase.Switching, said, trial=trial, unjudged=unjudged)


def woken_first(view: RolloutView) -> Step:
    """What served before suspension or sleep comes back before the canary, whose trial begins."""
    name, stable = view.target.revision, view.stable
    replicas = {stable: view.desired, name: NOTHING}
    message = f"{name} waits for {stable}, beside which it is tried"
    return Step(replicas, (stable,), Phase.Progressing, message)


def _can_take_over(view: RolloutView) -> bool:
    return view.target_whole and at_least(view.target.usable, view.desired)


def _switches(view: RolloutView, how_many: Callable[[Iterable[bool]], bool]) -> bool:
    """Whether any or all routers send requests to the target only."""
    only = (view.target.revision,)
    return bool(view.routers) and how_many(serving == only for serving in view.routers)


def _in_use(view: RolloutView, revision: str) -> bool:
    """A router sends requests to it, or may: one that does not answer, or may use every one."""
    return not view.routers or any(not used or revision in used for used in view.routers)


def _at_full_size(view: RolloutView, carrying: list[RevisionState]) -> dict[str, Counts]:
    """Old revisions that carry the service alone follow the desired size, the largest for all."""
    *others, keeper = carrying
    beside = total([other.serving for other in others])
    size = most(less(view.desired, beside), ONE_OF_EACH)
    return {other.revision: other.wanted for other in others} | {keeper.revision: size}
