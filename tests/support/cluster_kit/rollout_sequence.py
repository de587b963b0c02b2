"""Computes a whole rollout step by step, where each pod is ready as soon as it is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Rollout
from diptych_operator.plan import Phase, RevisionState, Step, plan


def sequence(
    target: str,
    desired: Counts,
    rollout: Rollout,
    revisions: Iterable[RevisionState],
    *,
    limit: int = 10_000,
) -> Iterator[Step]:
    """Return the steps of a rollout until it is done, in a cluster where everything works at once.

    Raises RuntimeError after `limit` steps: a plan that never ends is a bug of the planner.
    """
    states = {state.revision: state for state in revisions}
    serving: tuple[str, ...] = ()
    for _ in range(limit):
        step = plan(
            target,
            desired,
            rollout,
            list(states.values()),
            verify=True,
            failed=False,
            routers_serving=[serving],
            suspend=False,
        )
        yield step
        if step.phase is Phase.Idle and not any(
            counts for revision, counts in step.replicas.items() if revision != target
        ):
            return
        serving = step.serving
        states = {name: running(name, counts) for name, counts in step.replicas.items()}
    raise RuntimeError(f"no end after {limit} steps")


def running(revision: str, counts: Counts) -> RevisionState:
    """Return a working revision whose wanted pods are all ready."""
    return replace(
        RevisionState(revision), wanted=counts, ready=counts, present=counts,
        verified=counts != NOTHING, whole=bool(counts) and not counts.prefill,
    )  # fmt: skip


def table(steps: Iterable[Step]) -> Iterator[str]:
    """Return a line for each step: prefill+decode pods wanted of both revisions, and their sum."""
    yield f"{'step':>4}  {'old':>9}  {'new':>9}  {'sum':>9}  {'serving':8}  phase"
    for number, step in enumerate(steps):
        old, new = (step.replicas.get(revision, NOTHING) for revision in ("old", "new"))
        cells = "  ".join(f"{f'{c.prefill}P {c.decode}D':>9}" for c in (old, new, old + new))
        yield f"{number:>4}  {cells}  {','.join(step.serving) or 'all':8}  {step.phase}"
