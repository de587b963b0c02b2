"""Computes which blocks a lease has, where vLLM keeps a model's KV in several groups.

A group is a set of layers with one list of blocks for each request; all groups take their blocks
from one pool. Layers that attend to a *window* of the last tokens keep only the blocks of these;
before them, vLLM's list has the null block.

A lease has the blocks that the token after its last one attends to: those of the first group, then
those of the second, and so on. Both engines compute them from the number of tokens, so that null
blocks are neither lent nor fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from diptych_kv_transfer.memory.layout import KVGroup
from diptych_protocol import InvalidRequestError

BlockIds = Sequence[Sequence[int]]
"""A request's blocks: a list for each group, from the request's first token on."""
NULL_BLOCK: Final = 0
"""vLLM's block without KV, which replaces blocks that a group has not kept."""
KEPT_WHOLE: Final = ("FullAttentionSpec", "MLAAttentionSpec")
KEPT_IN_A_WINDOW: Final = "SlidingWindowSpec"
"""vLLM's names of the kinds of groups that were tested. Others keep blocks by other rules, or keep
states that are no blocks."""


def group_of(kind: str, block_size: int, window: int | None) -> KVGroup:
    """Read vLLM's description of a group.

    kind: the name of its class in vLLM. `window` has no meaning for groups that keep all.

    Raises `InvalidRequestError` for a kind that was not tested, which it names.
    """
    if kind in KEPT_WHOLE:
        return KVGroup(block_size)
    if kind == KEPT_IN_A_WINDOW and window is not None:
        return KVGroup(block_size, window)
    raise InvalidRequestError(
        f"the Diptych connector: KV of the kind {kind} was not tested; it hands over "
        f"{', '.join((*KEPT_WHOLE, KEPT_IN_A_WINDOW))}",
        param="model",
    )


@dataclass(frozen=True, slots=True)
class VllmKVGroups:
    """All groups of a model, in vLLM's order. Lists of blocks come group by group in this order."""

    groups: tuple[KVGroup, ...]

    @classmethod
    def of(cls, layers: Iterable[Iterable[KVGroup]]) -> VllmKVGroups:
        """Read how each layer of each group is kept.

        Raises `InvalidRequestError` if the layers of a group differ in this.
        """
        groups: list[KVGroup] = []
        for number, found in enumerate(map(set, layers)):
            if len(found) != 1:
                raise InvalidRequestError(
                    f"the Diptych connector: KV cache group {number} mixes layers that keep "
                    f"{len(found)} different numbers of blocks, which was not tested",
                    param="model",
                )
            groups += found
        return cls(tuple(groups))

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks the lease of a prompt of this many tokens has."""
        return sum(len(group.kept(num_tokens)) for group in self.groups)

    def lent(self, num_tokens: int, block_ids: BlockIds) -> list[int] | None:
        """Return the blocks of a lease in order, of the request whose blocks these are.

        None: one of them is gone. A request that continued after its prompt has lost the first
        blocks of the prompt's windows.
        """
        lent: list[int] = []
        for group, ids in zip(self.groups, block_ids, strict=True):
            kept = group.kept(num_tokens)
            lent += ids[kept.start : kept.stop]
        return lent if len(lent) == self.num_blocks(num_tokens) and NULL_BLOCK not in lent else None

    @property
    def one_whole(self) -> bool:
        """Whether there is one group, and it keeps all blocks."""
        return len(self.groups) == 1 and self.groups[0].window is None

    def full(self, num_tokens: int, block_ids: BlockIds) -> list[int]:
        """Return the first blocks of a lease, of a longer prompt, that have the KV of the first
        `num_tokens` tokens. None of them unless `one_whole`: the blocks of other groups come first
        in a lease when they are all there, or drop out of a window.
        """
        if not self.one_whole:
            return []
        return list(block_ids[0][: num_tokens // self.groups[0].block_size])

    def wanted(self, num_tokens: int, num_here: int, block_ids: BlockIds) -> dict[int, int] | None:
        """Return a map from blocks of the lease to our blocks.

        num_here: how many of the lease's `num_tokens` tokens, from the first one on, are here.
        block_ids: the blocks of the request that needs the rest.

        None: the lease does not fill exactly these blocks, and vLLM would use the others.
        """
        wanted: dict[int, int] = {}
        num_before = 0
        for group, ids in zip(self.groups, block_ids, strict=True):
            kept = group.kept(num_tokens)
            first, rest = divmod(num_here, group.block_size)
            if rest or len(ids) < kept.stop:
                return None
            for place in range(first, kept.stop):
                if (ids[place] != NULL_BLOCK) != (place in kept):
                    return None
                if place in kept:
                    wanted[num_before + place - kept.start] = ids[place]
            num_before += len(kept)
        return wanted

    def serves_last(self, num_tokens: int) -> bool:
        """Whether a lease has everything that its own last token attends to. vLLM computes that
        token again if the prompt ends there. Its windows begin a token earlier."""
        return all(
            group.kept(num_tokens - 1).start == group.kept(num_tokens).start
            for group in self.groups
        )

    def __str__(self) -> str:
        return " ".join(map(str, self.groups))
