"""What a plan is made from, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from diptych_operator.api.service import Rollout
from diptych_operator.counts import NOTHING, Counts


class Phase(StrEnum):
    Idle = "Idle"
    """The target serves alone and whole, or everything sleeps."""
    Progressing = "Progressing"
    Verifying = "Verifying"
    """The target's pods are ready; a canary has yet to cross its hinge."""
    Switching = "Switching"
    """BlueGreen: routers are to leave the old revision for the target."""
    Failed = "Failed"
    Suspended = "Suspended"


@dataclass(frozen=True, slots=True)
class RevisionState:
    """One revision as it is now."""

    revision: str
    wanted: Counts = NOTHING
    """spec.replicas of its Deployments. It may lag behind what was planned last."""
    ready: Counts = NOTHING
    """By the kubelet; may exceed `wanted` while a smaller number settles."""
    present: Counts = NOTHING
    """Pods that exist, whether ready, starting or on their way out."""
    verified: bool = False
    """A canary crossed this revision's hinge."""
    whole: bool = False
    """Its pods are of one pool, decode, and compute prompts too."""
    trusted: Counts | None = None
    """Engines that every reporting router sends requests to; None if that does not matter, or if
    no router reports."""

    @property
    def usable(self) -> Counts:
        """Ready pods that routers use: a ready engine is of no use before its own canary."""
        return self.ready if self.trusted is None else least(self.ready, self.trusted)

    @property
    def serving(self) -> Counts:
        """Ready pods that are to stay; none unless they can form a pair."""
        return both_or_none(least(self.ready, self.wanted))

    @property
    def alive(self) -> bool:
        """It is worth protecting: it decodes, or it has worked and may be back in a moment.

        A revision that never worked has nothing to lose and gives up all its pods at once. Not
        being verified alone proves nothing: the routers may merely be out of reach.
        """
        return both(self.wanted) and (self.verified or self.ready.decode > 0)


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be true now. Applying a step twice does nothing more than applying it once."""

    replicas: Mapping[str, Counts]
    """Pods wanted of the target and of each other revision that still has some."""
    serving: tuple[str, ...]
    """Revisions that routers may use; empty: every one."""
    phase: Phase
    message: str
    """For people: what happens and what it waits for."""
    removable: tuple[str, ...] = ()
    """Revisions of which nothing is wanted and nothing left: their objects may be deleted."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """Everything that a strategy looks at."""

    target: RevisionState
    olds: tuple[RevisionState, ...]
    """The other revisions of which anything is wanted or left."""
    desired: Counts
    rollout: Rollout
    verify: bool
    failed: bool
    whole: frozenset[str]
    """Revisions of one pool; their pods are counted in both (`in_both`)."""
    routers: Sequence[tuple[str, ...] | None]
    """The serving list that each router reports; None: it did not answer."""

    @property
    def living(self) -> list[RevisionState]:
        """Old revisions that carry requests, the one that carries least first.

        If none does, the largest that is alive: with luck it will be back in a moment.
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
        """The target could carry the service alone."""
        return self.target_ready and self.proven(self.target)

    def as_it_is(self, revision: str, counts: Counts) -> Counts:
        """Pods of a revision as the cluster is to have them."""
        return in_one(counts) if revision in self.whole else counts

    def proven(self, revision: RevisionState) -> bool:
        return revision.verified or not self.verify

    def admitted(self, revision: str) -> bool:
        """No router that answered is told to leave this revision out."""
        return all(revision in serving for serving in self.routers if serving)


def in_both(state: RevisionState) -> RevisionState:
    """A revision of one pool, for the arithmetic of two: a pod that does the work of both pools
    counts in each of them."""
    wanted, ready, present = (
        each(counts.decode) for counts in (state.wanted, state.ready, state.present)
    )
    trusted = None if state.trusted is None else each(state.trusted.decode)
    return replace(state, wanted=wanted, ready=ready, present=present, trusted=trusted)


def in_one(counts: Counts) -> Counts:
    """Back again. As long as either pool needs a pod, it stays."""
    return Counts(0, max(counts.prefill, counts.decode))


def both(counts: Counts) -> bool:
    return counts.prefill > 0 and counts.decode > 0


def both_or_none(counts: Counts) -> Counts:
    """One pool without the other serves nobody."""
    return counts if both(counts) else NOTHING


def least(a: Counts, b: Counts) -> Counts:
    return Counts(min(a.prefill, b.prefill), min(a.decode, b.decode))


def most(a: Counts, b: Counts) -> Counts:
    return Counts(max(a.prefill, b.prefill), max(a.decode, b.decode))


def less(a: Counts, b: Counts) -> Counts:
    """a - b, never below 0."""
    return Counts(max(0, a.prefill - b.prefill), max(0, a.decode - b.decode))


def at_least(a: Counts, b: Counts) -> bool:
    return a.prefill >= b.prefill and a.decode >= b.decode


def with_count(counts: Counts, role: str, number: int) -> Counts:
    if role == "prefill":
        return Counts(number, counts.decode)
    return Counts(counts.prefill, number)


def each(number: int) -> Counts:
    return Counts(number, number)


def sum_of(counts: Counts) -> int:
    return counts.prefill + counts.decode


def total(counts: Sequence[Counts]) -> Counts:
    return sum(counts, NOTHING)
