"""The input and the output of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from diptych_operator.api.names import POOLS
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import Rollout
from diptych_operator.plan.trial import Evidence, Trial


class Phase(StrEnum):
    Idle = "Idle"
    """Only the target serves, at full size, or everything is scaled to zero."""
    Progressing = "Progressing"
    Verifying = "Verifying"
    """The target's pods are ready, but no canary has received KV from its prefill pool yet."""
    Switching = "Switching"
    """Routers are asked to change from the old revision to the target, at once or by weights."""
    Failed = "Failed"
    Suspended = "Suspended"


@dataclass(frozen=True, slots=True)
class RevisionState:
    """One revision as it is now."""

    revision: str
    wanted: Counts = NOTHING
    """spec.replicas of its Deployments. It may lag behind the last plan."""
    ready: Counts = NOTHING
    """Ready pods by the kubelet. There may be more than `wanted` while the pool shrinks."""
    present: Counts = NOTHING
    """Pods that exist, whether ready, starting or terminating."""
    verified: bool = False
    """Whether a canary has received KV from this revision's prefill pool."""
    whole: bool = False
    """Whether its only pool is decode, whose engines compute prompts too."""
    unplaced: Counts = NOTHING
    """Wanted pods that no node has yet."""
    turned_away: Counts = NOTHING
    """Those of them for which the scheduler has found no node for a while."""
    trusted: Counts | None = None
    """Engines that every reporting router trusts; None if that does not matter, or none reports."""

    @property
    def placed(self) -> Counts:
        """Wanted pods that have a node; none unless they can form a pair."""
        return both_or_none(less(self.wanted, self.unplaced))

    @property
    def usable(self) -> Counts:
        """Ready pods that routers use. Routers do not use an engine before its canary succeeds."""
        return self.ready if self.trusted is None else least(self.ready, self.trusted)

    @property
    def serving(self) -> Counts:
        """Ready pods that are to stay; none unless they can form a pair."""
        return both_or_none(least(self.ready, self.wanted))

    @property
    def alive(self) -> bool:
        """Whether it is worth protecting: it decodes, or it has worked and may soon work again.

        A revision that never worked can give up all its pods at once. That it is not verified
        proves nothing: the routers may be out of reach.
        """
        return both(self.wanted) and (self.verified or self.ready.decode > 0)


@dataclass(frozen=True, slots=True)
class Step:
    """The state to establish now. Applying a step twice has the same effect as applying it once."""

    replicas: Mapping[str, Counts]
    """The wanted pods of the target and of each other revision that still has some."""
    serving: tuple[str, ...]
    """Revisions that routers may use. Empty means all."""
    phase: Phase
    message: str
    """A message for people: what happens and what it waits for."""
    removable: tuple[str, ...] = ()
    """Revisions without wanted or remaining pods: their objects may be deleted."""
    trial: Trial | None = None
    """Where the target stands as a canary; None if it is none."""
    unjudged: bool = False
    """As a canary it only waits for requests, which may never come."""
    in_place: frozenset[str] = frozenset()
    """Pools of the target whose pods make room for those of a changed template."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """The input of every strategy."""

    target: RevisionState
    olds: tuple[RevisionState, ...]
    """The other revisions with wanted or remaining pods."""
    desired: Counts
    rollout: Rollout
    verify: bool
    failed: bool
    full: bool
    """Pods of the target found no node, now or when it failed."""
    whole: frozenset[str]
    """Revisions of one pool. Their pods are counted in both pools (`in_both`)."""
    routers: Sequence[tuple[str, ...] | None]
    """The serving list that each router reports; None if it did not answer."""
    evidence: Evidence
    """What is known of a canary."""
    verdict: str = ""
    """Why the target failed as a canary."""

    @property
    def stable(self) -> str:
        """The revision that serves beside a canary, and that it falls back on; empty if there is
        none."""
        return self.evidence.stable if self.rollout.type == "Canary" else ""

    @property
    def living(self) -> list[RevisionState]:
        """Old revisions that carry requests, the one that carries least first.

        If none does, the largest that is alive: it may recover in a moment.
        """
        alive = sorted(
            (old for old in self.olds if old.alive),
            key=lambda old: (sum_of(old.serving), sum_of(old.wanted), old.revision),
        )
        return [old for old in alive if old.serving] or alive[-1:]

    @property
    def target_ready(self) -> bool:
        return at_least(least(self.target.ready, self.target.wanted), self.desired)

    @property
    def target_whole(self) -> bool:
        """Whether the target could serve the whole load alone."""
        return self.target_ready and self.proven(self.target)

    def as_it_is(self, revision: str, counts: Counts) -> Counts:
        """Return the pods that a revision has now, counted as the cluster is to have them."""
        return in_one(counts) if revision in self.whole else counts

    def proven(self, revision: RevisionState) -> bool:
        return revision.verified or not self.verify

    def replaces_in_place(self, growing: RevisionState) -> bool:
        """Whether pods of other revisions make room for those that the scheduler turned away.

        Never the only one of a pool: that would be an outage. The way back needs no leave.
        """
        away = growing.turned_away
        asked = self.failed or self.rollout.when_full == "ReplaceInPlace"
        return asked and bool(away) and all(self.desired.of(r) > 1 for r in POOLS if away.of(r))

    def admitted(self, revision: str) -> bool:
        """Whether no router that answered leaves this revision out."""
        return all(revision in serving for serving in self.routers if serving)


def in_both(state: RevisionState) -> RevisionState:
    """Count each pod of a revision of one pool in both pools, because it does the work of both."""
    trusted = None if state.trusted is None else each(state.trusted.decode)
    return replace(
        state,
        wanted=each(state.wanted.decode),
        ready=each(state.ready.decode),
        present=each(state.present.decode),
        unplaced=each(state.unplaced.decode),
        turned_away=each(state.turned_away.decode),
        trusted=trusted,
    )


def in_one(counts: Counts) -> Counts:
    """Undo `in_both`: a pod stays as long as either pool needs it."""
    return Counts(0, max(counts.prefill, counts.decode))


def both(counts: Counts) -> bool:
    return counts.prefill > 0 and counts.decode > 0


def both_or_none(counts: Counts) -> Counts:
    """Return no pods at all if one of the pools would be empty: one alone cannot serve."""
    return counts if both(counts) else NOTHING


def least(a: Counts, b: Counts) -> Counts:
    return Counts(min(a.prefill, b.prefill), min(a.decode, b.decode))


def most(a: Counts, b: Counts) -> Counts:
    return Counts(max(a.prefill, b.prefill), max(a.decode, b.decode))


def less(a: Counts, b: Counts) -> Counts:
    """Return a - b, but at least 0."""
    return Counts(max(0, a.prefill - b.prefill), max(0, a.decode - b.decode))


def at_least(a: Counts, b: Counts) -> bool:
    return a.prefill >= b.prefill and a.decode >= b.decode


def with_count(counts: Counts, role: str, number: int) -> Counts:
    if role == "prefill":
        return Counts(number, counts.decode)
    return Counts(counts.prefill, number)


ONE_OF_EACH = Counts(1, 1)


def each(number: int) -> Counts:
    return Counts(number, number)


def sum_of(counts: Counts) -> int:
    return counts.prefill + counts.decode


def total(counts: Sequence[Counts]) -> Counts:
    return sum(counts, NOTHING)
