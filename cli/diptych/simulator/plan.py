"""What is simulated: pools of pods, what they cost, and what lies between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diptych.simulator.costs import StepCost
from diptych.simulator.engine import EngineLimits, EngineModel, Sequence
from diptych.simulator.workload import Request, prefix_keys
from diptych_protocol.engine_stats import MAX_MOVES_TOLD, KVTransferStats, Move, SchedulerStats
from diptych_protocol.router_settings import Disaggregate
from diptych_protocol.wire import PrefixChanges
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policies.least_loaded import POLICY
from diptych_router.choosing.policy import Policy
from diptych_router.engines.engine_table import Role
from diptych_router.engines.known_prefixes import BlockNaming


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """Pods of one kind."""

    pods: int
    cost: StepCost
    limits: EngineLimits
    slowdown: float = 1.0
    """How many times as long a step takes while another pod of the same machine computes."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of what is not a step."""

    request_s: float
    """Seconds from the user to the engine, and from the engine with the first token to the user."""
    hand_off_s: float
    """Seconds from the prefill engine's answer until the decode engine may compute, without the
    time that the bytes take."""
    kv_token_s: float
    """Seconds to move the KV of one token between two pods that do nothing else."""
    step_s: float = 0.0
    """Seconds that every step takes besides the model: to plan it, and to send its outputs."""


@dataclass(frozen=True, slots=True)
class Zones:
    """Pod number n of a pool is in zone n modulo `number`."""

    number: int = 1
    times: float = 1.0
    """How many times as long KV takes between two zones as within one."""
    told: bool = True
    """Pods know their zones, and say so."""
    moves_told: bool = True
    """Pods tell routers of each move of KV, not only of all together."""


@dataclass(frozen=True, slots=True)
class SimulatedService:
    """A service. With no prefill pods the decode pods do everything."""

    prefill: SimulatedPool
    decode: SimulatedPool
    overheads: Overheads
    one_machine: bool = False
    """All pods share one machine's cores, else each has its own."""
    routers: int = 1
    """Number of routers; each knows only of the load that it has sent itself."""
    policy: Policy = POLICY
    disaggregate: Disaggregate = "auto"
    promised_s: float | None = None
    """Routers refuse requests whose first token would come later than that; None: they do not."""
    elastic_gap_s: float | None = None
    """Seconds promised for each later token, for which pods change their roles, as they do for
    `promised_s`; None: roles are fixed."""
    zones: Zones = Zones()
    detection_s: float = 6.0
    """Seconds until a router takes a silent engine for lost."""

    @property
    def room_tokens(self) -> int:
        """Prompt and output of the longest request that every engine has blocks for."""
        limits = [pool.limits for pool in (self.prefill, self.decode) if pool.pods]
        return min(each.num_blocks * each.block_size for each in limits)

    def token_s(self, sender: Pod, taker: Pod) -> float:
        """Seconds to move the KV of one token between these pods, if they do nothing else."""
        apart = sender.zone != taker.zone
        return self.overheads.kv_token_s * (self.zones.times if apart else 1.0)


@dataclass(slots=True, eq=False)
class Pod:
    """One engine, and the step that it computes."""

    key: str
    role: Role
    pool: SimulatedPool
    received: list[int]
    """Requests that have come from each router."""
    zone: int = 0
    engine: EngineModel = field(init=False)
    alive: bool = True
    busy: bool = False
    work_left: float = 0.0
    """Seconds that the step still takes if nobody else computes."""
    pace: float = 1.0
    """How many times as long the step takes at present."""
    since: float = 0.0
    """When `work_left` was true."""
    turn: int = 0
    """Changes with each new expectation of when a step ends, so that an outdated one is
    recognised."""
    last_end: float = 0.0
    link_free: float = 0.0
    """When its network will have moved all that was asked for so far."""
    began: float = 0.0
    """When the step began."""
    busy_s: float = 0.0
    report_at: float = 0.0
    """When its next report is due."""
    told: dict[int, int] = field(default_factory=dict)
    """Prefix -> how many of its blocks routers take it to remember."""
    news: int = 0
    """Number of the last message about that."""
    loads: int = 0
    """KV transfers received, their tokens, and the seconds that requests waited for them."""
    received_tokens: int = 0
    receiving_s: float = 0.0
    moves: deque[Move] = field(default_factory=lambda: deque(maxlen=MAX_MOVES_TOLD))

    def __post_init__(self) -> None:
        self.engine = EngineModel(self.pool.limits)

    def saw_load(self, sender: str, tokens: int, seconds: float) -> None:
        """KV of so many tokens has come, for which a request waited so long."""
        self.loads += 1
        blocks = tokens // self.pool.limits.block_size
        self.moves.append(Move(self.loads, sender, blocks, seconds))
        self.received_tokens += tokens
        self.receiving_s += seconds


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way, and when its user saw what."""

    request: Request
    arrival: float
    router: int
    generated: int = 0
    """Number of tokens generated by engines that it has left."""
    at: Pod | None = None
    taker: Pod | None = None
    """Who takes over after prefill."""
    sequence: Sequence | None = None
    source: Pod | None = None
    """From which engine a prefix is to be fetched."""
    coming: Sequence | None = None
    """What the taker has reserved blocks for."""
    lender: Pod | None = None
    lent: Sequence | None = None
    """What the lender keeps until the taker has read it."""
    charges: list[tuple[str, int]] = field(default_factory=list)
    planned: str | None = None
    """The engine that is planned to take over."""
    lent_at: float = 0.0
    """When P had answered."""
    loaded_s: float = 0.0
    """Seconds from then until D had the KV."""
    far: bool = False
    """They are in different zones."""
    attempts: int = 0
    expected: FirstToken | None = None
    """When its first token was expected, when it was taken on."""
    first_at: float = -1.0
    last_at: float = -1.0
    """When the user saw its last token; while it is a decode row, this is not updated."""
    ended_at: float = -1.0


def statistics(pod: Pod, *, moves: bool) -> SchedulerStats:
    """A pod's report. moves: with those that it has received."""
    engine = pod.engine
    return SchedulerStats(
        num_running=len(engine.running),
        num_waiting=len(engine.waiting),
        num_waiting_for_remote_kv=len(engine.loading),
        blocks_total=engine.limits.num_blocks,
        blocks_free=engine.free,
        queued_prompt_tokens=engine.queued_tokens(),
        prompt_tokens_computed=engine.computed_tokens,
        tokens_generated=engine.generated_tokens,
        steps=engine.step,
        seconds_stepping=pod.busy_s,
        kv_transfer=KVTransferStats(
            loads_completed=pod.loads,
            blocks_received=pod.received_tokens // engine.limits.block_size,
            seconds_receiving=pod.receiving_s,
            newest_moves=list(pod.moves) if moves else [],
        ),
    )


def prefix_news(pod: Pod) -> PrefixChanges | None:
    """What it remembers otherwise than when this was last asked."""
    memory = pod.engine.prefixes
    added: list[bytes] = []
    removed: list[bytes] = []
    for key in memory.changed:
        before = pod.told.pop(key, 0)
        now = memory.groups[key].blocks if key in memory.groups else 0
        if now:
            pod.told[key] = now
        if now != before:
            keys = prefix_keys(key, min(before, now), max(before, now)).tobytes()
            (added if now > before else removed).append(keys)
    memory.changed.clear()
    if not added and not removed:
        return None
    pod.news += 1
    return PrefixChanges(pod.news, b"".join(added), b"".join(removed))


def expected_news(pod: Pod, request: Request) -> PrefixChanges:
    """What it tells of a prompt that it is about to compute."""
    keys = request.view.keys
    names = [] if keys is None else [keys(BlockNaming(pod.pool.limits.block_size)).tobytes()]
    return PrefixChanges(pod.news, expected=names)
