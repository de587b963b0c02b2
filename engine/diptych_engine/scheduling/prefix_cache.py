"""Finds which blocks of a request's tokens are cached, and what remains to be computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.kv_groups import NULL_BLOCK
from diptych_engine.scheduling.request import Request, RequestStatus
from diptych_protocol import SchedulerStats
from diptych_protocol.block_hashes import extend_block_hashes, seen_in

HASH_BUDGET_TOKENS = 1 << 15
"""The most tokens that one snapshot hashes to estimate cached prefixes: a few milliseconds."""
_QUEUED = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


@dataclass(slots=True, frozen=True)
class PrefixCache:
    """Finds blocks of the pool by their content. Without `enabled` it finds nothing."""

    pool: BlockPool
    block_size: int
    enabled: bool

    def find(self, request: Request) -> list[int]:
        """Return cached blocks of the request's tokens. At least one token remains to be computed,
        and all tokens of a request that needs more than KV. Of what windows see, those of a request
        that fetches more are what they see behind that."""
        if not self._reads_cache(request):
            return []
        hit, groups = self.pool.match(self.lookup_hashes(request)), self.pool.groups
        if groups.windowed and self._will_fetch(request, self.num_tokens(hit)):
            for group, rows in enumerate(groups.passed(request.num_remote_tokens)):
                for place in range(group, min(rows * groups.count, len(hit)), groups.count):
                    hit[place] = NULL_BLOCK
        return hit

    def part_behind(self, request: Request, hit: list[int]) -> tuple[int, int] | None:
        """Return the block that a former core has begun behind these full blocks of the request,
        and how many of the request's tokens it has KV of."""
        first = self.num_tokens(hit)
        if not hit or request.images:
            return None
        found = self.pool.part_behind(request.block_hashes[first // self.block_size - 1])
        if found is None:
            return None
        block, token_ids = found
        own = request.token_ids[first : request.num_tokens - 1]
        pairs = enumerate(zip(own, token_ids, strict=False))
        count = next((n for n, (a, b) in pairs if a != b), min(len(own), len(token_ids)))
        return (block, count) if count else None

    def _will_fetch(self, request: Request, num_here: int) -> bool:
        if request.prefix_source is None:
            return request.fetches
        return self.worth_fetching(request, num_here)

    def will_remember(self, request: Request) -> list[bytes]:
        """Return the hashes of the prompt's full blocks; none if it is not computed here."""
        if not self.enabled or request.fetches or request.prefetches:
            return []
        self._extend_hashes(request)
        return request.block_hashes

    def worth_fetching(self, request: Request, num_here: int) -> bool:
        """Whether another engine may have more of a prefix than this one, and the request can use
        it."""
        source = request.prefix_source
        size = None if source is None else source.remote_block_size
        fits = not self.pool.groups.windowed or size in (None, self.block_size)
        return fits and self._reads_cache(request) and request.num_remote_tokens > num_here

    def names(self, request: Request) -> list[bytes]:
        """Return the names of the blocks to fetch of a prefix, in the other engine's size."""
        source, count = request.prefix_source, request.num_remote_tokens
        size = source.remote_block_size if source is not None else None
        if size is None or size == self.block_size:
            self._extend_hashes(request)
            return request.block_hashes[: count // self.block_size]
        names: list[bytes] = []
        _extend(names, request, request.token_ids[:count], size)
        return names

    def remember(self, request: Request, first: int) -> None:
        """Make the request's full, computed blocks findable, from row `first` on."""
        if not self.enabled:
            return
        self._extend_hashes(request)
        count, end = self.pool.groups.count, request.num_computed_tokens // self.block_size
        for place in range(first * count, end * count):
            block = request.block_ids[place]
            if block != NULL_BLOCK:
                self.pool.remember(block, request.block_hashes[place // count], place % count)

    def kept(self, num_tokens: int) -> Sequence[int]:
        """Return the places, in order, of the blocks that are kept of a request's first tokens."""
        groups = self.pool.groups
        return (
            groups.kept(num_tokens) if groups.windowed else range(-(-num_tokens // self.block_size))
        )

    def num_tokens(self, hit: list[int]) -> int:
        """Return how many tokens the blocks that `find` returned are for."""
        return len(hit) // self.pool.groups.count * self.block_size

    def count_lookup(self, request: Request, num_hit_tokens: int, stats: SchedulerStats) -> None:
        """Count a request's look-up.

        After a preemption a request finds what it has computed itself: that is a hit, but saved
        nothing.
        """
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
        if self.enabled and request.reads_prefix_cache:
            stats.prefix_cache_queries += request.num_tokens
            stats.prefix_cache_hits += num_hit_tokens

    def queued_prompt_tokens(self, requests: Iterable[Request]) -> Counter[str]:
        """Return the prompt tokens that steps have yet to compute (not here, not cached, not being
        received), by tenant.

        A snapshot takes two look-ups in the pool per waiting request, and hashes new requests,
        which admission needs too. What exceeds the budget counts in full until the next snapshot.
        """
        budget = HASH_BUDGET_TOKENS
        queued = Counter[str]()
        for request in requests:
            covered = request.num_computed_tokens
            if request.prefetches:
                continue
            if request.fetches:
                covered = max(covered, request.num_remote_tokens)
            elif covered == 0 and request.status in _QUEUED and self._reads_cache(request):
                unhashed = request.num_tokens - len(request.block_hashes) * self.block_size
                if unhashed < self.block_size or budget > 0:
                    budget -= unhashed
                    hashes = self.lookup_hashes(request)
                    request.expected_hit = self.pool.match_length(hashes, request.expected_hit)
                    covered = request.expected_hit * self.block_size
            if covered < request.num_prompt_tokens:
                queued[request.tenant] += request.num_prompt_tokens - covered
        return queued

    def _reads_cache(self, request: Request) -> bool:
        return self.enabled and request.reads_prefix_cache and not request.wants_prompt_logprobs

    def lookup_hashes(self, request: Request) -> list[bytes]:
        """Return the names of the full blocks before a request's last token."""
        self._extend_hashes(request)
        return request.block_hashes[: (request.num_tokens - 1) // self.block_size]

    def _extend_hashes(self, request: Request) -> None:
        _extend(request.block_hashes, request, request.token_ids, self.block_size)


def _extend(hashes: list[bytes], request: Request, token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of a request's first tokens."""
    extend_block_hashes(
        hashes,
        token_ids,
        block_size,
        request.cache_salt,
        partial(seen_in, [image.seen for image in request.images]) if request.images else None,
    )
