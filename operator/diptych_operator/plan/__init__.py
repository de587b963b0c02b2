"""Plans how a service gets from the pods it has to those it should have, one step at a time.

`plan` is called again and again with what is observed. It keeps no state: the pods show how far a
rollout is. So a crash, a second change or a new size in the middle needs no special care. It
performs no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Rollout
from diptych_operator.plan.messages import pods
from diptych_operator.plan.state import (
    Phase,
    RevisionState,
    RolloutView,
    Step,
    both,
    each,
    in_both,
    total,
)
from diptych_operator.plan.strategies import (
    alone,
    blue_green,
    canary,
    paired_rolling,
    recreate,
    woken_first,
)
from diptych_operator.plan.trial import Evidence, Trial, has_passed

__all__ = ["Evidence", "Phase", "RevisionState", "Step", "Trial", "plan"]

NO_EVIDENCE: Final = Evidence()


def plan(
    target: str,
    desired: Counts,
    rollout: Rollout,
    revisions: Sequence[RevisionState],
    *,
    verify: bool,
    failed: bool,
    routers_serving: Sequence[tuple[str, ...] | None],
    suspend: bool,
    full: bool = False,
    evidence: Evidence = NO_EVIDENCE,
) -> Step:
    """Return the next step towards `desired` pods of `target` and none of any other revision.

    `revisions`: all that exist, with or without the target. `verify`: old revisions keep their pods
    until a canary has received its KV from prefill in the target. `failed`: the target missed its
    progress deadline, or gave up for want of nodes, which is `full`. `routers_serving`: one entry
    per router pod, the serving list that it reported; None for a router that did not answer, which
    counts as not switched. `evidence`: what is known of a canary.

    If the engines of the target compute both prompts and answers, its only pool is decode, and
    `desired` has no prefill pods. Another revision says so in its state (`whole`).

    Raises ValueError if only prefill is to have pods.
    """
    if desired.prefill and not desired.decode:
        raise ValueError(f"prefill pods serve nobody without decode pods: {desired}")
    whole = frozenset(state.revision for state in revisions if state.whole) - {target}
    if desired.decode and not desired.prefill:
        whole |= {target}
        desired = each(desired.decode)
    states = {
        state.revision: in_both(state) if state.revision in whole else state for state in revisions
    }
    resting = states.get(evidence.stable) if _has_a_trial(target, rollout, evidence) else None
    view = RolloutView(
        target=states.pop(target, RevisionState(target)),
        olds=tuple(old for old in states.values() if old.wanted or old.present or old is resting),
        desired=NOTHING if suspend else desired,
        rollout=rollout,
        verify=verify,
        failed=failed,
        full=full,
        whole=whole,
        routers=routers_serving,
        evidence=evidence,
    )
    wakes = resting is not None and not view.target.wanted
    step = _suspended(view) if suspend else _step(view, wakes=wakes)
    gone = sorted(set(states) - {old.revision for old in view.olds})
    replicas = {old.revision: NOTHING for old in view.olds} | dict(step.replicas)
    return replace(
        step,
        replicas={name: view.as_it_is(name, replicas[name]) for name in sorted(replicas)},
        removable=tuple(gone),
    )


def _step(view: RolloutView, *, wakes: bool) -> Step:
    if not both(view.desired):
        first = view.stable if wakes else view.target.revision
        serving = (first,) if view.rollout.switches else ()
        message = "asleep: no pods until a request comes"
        return Step({view.target.revision: NOTHING}, serving, Phase.Idle, message)
    if view.rollout.type == "Recreate":
        return recreate(view)
    if not view.living:
        return woken_first(view) if wakes else alone(view)
    strategies = {"BlueGreen": blue_green, "Canary": canary}
    return strategies.get(view.rollout.type, paired_rolling)(view)


def _suspended(view: RolloutView) -> Step:
    states = (view.target, *view.olds)
    left = total([view.as_it_is(state.revision, state.present) for state in states])
    message = f"suspended: {pods(left)} on the way out" if left else "suspended: no pods"
    name = view.target.revision
    serving = (name,) if view.rollout.switches else ()
    return Step({name: NOTHING}, serving, Phase.Suspended, message)


def _has_a_trial(target: str, rollout: Rollout, evidence: Evidence) -> bool:
    """Whether it has to pass one beside what served last: that is kept although it has no pods."""
    how, trial = rollout.canary, evidence.before
    if rollout.type != "Canary" or how is None or target == evidence.stable:
        return False
    return trial is None or trial.revision != target or not has_passed(how, trial)
