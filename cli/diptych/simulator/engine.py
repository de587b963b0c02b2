"""A model of one engine's scheduler that costs the same for a step of one row as of a thousand.

It decides what the product's `Scheduler` decides under `fcfs` (tests compare the two step by step):
running requests first and in order, prompts in shares of the token budget, short ones beside a long
one, admission while budget, rows and blocks last, preemption of the last one by recompute. All
requests are of one tenant. It counts instead of listing:
decode rows only grow, all by one token a step, so their number, the sum of their contexts and how
many of them need a block when are all that a step has to know.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from diptych.simulator.costs import StepShape
from diptych.simulator.prefixes import Chain, PrefixMemory


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine is configured to; names as in `EngineConfig`."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enough_prompt_tokens: float = math.inf


@dataclass(slots=True, eq=False)
class Sequence:
    """A request as one engine has it."""

    prompt: int
    """Tokens known when it comes, those that another engine generated included."""
    to_generate: int
    remote: int = 0
    """Tokens whose KV is to be fetched from another engine."""
    lends: bool = False
    """Its blocks stay when it has ended, until `release`."""
    chain: Chain = ()
    """What its prompt begins with, as far as others may begin with it as well."""
    owner: object = None
    """Whatever the caller wants to find again."""
    computed: int = 0
    """Number of tokens whose KV is here; for a decode row: the number when it became one."""
    generated: int = 0
    """Number of tokens generated here; for a decode row: the number when it became one."""
    blocks: int = 0
    early: int = 0
    """Blocks that were reserved before it came."""
    held: dict[int, int] = field(default_factory=dict)
    """How many of `blocks` belong to the memory of prefixes, by the keys of `chain`."""
    complete: int = 0
    """Parts of `chain` that are computed, and so remembered."""
    cached: int = -1
    """Number of prompt tokens that were remembered when it came; -1: nobody has looked yet."""
    row_since: int = -1
    """The step in which it became a decode row; -1: it is none."""
    stays: int = 0
    """Counts how often it ceased to be a row, so that an outdated end is told apart."""

    @property
    def known(self) -> int:
        return self.prompt + self.generated


@dataclass(slots=True)
class StepEnd:
    """What a step has produced."""

    sampled: list[Sequence]
    """Those whose token here was the first since they came or lost their blocks."""
    finished: list[Sequence]
    steady_rows: int
    """Rows that got a token in this step, and in the one before."""


@dataclass(slots=True)
class EngineModel:
    """Queues, rows and blocks of one engine. The caller keeps the time."""

    limits: EngineLimits
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[Sequence, None] = field(default_factory=dict)
    """In the order of admission; the last is the first to be preempted."""
    loads: list[Sequence] = field(default_factory=list)
    """What is to be fetched; the caller takes it, and says `received`."""
    loading: set[Sequence] = field(default_factory=set)
    """Requests that wait for KV from another engine."""
    victims: list[Sequence] = field(default_factory=list)
    """Decode rows that lost their blocks; the caller takes them."""
    rows: int = 0
    context: int = 0
    """KV tokens of all decode rows."""
    step: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that need not be computed, because the prefix cache had them."""
    computed_tokens: int = 0
    """Number of prompt tokens that steps have computed."""
    generated_tokens: int = 0
    reserved: int = 0
    """Blocks of requests that are only announced."""
    announced: dict[Sequence, None] = field(default_factory=dict)
    """Those requests, as long as nobody has claimed their blocks; the oldest first."""
    prefixes: PrefixMemory = field(init=False)
    _due: list[int] = field(init=False)
    """Rows that need a block in steps that leave this remainder modulo the block size."""
    _ends: list[tuple[int, int, Sequence, int]] = field(default_factory=list)
    """(step, order, row, the row's `stays`): a heap of the steps in which rows will have all their
    tokens."""
    _order: count[int] = field(default_factory=count)
    _chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Shares of prompts in the step under way."""
    _newcomers: list[Sequence] = field(default_factory=list)
    """Rows of the step under way that were none before."""

    def __post_init__(self) -> None:
        self.prefixes = PrefixMemory(self.limits.num_blocks, self.limits.block_size)
        self._due = [0] * self.limits.block_size

    @property
    def free(self) -> int:
        return self.prefixes.free

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def received(self, sequence: Sequence) -> None:
        """The KV of the `remote` tokens has arrived."""
        self.loading.discard(sequence)
        self.reserved -= sequence.early
        sequence.early = 0
        sequence.computed, sequence.remote = min(sequence.remote, sequence.known - 1), 0
        self._remember(sequence)
        self.waiting.appendleft(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Take blocks for a request that is only announced, by the rules of `EarlyLoads`. False:
        there is not room enough."""
        wanted, total = self._blocks_for(sequence.remote), self.limits.num_blocks
        hit, idle = self._hit(sequence)
        left = self.free - idle - max(0, wanted - hit)
        if left < total // 4 or self.reserved + wanted > total // 2:
            return False
        self._take_prefix(sequence)
        self._grow(sequence, max(0, wanted - sequence.blocks))
        sequence.early = wanted
        self.reserved += wanted
        self.announced[sequence] = None
        return True

    def claim(self, sequence: Sequence) -> bool:
        """A request that was announced comes. False: its blocks have been given up."""
        self.announced.pop(sequence, None)
        if sequence.early:
            self.loading.add(sequence)
        return bool(sequence.early)

    def forgo(self, sequence: Sequence) -> None:
        """A request for which blocks were reserved will not come, or gets others when it does."""
        self.announced.pop(sequence, None)
        self.reserved -= sequence.early
        sequence.early = 0
        self.release(sequence)

    def queued_tokens(self) -> int:
        """Prompt tokens that are neither computed nor remembered, nor come from elsewhere."""
        size, total = self.limits.block_size, 0
        for sequence in self.waiting:
            if not sequence.remote:
                hit = 0 if sequence.blocks else self._hit(sequence)[0]
                total += sequence.known - max(sequence.computed, hit * size)
        partial = self._partial()
        return total + (partial.known - partial.computed if partial else 0)

    def tokens_of(self, sequence: Sequence) -> int:
        """How many tokens it has generated here."""
        since = self.step - sequence.row_since if sequence.row_since >= 0 else 0
        return sequence.generated + since

    def hand_off(self, sequence: Sequence) -> None:
        """A decode row leaves between two steps; its blocks stay until they are released."""
        self._leave_rows(sequence)
        del self.running[sequence]

    def release(self, sequence: Sequence) -> None:
        """Let go of a sequence's blocks."""
        self.prefixes.release(sequence.held, sequence.blocks - sum(sequence.held.values()))
        sequence.blocks = sequence.complete = 0
        sequence.held = {}

    # --- a step -------------------------------------------------------------------------------

    def begin(self) -> StepShape | None:
        """Plan a step; None: there is nothing to compute now."""
        budget = self.limits.max_num_batched_tokens
        chunks, preempted = self._chunks, False
        while True:
            partial = self._partial()
            share = min(partial.known - partial.computed, budget - self.rows) if partial else 0
            grown = 0
            if partial and share:
                grown = max(0, self._blocks_for(partial.computed + share) - partial.blocks)
            due = self._due[self.step % self.limits.block_size]
            if due + grown <= self.free:
                break
            preempted = True
            self._preempt()
        self.prefixes.allocate(due)
        budget -= self.rows
        if partial and share:
            self._grow(partial, grown)
            if not preempted and partial.computed + share < partial.known:
                budget = self._admit_short(partial, budget, share // 2)
                share = min(share, budget)
            chunks.append((partial, share))
            budget -= share
        if not preempted:
            self._admit(budget)
        if not self.rows and not chunks:
            return None
        tokens, pairs, sampled = self.rows, 0.0, self.rows
        for sequence, share in chunks:
            tokens += share
            pairs += share * (sequence.computed + (share + 1) / 2)
            sampled += sequence.computed + share == sequence.known
        return StepShape(tokens, sampled, pairs, self.context + self.rows)

    def _partial(self) -> Sequence | None:
        """The request whose prompt is not complete: the last one, if any."""
        if len(self.running) == self.rows:
            return None
        return next(reversed(self.running))

    def _admit(self, budget: int) -> None:
        prompts = sum(share for _, share in self._chunks if share > 1)
        while self.waiting and budget > 0 and prompts < self.limits.enough_prompt_tokens:
            share = self._enter(self.waiting[0], budget)
            if share is None:
                return
            budget -= share
            prompts += share

    def _admit_short(self, beside: Sequence, budget: int, room: int) -> int:
        """Have prompts that end within `room` tokens of the budget enter beside one that does not.
        Returns what is left of the budget."""
        if len(self.running) >= self.limits.max_num_seqs:
            return budget
        spared = self._blocks_for(beside.known) - beside.blocks
        prompts = 0
        for sequence in list(self.waiting):
            if room <= 0 or prompts >= self.limits.enough_prompt_tokens:
                break
            if not sequence.remote and sequence.known - sequence.computed > room:
                continue
            share = self._enter(sequence, room, spared)
            if share is None:
                break
            budget, room, prompts = budget - share, room - share, prompts + share
        del self.running[beside]
        self.running[beside] = None  # it stays behind them
        return budget

    def _enter(self, sequence: Sequence, room: int, spared: int = 0) -> int | None:
        """Have a waiting request enter the step: how many tokens it takes. None: it cannot."""
        while True:
            hit, idle = (0, 0) if sequence.blocks else self._hit(sequence)
            short = self._blocks_for(sequence.known) - hit - sequence.blocks
            if short + spared <= self.free - idle:
                break
            if self.running or not (self._reclaim_announced() or self._reclaim_from_waiting()):
                return None
        if not sequence.remote and len(self.running) >= self.limits.max_num_seqs:
            return None
        self.waiting.remove(sequence)
        if not sequence.blocks:
            self._take_prefix(sequence)
        if sequence.remote:
            wanted = self._blocks_for(sequence.remote)
            self._grow(sequence, max(0, wanted - sequence.blocks))
            self.loads.append(sequence)
            self.loading.add(sequence)
            return 0
        share = min(sequence.known - sequence.computed, room)
        wanted = self._blocks_for(sequence.computed + share)
        self._grow(sequence, max(0, wanted - sequence.blocks))
        self.running[sequence] = None
        if share == 1 and sequence.computed + 1 == sequence.known:
            self._become_row(sequence)
            self._newcomers.append(sequence)
        else:
            self._chunks.append((sequence, share))
        return share

    def end(self) -> StepEnd:
        """The step is over."""
        steady = self.rows - len(self._newcomers)
        self.generated_tokens += self.rows
        self.step += 1
        self.context += self.rows
        finished = []
        while self._ends and self._ends[0][0] <= self.step:
            _, _, sequence, stay = heapq.heappop(self._ends)
            if sequence.stays == stay:
                self._leave_rows(sequence)
                finished.append(sequence)
        sampled, self._newcomers = self._newcomers, []
        for sequence, share in self._chunks:
            sequence.computed += share
            self.computed_tokens += share
            self._remember(sequence)
            if sequence.computed < sequence.known:
                continue
            sequence.generated += 1
            self.generated_tokens += 1
            sampled.append(sequence)
            if sequence.generated >= sequence.to_generate:
                finished.append(sequence)
            else:
                self._become_row(sequence)
        self._chunks = []
        for sequence in finished:
            del self.running[sequence]
            if not sequence.lends:
                self.release(sequence)
        return StepEnd(sampled, finished, steady)

    # --- rows and blocks ----------------------------------------------------------------------

    def _become_row(self, sequence: Sequence) -> None:
        sequence.row_since = self.step
        self.rows += 1
        self.context += sequence.computed
        self._due[(self.step - sequence.computed) % self.limits.block_size] += 1
        end = self.step + sequence.to_generate - sequence.generated
        heapq.heappush(self._ends, (end, next(self._order), sequence, sequence.stays))

    def _leave_rows(self, sequence: Sequence) -> None:
        """Bring a row's own numbers up to date; it is counted no more."""
        self._due[(sequence.row_since - sequence.computed) % self.limits.block_size] -= 1
        since = self.step - sequence.row_since
        sequence.blocks = max(sequence.blocks, self._blocks_for(sequence.computed + since))
        sequence.computed += since
        sequence.generated += since
        sequence.row_since = -1
        sequence.stays += 1
        self.rows -= 1
        self.context -= sequence.computed

    def _preempt(self) -> None:
        sequence, _ = self.running.popitem()
        if sequence.row_since >= 0:
            self._leave_rows(sequence)
            self.victims.append(sequence)
        self._take_blocks(sequence)
        self.waiting.appendleft(sequence)

    def _take_blocks(self, sequence: Sequence) -> None:
        """For others; its tokens are computed again when its turn comes."""
        self.release(sequence)
        sequence.computed = 0
        self.preemptions += 1

    def _reclaim_announced(self) -> bool:
        """Announced requests are a bet, and those that are here come first: or both would wait for
        each other, as the former are not computed while the latter have not read their blocks."""
        oldest = next(iter(self.announced), None)
        if oldest is None:
            return False
        self.forgo(oldest)
        return True

    def _reclaim_from_waiting(self) -> bool:
        for sequence in reversed(self.waiting):
            if sequence.blocks and sequence is not self.waiting[0]:
                self._take_blocks(sequence)
                return True
        return False

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _grow(self, sequence: Sequence, blocks: int) -> None:
        self.prefixes.allocate(blocks)
        sequence.blocks += blocks

    def _hit(self, sequence: Sequence) -> tuple[int, int]:
        """Leading blocks that are remembered, and how many blocks nobody holds of their parts; at
        least one token is left to compute."""
        if not sequence.chain:
            return 0, 0
        return self.prefixes.find(sequence.chain, self._most(sequence))

    def _most(self, sequence: Sequence) -> int:
        return (sequence.known - 1) // self.limits.block_size

    def _take_prefix(self, sequence: Sequence) -> None:
        if sequence.chain:
            sequence.held = self.prefixes.take(sequence.chain, self._most(sequence))
            sequence.blocks = sum(sequence.held.values())
            sequence.computed = sequence.blocks * self.limits.block_size
        # After a preemption it finds what it has computed itself, which saves nothing.
        if sequence.cached < 0 and not sequence.remote:
            sequence.cached = sequence.computed
            self.cached_tokens += sequence.cached

    def _remember(self, sequence: Sequence) -> None:
        """Parts of a prompt are computed: others may find them."""
        size, chain = self.limits.block_size, sequence.chain
        while sequence.complete < len(chain):
            begin = chain[sequence.complete - 1].end // size if sequence.complete else 0
            key, end = chain[sequence.complete]
            if sequence.computed < end // size * size:
                return
            mine = sequence.held.get(key, 0)
            if mine < end // size - begin:
                mine = self.prefixes.remember(key, end // size - begin, mine)
                if mine:
                    sequence.held[key] = mine
            sequence.complete += 1
