"""What is simulated: pools of pods, what they cost, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.simulate.costs import StepCost
from benchmarks.simulate.engine import EngineModel, Limits, Sequence
from benchmarks.simulate.workload import Request

from diptych_router.policies.least_loaded import POLICY
from diptych_router.policy import Policy, Role


@dataclass(frozen=True, slots=True)
class Pool:
    """Pods of one kind."""

    pods: int
    cost: StepCost
    limits: Limits
    slowdown: float = 1.0
    """How many times as long a step takes while another pod of the same machine computes."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of what is not a step."""

    request_s: float
    """From the user to the engine, and from the engine with the first token to the user."""
    hand_off_s: float
    """From the prefill engine's answer until the decode engine may compute, without the bytes."""
    kv_token_s: float
    """To move the KV of one token between two pods that do nothing else."""
    step_s: float = 0.0
    """Of every step beside the model: planning it, and sending what it gave."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A service. With no prefill pods the decode pods do everything."""

    prefill: Pool
    decode: Pool
    overheads: Overheads
    one_machine: bool = False
    """All pods share one machine's cores, else each has its own."""
    routers: int = 1
    """Each counts only what it has sent itself."""
    policy: Policy = POLICY
    detection_s: float = 6.0
    """Until a router takes a silent engine for lost."""


@dataclass(slots=True, eq=False)
class Pod:
    """One engine, and the step that it computes."""

    key: str
    role: Role
    pool: Pool
    engine: EngineModel = field(init=False)
    alive: bool = True
    busy: bool = False
    work_left: float = 0.0
    """Seconds that the step still takes if nobody else computes."""
    pace: float = 1.0
    """How many times as long it takes now."""
    since: float = 0.0
    """When `work_left` was true."""
    turn: int = 0
    """Told apart: ends of steps that were expected before the pace changed."""
    last_end: float = 0.0
    link_free: float = 0.0
    """When its network has moved what was asked for so far."""
    began: float = 0.0
    """When the step did."""
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.engine = EngineModel(self.pool.limits)


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way, and when its user saw what."""

    request: Request
    arrival: float
    router: int
    generated: int = 0
    """Tokens from engines that it has left."""
    at: Pod | None = None
    taker: Pod | None = None
    """Who takes over after prefill."""
    sequence: Sequence | None = None
    coming: Sequence | None = None
    """What the taker has reserved blocks for."""
    lender: Pod | None = None
    lent: Sequence | None = None
    """What the lender keeps until the taker has read it."""
    charges: list[tuple[str, int]] = field(default_factory=list)
    attempts: int = 0
    first_at: float = -1.0
    last_at: float = -1.0
    """Of its tokens; while it is a decode row: of the one before it became one."""
    ended_at: float = -1.0
