"""How a service gets from the pods it has to those it should have: one pure step at a time.

`plan` is called again and again with what is observed. It remembers nothing: where a rollout stands
is read off the pods, so a crash, a second change or a new size in its middle need no special care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diptych_operator.api.service import Rollout
from diptych_operator.counts import NOTHING, Counts
from diptych_operator.plan.state import Phase, RevisionState, Scene, Step, both, total
from diptych_operator.plan.strategies import alone, blue_green, paired_rolling, recreate
from diptych_operator.plan.words import pods

__all__ = ["Phase", "RevisionState", "Step", "plan"]


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
) -> Step:
    """The step towards `desired` pods of `target` and none of any other revision.

    `revisions`: all that exist, the target among them or not. `verify`: no old revision gives way
    to a target that no canary has crossed. `failed`: the target missed its progress deadline.
    `routers_serving`: one entry per router pod, its reported serving list; None for a router that
    did not answer, which is taken not to have switched.

    Raises ValueError if only one pool is to have pods.
    """
    if bool(desired.prefill) != bool(desired.decode):
        raise ValueError(f"both pools have pods or none has: {desired}")
    states = {state.revision: state for state in revisions}
    scene = Scene(
        target=states.pop(target, RevisionState(target)),
        olds=tuple(old for old in states.values() if old.wanted or old.present),
        desired=NOTHING if suspend else desired,
        rollout=rollout,
        verify=verify,
        failed=failed,
        routers=routers_serving,
    )
    step = _suspended(scene) if suspend else _step(scene)
    gone = sorted(set(states) - {old.revision for old in scene.olds})
    replicas = {old.revision: NOTHING for old in scene.olds} | dict(step.replicas)
    return replace(step, replicas=dict(sorted(replicas.items())), removable=tuple(gone))


def _step(scene: Scene) -> Step:
    if not both(scene.desired):
        serving = (scene.target.revision,) if scene.rollout.type == "BlueGreen" else ()
        message = "asleep: no pods until a request comes"
        return Step({scene.target.revision: NOTHING}, serving, Phase.Idle, message)
    if scene.rollout.type == "Recreate":
        return recreate(scene)
    if not scene.living:
        return alone(scene)
    return blue_green(scene) if scene.rollout.type == "BlueGreen" else paired_rolling(scene)


def _suspended(scene: Scene) -> Step:
    left = total([state.present for state in (scene.target, *scene.olds)])
    message = f"suspended: {pods(left)} on the way out" if left else "suspended: no pods"
    serving = (scene.target.revision,) if scene.rollout.type == "BlueGreen" else ()
    return Step({scene.target.revision: NOTHING}, serving, Phase.Suspended, message)
