"""The arithmetic of a rollout of two pools in step: one revision grows while others shrink.

For each pool, with `size` pods wanted in the end:

    ceiling = size + maxSurge            the wanted pods of all revisions never exceed it
    floor   = size - maxUnavailable      ready pods never fall below it by what is done here
    need    = floor - credit             what must stay of the revisions that give way

Surge counts pods that are wanted. A pod that drains is no longer wanted, and counts for nothing.

*Credit* is the number of the growing revision's ready pods, in the proportion in which they are
wanted: with 4 prefill pods and 1 decode pod ready out of 4 and 4, the credit is one of each. A
revision that is not trusted has no credit.

*The line.* With L pods of the larger pool, whose final number is N, a revision should have L * M/N
of the smaller, whose final number is M, and never none. Revisions that give way round up, the
growing one rounds down. `ceil(x) + floor(y) <= ceil(x + y)`: the two fit below the ceiling and stay
above the floor for as long as there is one of each.

*Why it cannot stall.* Let all wanted pods be ready, and call a pool full if it is at its ceiling. A
full pool lies maxSurge + maxUnavailable >= 1 above its floor, so a pod of it may go. A pool that is
not full has room for the growing revision. Either way something moves, and as nothing ever moves
back, the end is near. Three cases need a word:

- The growing revision is to start, but old revisions round up to all of the smaller pool's
  places: they give up a pod there, which the floor of a full pool allows.
- There are so many old revisions that one pod each fills a pool. Then the largest of them grows and
  the others give way to it until one is gone.
- The ceiling of a pool is 1 (one pod, maxSurge 0): two revisions cannot be there at once. All old
  pods go first. maxUnavailable is at least 1 then: the user accepted an empty pool.

*Places.* A cluster may have room for fewer pods than the ceiling allows, and its scheduler gives
places in any order: to two prefill pods rather than to one of each pool. So the growing revision
asks for one more pair, and for none while one of its pods has no node. Old pods give way to ready
ones as ever, and each that goes leaves a place. Where the floor lets none go, a caller that is told
so by the scheduler lowers it by a pair (`strategies._floor`).

So no revision ever has pods in one pool only. A revision that is made with one pool has each of its
pods counted in both (`state.in_both`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from diptych_operator.api.names import POOLS
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.plan.state import (
    ONE_OF_EACH,
    RevisionState,
    both,
    both_or_none,
    least,
    less,
    most,
    total,
    with_count,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits on the sums over all revisions that take part."""

    size: Counts
    """The growing revision's pods at the end; at least 1 in each pool."""
    floor: Counts
    """Ready pods that must stay."""
    ceiling: Counts
    """The most pods that may be wanted."""

    @property
    def larger(self) -> str:
        return "prefill" if self.size.prefill > self.size.decode else "decode"

    @property
    def smaller(self) -> str:
        return "decode" if self.larger == "prefill" else "prefill"

    def rounded_up(self, larger: int) -> int:
        """Return the pods of the smaller pool for this many of the larger: at least 1."""
        small, large = self.size.of(self.smaller), self.size.of(self.larger)
        return max(1, -(-larger * small // large))

    def rounded_down(self, larger: int) -> int:
        small, large = self.size.of(self.smaller), self.size.of(self.larger)
        return max(1, larger * small // large)

    def furthest(self, smaller: int) -> int:
        """Return the most of the larger pool for which this many of the smaller are enough."""
        small, large = self.size.of(self.smaller), self.size.of(self.larger)
        return ((smaller + 1) * large - 1) // small

    def near_the_line(self, counts: Counts) -> Counts:
        """Return as many of these pods as have enough of the other pool beside them."""
        if not both(counts):
            return NOTHING
        smaller = min(counts.of(self.smaller), self.rounded_up(counts.of(self.larger)))
        larger = min(counts.of(self.larger), self.furthest(smaller))
        return with_count(with_count(NOTHING, self.larger, larger), self.smaller, smaller)


def roll(
    growing: RevisionState,
    giving: Sequence[RevisionState],
    bounds: Bounds,
    *,
    trusted: Collection[str],
    leave: Counts = NOTHING,
) -> dict[str, Counts]:
    """Return the wanted pods of each revision, as `growing` takes the place of those in `giving`.

    The revisions of `giving` shrink in order; the last of them stays longest. `leave`: pods that
    each of them keeps to the end, if it has them. `trusted`: revisions whose ready pods count as
    credit when they grow.
    """
    grown = both_or_none(least(growing.wanted, bounds.size))
    credit = _credit(growing, grown, bounds) if growing.revision in trusted else NOTHING
    retreat = _Retreat(giving, bounds, need=less(bounds.floor, credit), leave=leave)
    retreat.give_way()
    if not grown and not retreat.leaves_a_place():
        if min(bounds.ceiling.prefill, bounds.ceiling.decode) < 2:
            return {growing.revision: bounds.size} | {old.revision: NOTHING for old in giving}
        keeper = giving[-1]
        return {growing.revision: NOTHING} | roll(keeper, giving[:-1], bounds, trusted=trusted)
    grown = both_or_none(most(least(grown, retreat.room()), credit))
    retreat.make_room(grown)
    if growing.turned_away:
        retreat.make_places()
    if not growing.unplaced:
        grown = _grow(grown, retreat, bounds)
    return {growing.revision: grown} | retreat.wanted


def _credit(growing: RevisionState, wanted: Counts, bounds: Bounds) -> Counts:
    """Ready pods in the proportion in which they are wanted: the scarcer pool decides. While some
    of those wait for a node, the line decides too: what has one may be all that there can be."""
    if not both(wanted):
        return NOTHING
    ready = least(growing.usable, wanted)
    credit = _in_proportion(ready, wanted)
    return most(credit, bounds.near_the_line(ready)) if growing.unplaced else credit


def _in_proportion(ready: Counts, wanted: Counts) -> Counts:
    if ready.prefill * wanted.decode <= ready.decode * wanted.prefill:
        have, of = ready.prefill, wanted.prefill
    else:
        have, of = ready.decode, wanted.decode
    return Counts(-(-wanted.prefill * have // of), -(-wanted.decode * have // of))


def _grow(grown: Counts, retreat: _Retreat, bounds: Bounds) -> Counts:
    """A pair larger, along the line, if there is room."""
    room = most(grown, least(grown + ONE_OF_EACH, least(bounds.size, retreat.room())))
    if not both(room):
        return grown
    larger, smaller = bounds.larger, bounds.smaller
    small = room.of(smaller)
    count = room.of(larger)
    if small < min(bounds.size.of(smaller), retreat.most_room(smaller)):
        # The smaller pool gets more room later, so the larger one waits for it at the line.
        count = max(grown.of(larger), min(count, bounds.furthest(small)))
    target = max(grown.of(smaller), min(small, bounds.rounded_down(count)))
    return with_count(with_count(NOTHING, larger, count), smaller, target)


class _Retreat:
    """The revisions that give way, pod by pod."""

    def __init__(
        self, giving: Sequence[RevisionState], bounds: Bounds, *, need: Counts, leave: Counts
    ) -> None:
        self._bounds = bounds
        self._need = need
        self._leave = leave
        self.wanted: dict[str, Counts] = {old.revision: old.wanted for old in giving}
        self._ready = {old.revision: old.serving for old in giving}

    def give_way(self) -> None:
        while (move := next(filter(self._allowed, self._moves()), None)) is not None:
            self._take(*move)

    def leaves_a_place(self) -> bool:
        """A further revision could have a pod in each pool."""
        return all(self.most_room(role) >= 1 for role in POOLS)

    def most_room(self, role: str) -> int:
        """Room in a pool if each remaining revision kept one pod there."""
        remaining = sum(1 for counts in self.wanted.values() if counts)
        return self._bounds.ceiling.of(role) - remaining

    def room(self) -> Counts:
        return less(self._bounds.ceiling, total(list(self.wanted.values())))

    def make_room(self, grown: Counts) -> None:
        """Give up pods that rounding up kept, where the growing revision needs their place."""
        larger, smaller = self._bounds.larger, self._bounds.smaller
        self._release(larger, max(1, grown.of(larger)))
        reach = min(grown.of(larger) + 1, self._bounds.size.of(larger), self.room().of(larger))
        claim = self._bounds.rounded_down(max(reach, grown.of(larger)))
        self._release(smaller, min(claim, self.most_room(smaller)))

    def make_places(self) -> None:
        """Give up what the floor lets go, though it be off the line: new pods find no node."""
        for role in POOLS:
            self._release(role, self._bounds.ceiling.of(role))

    def _release(self, role: str, claim: int) -> None:
        loss = with_count(NOTHING, role, 1)
        while self.room().of(role) < claim:
            fullest = max(self.wanted, key=lambda name: self.wanted[name].of(role), default=None)
            if fullest is None or self.wanted[fullest].of(role) < 2:
                return
            if not self._allowed((fullest, loss)):
                return
            self._take(fullest, loss)

    def _moves(self) -> Iterator[tuple[str, Counts]]:
        """What may go next, best first: pods that carry nothing, then pods along the line."""
        for name, wanted in self.wanted.items():
            for role in POOLS:
                spare = max(1, self._leave.of(role))
                if wanted.of(role) > max(spare, self._ready[name].of(role)):
                    yield name, with_count(NOTHING, role, 1)
        for name, wanted in self.wanted.items():
            if (loss := self._along_the_line(wanted)) is not None:
                yield name, loss

    def _along_the_line(self, wanted: Counts) -> Counts | None:
        if not wanted or wanted == self._leave:
            return None
        if not both(wanted) or wanted == Counts(1, 1):
            return wanted
        larger, smaller = self._bounds.larger, self._bounds.smaller
        over = wanted.of(smaller) > self._bounds.rounded_up(wanted.of(larger))
        return with_count(NOTHING, smaller if over else larger, 1)

    def _allowed(self, move: tuple[str, Counts]) -> bool:
        """Enough stays. Ready pods are safe by that, because those that are not ready go first."""
        _, loss = move
        wanted = total(list(self.wanted.values()))
        return all(
            not loss.of(role) or wanted.of(role) - loss.of(role) >= self._need.of(role)
            for role in POOLS
        )

    def _take(self, name: str, loss: Counts) -> None:
        self.wanted[name] = less(self.wanted[name], loss)
        self._ready[name] = least(self._ready[name], self.wanted[name])
