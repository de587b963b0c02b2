"""The InferenceService, declared once: the CRD, its defaults and its help derive from it.

Settings that must be equal in both pools are in `spec.model`, `spec.engine` and `spec.transfer`. A
pool has only those that may differ. In a service without a prefill pool, the engines of the decode
pool compute prompts too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from diptych_operator.api.base import ImageReference, Rule, SpecPart, ruled, spec_part
from diptych_operator.api.engine import ENGINE_RULES, Engine
from diptych_operator.api.model import MODEL_RULES, Model
from diptych_operator.api.pools import ONE_SCALE, DecodePool, Pool, PoolName, PrefillPool
from diptych_operator.api.router import ONE_ROUTER_WITHOUT_VOLUME, Router
from diptych_operator.api.runtimes import RUNTIME_RULES
from diptych_operator.api.status import Status
from diptych_protocol.config import DRAIN, LEASE, Connector, Verify
from diptych_protocol.config import Slo as RouterSlo

GROUP = "diptych.dev"
VERSION = "v1alpha1"
API_VERSION = "diptych.dev/v1alpha1"
KIND = "InferenceService"

MAX_NAME_LENGTH = 40
"""Leaves room for `-prefill` and the suffixes that Kubernetes adds, within its 63 characters."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


if TYPE_CHECKING:

    class Slo(RouterSlo, SpecPart, frozen=True):
        """The router's `Slo` as a part of the spec."""

else:
    Slo = spec_part("Slo", RouterSlo)


class Transfer(SpecPart, frozen=True):
    lease_seconds: Annotated[float, LEASE, Meta(ge=1)] = 30.0
    connector: Annotated[
        Connector,
        Meta(
            description="How engines that run vLLM hand KV over, if there is a prefill pool. "
            "diptych: by our hinge. nixl: by vLLM's own "
            "NixlConnector. none: not at all, in one pool."
        ),
    ] = "diptych"
    connector_image: Annotated[
        ImageReference,
        Meta(
            description="Image that brings into vLLM's pods what speaks to routers, and our "
            "connector; left out, the operator's. If it is the engine's own image, nothing is "
            "copied."
        ),
    ] = ""
    transport: Annotated[
        Literal["auto", "rdma", "tcp", "shm"],
        Meta(
            description="What carries KV blocks. auto takes the best that both ends offer; rdma "
            "does not fall back; shm joins processes of one machine outside containers."
        ),
    ] = "auto"
    verify: Verify = "Required"


class CanaryStep(SpecPart, frozen=True, kw_only=True):
    """A step."""

    weight: Annotated[int, Meta(ge=0, le=100, description="Percent of new requests.")]
    pause_seconds: Annotated[int, Meta(ge=0, description="Its least length.")] = 300


_Share = Annotated[float, Meta(ge=0, le=1)]


class Analysis(SpecPart, frozen=True):
    min_requests: Annotated[int, Meta(ge=1, description="How many a step needs.")] = 20
    errors: Annotated[_Share, Meta(description="The most that may fail.")] = 0.01
    attainment: Annotated[
        _Share | None, Meta(description="The fewest that keep each promise of slo.")
    ] = None
    handed_over: Annotated[
        _Share | None, Meta(description="The fewest prompts that are handed over.")
    ] = None


class Canary(SpecPart, frozen=True, kw_only=True):
    steps: Annotated[
        list[CanaryStep],
        Meta(
            min_length=1,
            max_length=20,
            description="Its steps.",
            examples=["[{weight: 10, pauseSeconds: 300}]"],
        ),
    ]
    analysis: Annotated[Analysis, Meta(description="When it fails, as shares.")] = Analysis()


class Rollout(SpecPart, frozen=True):
    type: Annotated[
        Literal["PairedRolling", "BlueGreen", "Canary", "Recreate"],
        Meta(
            description="How a new revision replaces the old: PairedRolling moves both pools in "
            "step; BlueGreen starts all of the new one, then switches; Canary does so by weights; "
            "Recreate stops the old one first."
        ),
    ] = "PairedRolling"
    canary: Annotated[Canary | None, Meta(description="The way of a Canary.")] = None
    max_surge: Annotated[
        int,
        Meta(ge=0, le=1000, description="Pods that each pool may have above its wanted number."),
    ] = 1
    max_unavailable: Annotated[
        int,
        Meta(ge=0, le=1000, description="Pods that each pool may lack below its wanted number."),
    ] = 0
    progress_deadline_seconds: Annotated[
        int,
        Meta(
            ge=10,
            le=86400,
            description="A new revision that gets no further for so long has failed.",
        ),
    ] = 600
    when_full: Annotated[
        Literal["ReplaceInPlace", "Wait", "Fail"],
        Meta(
            description="What a rollout does whose pods find no node. ReplaceInPlace (with "
            "PairedRolling): old pods make room, a pair at a time, never a pool's only one. Wait: "
            "the deadline stands still. Fail: the old revision keeps serving."
        ),
    ] = "ReplaceInPlace"

    @property
    def switches(self) -> bool:
        """Whether routers are told which revision gets requests: all of the new one is there
        before any request goes to it."""
        return self.type in ("BlueGreen", "Canary")


class Availability(SpecPart, frozen=True):
    pod_disruption_budget: Annotated[
        Literal["Managed", "None"],
        Meta(description="Managed: voluntary evictions take one pod of a pool at a time."),
    ] = "Managed"
    drain_seconds: Annotated[int, DRAIN, Meta(ge=1)] = 60


class Network(SpecPart, frozen=True):
    policy: Annotated[
        Literal["Managed", "None"],
        Meta(
            description="Managed: KV and engine ports are open to the service's own pods, the "
            "admin port to the operator."
        ),
    ] = "Managed"
    engine_api: Annotated[
        Literal["None", "OwnPods"],
        Meta(
            description="Whether engines have an OpenAI API of their own, for another project's "
            "router. OwnPods: at port 8001, which a managed policy opens to the service's own "
            "pods only."
        ),
    ] = "None"


_Name = Annotated[str, Meta(max_length=253)]


Workload = Annotated[
    Literal["Deployment", "DisaggregatedSet"],
    Meta(
        description="What makes a revision's pods: a Deployment for each pool, or one "
        "DisaggregatedSet."
    ),
]


class Gateway(SpecPart, frozen=True):
    name: Annotated[_Name, Meta(min_length=1, description="Its name.")]
    namespace: Annotated[_Name, Meta(description="Left out, the service's.")] = ""
    hostname: Annotated[_Name, Meta(description="Left out, any.")] = ""


class Expose(SpecPart, frozen=True):
    gateway: Annotated[
        Gateway | None, Meta(description="Gets an HTTPRoute and an InferencePool.")
    ] = None


ROLLOUT_STEP = Rule(
    "self.maxSurge + self.maxUnavailable > 0",
    lambda rollout: rollout.max_surge + rollout.max_unavailable > 0,
    "maxSurge and maxUnavailable cannot both be 0: no pod could ever be replaced",
)
CANARY_STEPS = Rule(
    "self.type != 'Canary' || has(self.canary)",
    lambda rollout: rollout.type != "Canary" or rollout.canary is not None,
    "is needed for the type Canary, such as {steps: [{weight: 10}]}",
    ".canary",
)
DRAIN_OUTLIVES_LEASE = Rule(
    # Not every API server compares an integer with a number.
    "!has(self.prefill) || double(self.availability.drainSeconds) >= self.transfer.leaseSeconds",
    lambda spec: (
        spec.prefill is None or spec.availability.drain_seconds >= spec.transfer.lease_seconds
    ),
    "must be at least transfer.leaseSeconds: a prefill pod may not leave while its blocks can "
    "still be read",
    ".availability.drainSeconds",
)


def _sleeps(pool: Pool) -> bool:
    return pool.autoscaling is not None and pool.autoscaling.min_replicas == 0


_PREFILL_SLEEPS, _DECODE_SLEEPS = (
    f"(has(self.{pool}.autoscaling) && self.{pool}.autoscaling.minReplicas == 0)"
    for pool in ("prefill", "decode")
)
SLEEP_TOGETHER = Rule(
    f"!has(self.prefill) || {_PREFILL_SLEEPS} == {_DECODE_SLEEPS}",
    lambda spec: spec.prefill is None or _sleeps(spec.prefill) == _sleeps(spec.decode),
    "autoscaling.minReplicas must be 0 in both pools or in none: one pool alone cannot serve",
)
SLEEPERS_WAKE = Rule(
    f"!{_DECODE_SLEEPS} || self.router.holdSeconds > 0.0",
    lambda spec: not _sleeps(spec.decode) or spec.router.hold_seconds > 0,
    "must be above 0 where autoscaling.minReplicas is 0: requests that are held wake the pools",
    ".router.holdSeconds",
)


def _is_promised(pool: Pool | None, promise: int | None) -> bool:
    scaling = pool.autoscaling if pool is not None else None
    return scaling is None or scaling.attainment is None or promise is not None


def _attains(pool: str, promise: str, kept: Callable[[Spec], bool]) -> Rule:
    scaling = f"self.{pool}.autoscaling"
    return Rule(
        f"!has(self.{pool}) || !has({scaling}) || !has({scaling}.attainment) || "
        f"has(self.slo.{promise})",
        kept,
        f"needs spec.slo.{promise}, which is the promise that is to be kept",
        f".{pool}.autoscaling.attainment",
    )


PREFILL_PROMISED = _attains(
    "prefill", "ttftMs", lambda spec: _is_promised(spec.prefill, spec.slo.ttft_ms)
)
DECODE_PROMISED = _attains(
    "decode", "interTokenMs", lambda spec: _is_promised(spec.decode, spec.slo.inter_token_ms)
)


def _scales(spec: Spec) -> bool:
    return spec.decode.autoscaling is not None or bool(spec.prefill and spec.prefill.autoscaling)


ELASTIC_PROMISED = Rule(
    "self.router.elasticRoles == 0 || has(self.slo.ttftMs) && has(self.slo.interTokenMs)",
    lambda spec: (
        not spec.router.elastic_roles or None not in (spec.slo.ttft_ms, spec.slo.inter_token_ms)
    ),
    "needs spec.slo.ttftMs and spec.slo.interTokenMs",
    ".router.elasticRoles",
)
ELASTIC_POOLS = Rule(
    "self.router.elasticRoles == 0 || self.engine.runtime == 'diptych' && "
    "!has(self.decode.autoscaling) && !(has(self.prefill) && has(self.prefill.autoscaling))",
    lambda spec: (
        not spec.router.elastic_roles or (spec.engine.runtime == "diptych" and not _scales(spec))
    ),
    "needs the runtime diptych and no autoscaling",
    ".router.elasticRoles",
)


def _canary_is_promised(spec: Spec) -> bool:
    canary = spec.rollout.canary
    promises = (spec.slo.ttft_ms, spec.slo.inter_token_ms)
    return canary is None or canary.analysis.attainment is None or promises != (None, None)


CANARY_PROMISED = Rule(
    "!has(self.rollout.canary) || !has(self.rollout.canary.analysis.attainment) || "
    "has(self.slo.ttftMs) || has(self.slo.interTokenMs)",
    _canary_is_promised,
    "needs a promise in spec.slo",
    ".rollout.canary.analysis.attainment",
)
CANARY_HANDS_OVER = Rule(
    "!has(self.rollout.canary) || !has(self.rollout.canary.analysis.handedOver) || "
    "has(self.prefill)",
    lambda spec: (
        spec.rollout.canary is None
        or spec.rollout.canary.analysis.handed_over is None
        or spec.prefill is not None
    ),
    "needs a prefill pool",
    ".rollout.canary.analysis.handedOver",
)
SET_OF_TWO = Rule(
    "self.workload == 'Deployment' || has(self.prefill)",
    lambda spec: spec.workload == "Deployment" or spec.prefill is not None,
    "must be Deployment without spec.prefill: a DisaggregatedSet has two roles",
    ".workload",
)
SPEC_RULES = (
    DRAIN_OUTLIVES_LEASE,
    SLEEP_TOGETHER,
    SLEEPERS_WAKE,
    PREFILL_PROMISED,
    DECODE_PROMISED,
    ELASTIC_PROMISED,
    ELASTIC_POOLS,
    CANARY_PROMISED,
    CANARY_HANDS_OVER,
    SET_OF_TWO,
    *RUNTIME_RULES,
)
"""Rules over more than one part of the spec."""


class Spec(SpecPart, frozen=True, kw_only=True):
    model: Annotated[
        Model, Meta(description="The model that both pools serve.", **ruled(*MODEL_RULES))
    ]
    engine: Annotated[
        Engine, Meta(description="Engine settings, equal in both pools.", **ruled(*ENGINE_RULES))
    ] = Engine()
    transfer: Annotated[
        Transfer, Meta(description="The hand-off of KV blocks from prefill to decode.")
    ] = Transfer()
    prefill: Annotated[
        PrefillPool | None,
        Meta(
            description="The pool that computes prompts. Where the runtime is vllm it may be left "
            "out: the decode pool computes them then.",
            examples=["{replicas: 1}"],
            **ruled(ONE_SCALE),
        ),
    ] = None
    decode: Annotated[
        DecodePool,
        Meta(
            description="The pool that generates tokens, and that computes prompts too if there "
            "is no other.",
            examples=["{replicas: 1}"],
            **ruled(ONE_SCALE),
        ),
    ]
    router: Annotated[
        Router,
        Meta(
            description="The proxy that clients talk to; serves the OpenAI API.",
            **ruled(ONE_ROUTER_WITHOUT_VOLUME),
        ),
    ] = Router()
    slo: Annotated[Slo, Meta(description="What the service promises to each request.")] = Slo()
    workload: Workload = "Deployment"
    rollout: Annotated[
        Rollout,
        Meta(
            description="How a changed service replaces the running one.",
            **ruled(ROLLOUT_STEP, CANARY_STEPS),
        ),
    ] = Rollout()
    availability: Annotated[
        Availability, Meta(description="What the service promises while pods come and go.")
    ] = Availability()
    network: Annotated[Network, Meta(description="Who may talk to the pods.")] = Network()
    expose: Annotated[Expose, Meta(description="Who sends requests here.")] = Expose()
    suspend: Annotated[
        bool, Meta(description="Stop all pods and keep everything else; requests are refused.")
    ] = False


class ObjectMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The metadata fields that this project reads. Kubernetes has more."""

    name: Annotated[
        str,
        Meta(
            pattern=NAME_PATTERN,
            max_length=MAX_NAME_LENGTH,
            title="lower-case letters, digits and dashes",
            description="Short enough that the names made from it fit Kubernetes' limits.",
            examples=["smollm2"],
        ),
    ]
    namespace: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            max_length=63,
            title="lower-case letters, digits and dashes",
            examples=["default"],
        ),
    ] = "default"
    uid: str = ""
    generation: int = 0
    annotations: dict[str, str] = {}


class InferenceService(SpecPart, frozen=True):
    """An LLM service in two pools, prefill and decode, joined by a KV cache that travels."""

    api_version: Annotated[
        Literal["diptych.dev/v1alpha1"], Meta(description="Group and version of this kind.")
    ]
    kind: Annotated[Literal["InferenceService"], Meta(description="Always InferenceService.")]
    metadata: ObjectMeta
    spec: Annotated[Spec, Meta(description="What is to run.", **ruled(*SPEC_RULES))]
    status: Annotated[Status, Meta(description="What runs, as the operator sees it.")] = Status()

    @property
    def served_name(self) -> str:
        """The model's name in clients' requests."""
        return self.spec.model.served_name or self.metadata.name

    @property
    def pools(self) -> dict[PoolName, Pool]:
        """The pools that the service has."""
        spec = self.spec
        if spec.prefill is None:
            return {"decode": spec.decode}
        return {"prefill": spec.prefill, "decode": spec.decode}

    @property
    def connector(self) -> Connector:
        """Which connector transfers KV between engines."""
        if self.spec.prefill is None:
            return "none"
        return self.spec.transfer.connector

    @property
    def lease_seconds(self) -> float:
        """How long prefill engines keep blocks. NIXL takes whole seconds only."""
        lease = self.spec.transfer.lease_seconds
        return float(int(lease)) if self.connector == "nixl" else lease

    def engine_of(self, pool: PoolName) -> Engine:
        """Return the engine settings of a pool, with those that only the prefill pool has."""
        engine, prefill = self.spec.engine, self.spec.prefill
        own = prefill.engine if pool == "prefill" and prefill is not None else None
        if own is None:
            return engine
        return msgspec.structs.replace(
            engine,
            image=own.image or engine.image,
            args=[*engine.args, *own.args],
            tensor_parallel_size=own.tensor_parallel_size or engine.tensor_parallel_size,
        )

    @property
    def verification(self) -> Verify:
        """What canaries are sent for, as in `transfer.verify`: Off where no KV is handed over."""
        return "Off" if self.spec.prefill is None else self.spec.transfer.verify

    @property
    def sleeps_when_idle(self) -> bool:
        """Whether all pools may be scaled to zero."""
        scaling = self.spec.decode.autoscaling
        return scaling is not None and scaling.min_replicas == 0
