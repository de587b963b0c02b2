"""Agents' turns on one engine with half of the memory that they use, with `pin_s` and without.

`python -m benchmarks.simulate.agents [--seed 1] [--load 0.02] [--flood 0.5] [--lies]`. The
product's scheduler and block pool run in virtual time. All lengths are a 32nd of those that are
published of agents: 43 turns, 142,000 tokens of context and 444 of an answer in the median; 44 %
branch off others, which begin with all that their parent had. Nine of ten turns follow a tool (4 s
in the median), the others a user (a minute), both with long tails. Between them come prompts that
nobody goes on with, the flood. In the last runs agents tell which turn is their last.

A token takes 0.8 ms (25 microseconds at full length), a step 25 ms more. The memory that they use
is the mean of what was used within five minutes, where there is room for all. With a disk, all that
was computed is there when its request ends. One prefix after the other is read from it.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import LoadOrder, Request, StepResult, StoredPrefix
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import SamplingParams

SCALE: Final = 32
BLOCK: Final = 16
TENANTS: Final = (0, 0, 0, 1, 1, 2, 3)
"""Who begins a conversation, each equally often."""
BRANCHING: Final = 0.44
PIN_S: Final = 300
WINDOW_S: Final = 300.0
STEP_S: Final = 0.025
TOKEN_S: Final = 0.0008
READ_TOKEN_S: Final = 0.07 * TOKEN_S
"""As `benchmarks/results/findings.md` has it of 4,096 tokens."""
EVERYTHING: Final = 600_000
"""Blocks that are enough for all."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What comes, and for how long (s)."""

    seed: int = 1
    load: float = 0.02
    """Conversations that begin in a second."""
    flood: float = 0.5
    """Prompts in a second that nobody goes on with."""
    seconds: float = 2400.0
    warm_up: float = 600.0
    """What comes before counts for nothing."""


@dataclass(slots=True, eq=False)
class Agent:
    """A conversation."""

    random: random.Random
    tenant: int
    tokens: list[int]
    turns: int
    branches_after: int = -1
    parent: Agent | None = None
    children: int = 0


@dataclass(slots=True, eq=False)
class Ask:
    """A turn, or a prompt of the flood."""

    agent: Agent | None
    tokens: list[int]
    output: int
    at: float
    hit: int = -1
    answered: bool = False


@dataclass(slots=True)
class Figures:
    """What the turns of agents met."""

    hit: int = 0
    ideal: int = 0
    """Tokens that had been computed before."""
    first_s: list[float] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """Blocks that were used within `WINDOW_S`, once a minute."""

    def line(self) -> str:
        tenths = statistics.quantiles(self.first_s, n=10)
        return (
            f"{self.hit / self.ideal:6.4f}  {statistics.median(self.first_s):8.3f}  "
            f"{tenths[8]:8.3f}  {len(self.first_s):5}"
        )


class World:
    """The agents. What they do depends on their seed, and when on the answers before."""

    def __init__(self, traffic: Traffic) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], Ask]]] = []
        self._order = itertools.count()
        rng = random.Random(traffic.seed)
        self._common = [_tokens(rng, 12_000, 0.0, 12_000) for _ in set(TENANTS)]
        for rate, begin in ((traffic.load, self._begin), (traffic.flood, self._flood)):
            at = rng.expovariate(rate) if rate else math.inf
            while at < traffic.seconds:
                own = random.Random(rng.random())
                self._at(at, partial(begin, own))
                at += rng.expovariate(rate)

    @property
    def next_at(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def due(self) -> Ask:
        self.now, _, ask = heapq.heappop(self._events)
        return ask()

    def answered(self, agent: Agent, tokens: list[int], now: float) -> None:
        """An agent's turn has ended with these tokens."""
        rng = agent.random
        agent.tokens = tokens + _tokens(rng, 3200, 1.0, 40_000)
        if len(agent.tokens) > 256_000 // SCALE:  # it goes on with a summary
            agent.tokens = self._common[agent.tenant] + _tokens(rng, 12_000, 0.0, 12_000)
        agent.turns -= 1
        if agent.turns <= 0:
            self._join(agent.parent, now)
        elif agent.turns == agent.branches_after:
            agent.children = rng.choice((1, 1, 2, 3))
            for _ in range(agent.children):
                self._go_on(self._child(agent), now + 1)
        else:
            asks_user = agent.parent is None and rng.random() < 0.1
            pause = _draw(rng, 60, 1.0, 3000) if asks_user else _draw(rng, 4, 1.2, 300)
            self._go_on(agent, now + pause)

    def _join(self, parent: Agent | None, now: float) -> None:
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._go_on(parent, now + 1)

    def _child(self, parent: Agent) -> Agent:
        rng = random.Random(parent.random.random())
        turns = max(1, round(_draw(rng, 8, 0.7, 60)))
        task = _tokens(rng, 500, 0.5, 5000)
        return Agent(rng, parent.tenant, parent.tokens + task, turns, parent=parent)

    def _begin(self, rng: random.Random) -> Ask:
        tenant, turns = rng.choice(TENANTS), max(1, round(_draw(rng, 43, 0.7, 250)))
        tokens = self._common[tenant] + _tokens(rng, 4000, 0.8, 30_000)
        branches = rng.randrange(turns) if rng.random() < BRANCHING else -1
        return self._turn(Agent(rng, tenant, tokens, turns, branches))

    def _flood(self, rng: random.Random) -> Ask:
        return Ask(None, _tokens(rng, 8000, 1.0, 60_000), 444 // SCALE, self.now)

    def _turn(self, agent: Agent) -> Ask:
        output = max(1, round(_draw(agent.random, 444, 0.8, 4000) / SCALE))
        return Ask(agent, list(agent.tokens), output, self.now)

    def _go_on(self, agent: Agent, at: float) -> None:
        self._at(at, lambda: self._turn(agent))

    def _at(self, at: float, ask: Callable[[], Ask]) -> None:
        heapq.heappush(self._events, (at, next(self._order), ask))


def _draw(rng: random.Random, median: float, sigma: float, most: float) -> float:
    return min(most, median * math.exp(rng.gauss(0, sigma)))


def _tokens(rng: random.Random, median: float, sigma: float, most: float) -> list[int]:
    """Tokens that nobody else has; how many is drawn at full length."""
    count = max(1, round(_draw(rng, median, sigma, most) / SCALE))
    return [rng.randrange(10, 1 << 30) for _ in range(count)]


class Engine:
    """One engine, and what it has computed so far."""

    def __init__(
        self,
        traffic: Traffic,
        num_blocks: int,
        *,
        told: bool = False,
        ends: bool = False,
        lies: bool = False,
        disk: bool = False,
    ) -> None:
        """told: agents say that they go on. ends: and which turn is their last. lies: those of the
        flood say that they go on, too. disk: what memory forgets is read."""
        self._disk, self._reads = disk, deque[tuple[float, LoadOrder]]()
        self._traffic, self._told, self._ends, self._lies = traffic, told, ends, lies
        self._world, self._now, self.figures = World(traffic), 0.0, Figures()
        self._scheduler = Scheduler(
            BlockPool(num_blocks, clock=lambda: self._now), BLOCK, 64, 8192 // SCALE, 1 << 20
        )
        self._asks: dict[str, Ask] = {}
        self._names = itertools.count()
        self._used: OrderedDict[bytes, float] = OrderedDict()
        self._ever: set[bytes] = set()
        self._look_at = traffic.warm_up

    def run(self) -> Figures:
        while self._now < self._traffic.seconds:
            while self._world.next_at <= self._now:
                self._add(self._world.due())
            while self._reads and self._reads[0][0] <= self._now:
                _, order = self._reads.popleft()
                read = len(order.token_ids)
                self._scheduler.load_ended(order.request_id, ok=True, num_tokens=read)
            plan = self._scheduler.schedule()
            self._read(self._scheduler.take_load_orders())
            if not plan.scheduled:
                read_at = self._reads[0][0] if self._reads else math.inf
                self._now = max(self._now, min(self._world.next_at, read_at))
                continue
            for share in plan.scheduled:
                self._began(share.request)
            self._now += STEP_S + TOKEN_S * plan.num_tokens
            sampled = [7] * sum(share.samples for share in plan.scheduled)
            for made in self._scheduler.update(plan, StepResult(sampled, None, None)):
                self._sampled(made.request)
            self._look()
        return self.figures

    def _add(self, ask: Ask) -> None:
        name, length = str(next(self._names)), len(ask.tokens)
        agent = ask.agent
        pin_s = PIN_S if (self._told if agent else self._lies) else 0
        tenant = str(agent.tenant) if agent else "flood"
        session = str(id(agent)) if agent and pin_s else ""
        if self._ends and agent is not None and agent.turns == 1:
            pin_s = 0
        request = Request(
            name, b"", SamplingParams(ignore_eos=True), ask.tokens, length, None,
            length + ask.output, 0, arrival_time=ask.at, tenant=tenant, pin_s=pin_s,
            session=session,
        )  # fmt: skip
        self._asks[name] = ask
        if self._disk:
            hashes = self._scheduler.prefixes.lookup_hashes(request)
            stored = next((n for n, h in enumerate(hashes) if h not in self._ever), len(hashes))
            if stored > len(self._scheduler.pool.match(hashes)):
                request.prefix_source = StoredPrefix(remote_num_tokens=stored * BLOCK)
        self._scheduler.add(request)

    def _read(self, orders: list[LoadOrder]) -> None:
        for order in orders:
            begins = max(self._now, self._reads[-1][0] if self._reads else 0.0)
            seconds = len(order.indices) * BLOCK * READ_TOKEN_S
            self._reads.append((begins + seconds, order))

    def _began(self, request: Request) -> None:
        ask = self._asks[request.request_id]
        if ask.hit >= 0:
            return
        ask.hit = request.num_cached_tokens or 0
        hashes = request.block_hashes[: (request.num_prompt_tokens - 1) // BLOCK]
        known = next((n for n, h in enumerate(hashes) if h not in self._ever), len(hashes))
        if ask.agent is not None and ask.at > self._traffic.warm_up:
            self.figures.hit += min(ask.hit, known * BLOCK)
            self.figures.ideal += known * BLOCK

    def _sampled(self, request: Request) -> None:
        ask = self._asks[request.request_id]
        if not ask.answered and ask.agent is not None and ask.at > self._traffic.warm_up:
            self.figures.first_s.append(self._now - ask.at)
        ask.answered = True
        if request.finish_reason is None:
            return
        del self._asks[request.request_id]
        self._ever.update(request.block_hashes)
        for name in request.block_hashes:
            self._used[name] = self._now
            self._used.move_to_end(name)
        self._scheduler.finish(request, request.finish_reason)
        if ask.agent is not None:
            self._world.answered(ask.agent, request.token_ids, self._now)

    def _look(self) -> None:
        if self._now < self._look_at:
            return
        self._look_at += 60.0
        while self._used and next(iter(self._used.values())) < self._now - WINDOW_S:
            self._used.popitem(last=False)
        self.figures.used.append(len(self._used))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.02, help="conversations a second")
    parser.add_argument("--flood", type=float, default=0.5, help="other prompts a second")
    parser.add_argument("--lies", action="store_true", help="the others say that they go on, too")
    given = parser.parse_args()
    traffic = Traffic(given.seed, given.load, given.flood)
    ideal = Engine(traffic, EVERYTHING).run()
    half = round(statistics.mean(ideal.used) / 2)
    print(f"half of what they use: {half} blocks of {BLOCK} tokens")
    print("            hits of ideal  TTFT p50  p90  turns")
    print("all memory  ", ideal.line(), flush=True)
    for name, told, ends, disk in (
        ("half        ", False, False, False),
        ("half, told  ", True, False, False),
        ("half, ends  ", True, True, False),
        ("half, disk  ", False, False, True),
        ("ends, disk  ", True, True, True),
    ):
        lies = told and given.lies
        figures = Engine(traffic, half, told=told, ends=ends, lies=lies, disk=disk).run()
        print(name, figures.line(), flush=True)


if __name__ == "__main__":
    main()
