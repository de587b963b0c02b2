"""A model whose answer depends visibly on every cached position, and what it ought to answer.

Its KV memory holds one 64-bit value for each position. That of position i is a hash of the token
there and of all values before it, read back through the block table; the sampled token is a hash of
all of them. A stale, foreign, torn or lost value anywhere therefore changes every token after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import Pending, ScheduledRequest, StepPlan, StepResult
from diptych_protocol.block_hashes import extend_block_hashes

VOCABULARY = 1 << 20
"""So large that a wrong context does not give the right token by chance."""
BLOCK = 2
"""Tokens in a block: few, so that short prompts have many."""


class Memory:
    """The KV memory of one engine: `BLOCK` values for each block. Blocks that nobody may read any
    more are filled with values that stand nowhere else."""

    def __init__(self, num_blocks: int, name: str) -> None:
        self.values = [0] * (num_blocks * BLOCK)
        self._poison = -(crc32(name.encode()) << 24) - 1
        self.poison(range(num_blocks))

    def poison(self, blocks: Sequence[int]) -> None:
        """Make whoever reads these blocks before they are written stand out."""
        for block in blocks:
            for slot in range(block * BLOCK, (block + 1) * BLOCK):
                self._poison -= 1
                self.values[slot] = self._poison

    def block(self, block: int) -> tuple[int, ...]:
        """The values of a block."""
        return tuple(self.values[block * BLOCK : (block + 1) * BLOCK])


class PoisoningPool(BlockPool):
    """The engine's own pool; a block loses its content as soon as that may not be read again."""

    def __init__(self, num_blocks: int, memory: Memory) -> None:
        super().__init__(num_blocks)
        self._memory = memory
        self.evictions = 0

    def allocate(self, count: int) -> list[int]:
        remembered = len(self._block_of)
        blocks = super().allocate(count)
        self.evictions += remembered - len(self._block_of)
        self._memory.poison(blocks)
        return blocks

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids)
        self._memory.poison(
            [b for b in block_ids if self._holders[b] == 0 and self._hash_of[b] is None]
        )

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def remembered(self) -> Mapping[bytes, int]:
        """The block of every prefix that may be read."""
        return {name: block for name, block in self._block_of.items() if isinstance(name, bytes)}


class Share(NamedTuple):
    """A request's part of a step, as it was when the step was launched."""

    request_id: str
    slots: list[int]
    start: int
    tokens: list[int]
    """Empty: the one that the step before sampled."""
    samples: bool
    root: int


class HashingRunner:
    """Computes the values of a plan's positions, and samples: steps in their order, each as late as
    a device may, when somebody waits for it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._last: dict[str, int] = {}
        """What each request sampled last."""
        self._queue: deque[tuple[list[Share], list[int]]] = deque()
        """Steps that are not computed yet, and where their samples go."""
        self.steps = self.steps_ahead = 0

    def launch(self, plan: StepPlan) -> Pending:
        self.steps += 1
        self.steps_ahead += plan.ahead
        step = [_share(share, ahead=plan.ahead) for share in plan.scheduled], list[int]()
        self._queue.append(step)

        def pending() -> StepResult:
            while any(step is other for other in self._queue):
                self._compute(*self._queue.popleft())
            return StepResult(step[1], None, None)

        return pending

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Nothing here asks the host."""
        return True

    def _compute(self, shares: list[Share], sampled: list[int]) -> None:
        values = self._memory.values
        for share in shares:
            context = [values[slot] for slot in share.slots[: share.start]]
            tokens = share.tokens or [self._last[share.request_id]]
            for slot, token in zip(share.slots[share.start :], tokens, strict=True):
                values[slot] = value_of(share.root, token, context)
                context.append(values[slot])
            if share.samples:
                self._last[share.request_id] = sample(context)
                sampled.append(self._last[share.request_id])

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """One that sleeps loses its KV memory, and reads what it had; nothing else matters."""
        if method == "_drop_kv_cache":
            self._memory.poison(range(len(self._memory.values) // BLOCK))
        return [""]

    def close(self) -> None:
        """Nothing was started."""


def _share(share: ScheduledRequest, *, ahead: bool) -> Share:
    request, start, end = share.request, share.start, share.start + share.num_tokens
    blocks, tokens = request.block_ids, [] if ahead else request.token_ids[start:end]
    slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(end)]
    root = root_of(request.cache_salt)
    return Share(request.request_id, slots, start, tokens, share.samples, root)


def root_of(cache_salt: str | None) -> int:
    """What a sequence's first value depends on besides its token."""
    return crc32((cache_salt or "").encode())


def value_of(root: int, token: int, context: list[int]) -> int:
    """The KV of a token after a context."""
    return hash((root, token, *context))


def sample(context: list[int]) -> int:
    """The next token. [1, VOCABULARY): 0 is nobody's answer."""
    return 1 + hash((*context, 7)) % (VOCABULARY - 1)


@lru_cache(1 << 12)
def oracle(
    prompt: tuple[int, ...], max_tokens: int, cache_salt: str | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that follow a prompt, and the values of all positions, from nothing but tokens."""
    context: list[int] = []
    root, tokens = root_of(cache_salt), list(prompt)
    for token in prompt:
        context.append(value_of(root, token, context))
    for _ in range(max_tokens):
        tokens.append(sample(context))
        context.append(value_of(root, tokens[-1], context))
    return tuple(tokens[len(prompt) :]), tuple(context)


@lru_cache(1 << 12)
def blocks_of(
    prompt: tuple[int, ...], max_tokens: int, cache_salt: str | None
) -> dict[bytes, tuple[int, ...]]:
    """The content of every full block of a sequence, by the block's hash."""
    tokens, values = oracle(prompt, max_tokens, cache_salt)
    hashes: list[bytes] = []
    extend_block_hashes(hashes, [*prompt, *tokens], BLOCK, cache_salt)
    return {h: values[i * BLOCK : (i + 1) * BLOCK] for i, h in enumerate(hashes)}
