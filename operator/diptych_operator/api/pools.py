"""`spec.prefill` and `spec.decode`: the number of pods, and how the pools differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from diptych_operator.api.base import Rule, SpecPart, ruled
from diptych_operator.api.engine import PrefillEngine


@dataclass(frozen=True, slots=True)
class Counts:
    """A number of pods for each pool; true if there is any."""

    prefill: int
    decode: int

    def of(self, role: str) -> int:
        return self.prefill if role == "prefill" else self.decode

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.prefill + other.prefill, self.decode + other.decode)

    def __bool__(self) -> bool:
        return self.prefill > 0 or self.decode > 0


NOTHING = Counts(0, 0)


Quantity = Annotated[
    Annotated[int, Meta(ge=0)]
    | Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$", max_length=32)],
    Meta(
        description="A Kubernetes quantity, such as 2, 500m or 4Gi.",
        examples=["500m", "4Gi"],
        extra_json_schema={"x-kubernetes-int-or-string": True},
    ),
]


class Resources(SpecPart, frozen=True):
    limits: Annotated[
        dict[str, Quantity],
        Meta(max_length=32, description="Most that a pod may use, such as {cpu: 4}."),
    ] = {}
    requests: Annotated[
        dict[str, Quantity],
        Meta(max_length=32, description="What a pod is guaranteed; sets where it fits."),
    ] = {}


PodResources = Annotated[
    Resources,
    Meta(description="Compute resources of each pod. A CPU limit also sets the engine's threads."),
]
_TEMPLATE_HELP = (
    "Is merged over the rendered one: objects field by field, containers by name, env, volumes, "
    "volumeMounts and ports replaced by name. What drains a pod stays. For null see "
    "podTemplateRemove."
)
PodTemplate = Annotated[
    dict[str, Any],
    Meta(
        description=_TEMPLATE_HELP, extra_json_schema={"x-kubernetes-preserve-unknown-fields": True}
    ),
]
PodTemplateRemove = Annotated[
    list[
        Annotated[
            str,
            Meta(
                pattern=r"^(metadata|spec)(\.[^.\[\]\s]+|\[[^\[\]\s]+\])+$",
                max_length=253,
                title="the path of a field",
                examples=["spec.securityContext.runAsUser"],
                description="The path of one field.",
            ),
        ]
    ],
    Meta(
        max_length=32,
        description="Fields to leave out of it, such as spec.containers[engine].startupProbe; "
        "entries of lists and dotted names in brackets.",
    ),
]

ENGINE_CONTAINER = "engine"


def _sets_engine_image(template: dict[str, Any]) -> bool:
    """Only looks; what else may be wrong with a podTemplate shows when it is merged."""
    pod_spec = template.get("spec")
    containers = pod_spec.get("containers") if isinstance(pod_spec, dict) else None
    return isinstance(containers, list) and any(
        isinstance(container, dict)
        and container.get("name") == ENGINE_CONTAINER
        and container.get("image") is not None
        for container in containers
    )


ONE_IMAGE = Rule(
    "!has(self.spec) || !has(self.spec.containers) || "
    f"self.spec.containers.all(c, c.name != '{ENGINE_CONTAINER}' || !has(c.image))",
    lambda template: not _sets_engine_image(template),
    f"must not set the image of the container {ENGINE_CONTAINER}: it is spec.engine.image, equal "
    "in both pools (or spec.prefill.engine.image, where vLLM runs)",
)
_OPEN_OBJECT = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_CONTAINER = _OPEN_OBJECT | {
    "description": "A container of the pods, added or merged by its name.",
    "required": ["name"],
    "properties": {
        "name": {
            "type": "string",
            "maxLength": 63,
            "description": f"{ENGINE_CONTAINER} is the engine itself.",
        },
        "image": {
            "type": "string",
            "maxLength": 512,
            "description": "Image of an added container; the engine's is spec.engine.image.",
        },
    },
}
_POD_SPEC = _OPEN_OBJECT | {
    "description": "A partial pod spec.",
    "properties": {
        "containers": {
            "type": "array",
            "maxItems": 32,
            "items": _CONTAINER,
            "description": "Containers to add or to change.",
        }
    },
}
EngineTemplate = Annotated[
    dict[str, Any],
    Meta(
        description=_TEMPLATE_HELP,
        **ruled(ONE_IMAGE, schema=_OPEN_OBJECT | {"properties": {"spec": _POD_SPEC}}),
    ),
]
"""Open like any pod template, but typed as far as `ONE_IMAGE` looks: CEL sees typed fields only."""


ScaledBy = Annotated[
    Literal["Operator", "External"],
    Meta(
        description="Who chooses the number of pods. Operator: by the signals below. External: "
        "who scales the PoolScaler NAME-prefill or NAME-decode (an HPA, KEDA), within the bounds."
    ),
]
MinReplicas = Annotated[
    int,
    Meta(ge=0, le=1000, description="Fewest pods. 0, in both pools, lets an idle service sleep."),
]
MaxReplicas = Annotated[int, Meta(ge=1, le=1000, description="Most pods.")]
ScaleDownSeconds = Annotated[
    int,
    Meta(
        ge=0,
        le=86400,
        description="How long fewer pods must have been enough before one is given up.",
    ),
]
Attainment = Annotated[
    float,
    Meta(
        ge=0.5,
        le=0.999,
        description="Share of requests that are to keep the pool's promise. It grows while fewer "
        "do and requests share pods, and shrinks only as far as they do.",
        examples=["0.95"],
    ),
]


class PrefillAutoscaling(SpecPart, frozen=True, kw_only=True):
    by: ScaledBy = "Operator"
    min_replicas: MinReplicas = 1
    max_replicas: MaxReplicas
    queued_tokens_per_replica: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description="Prompt tokens that wait to be computed, not counting cached prefixes, "
            "that one pod is to be left with.",
        ),
    ] = 4096
    attainment: Attainment | None = None
    scale_down_seconds: ScaleDownSeconds = 300


class DecodeAutoscaling(SpecPart, frozen=True, kw_only=True):
    by: ScaledBy = "Operator"
    min_replicas: MinReplicas = 1
    max_replicas: MaxReplicas
    kv_utilization: Annotated[
        int,
        Meta(ge=1, le=100, description="Percent of KV blocks that are to be in use, on average."),
    ] = 80
    waiting_per_replica: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Requests in a pod's queue beyond which another pod is worth having.",
        ),
    ] = 4
    attainment: Attainment | None = None
    scale_down_seconds: ScaleDownSeconds = 300


MIN_BELOW_MAX = Rule(
    "self.minReplicas <= self.maxReplicas",
    lambda scaling: scaling.min_replicas <= scaling.max_replicas,
    "must be at most maxReplicas",
    ".minReplicas",
)
EXTERNAL_AWAKE = Rule(
    "self.by != 'External' || self.minReplicas >= 1",
    lambda scaling: scaling.by != "External" or scaling.min_replicas >= 1,
    "must be at least 1 where by is External: pools sleep and wake together, and whoever sizes one "
    "of them from outside sees no load in a pool without pods",
    ".minReplicas",
)
SCALING_RULES = (MIN_BELOW_MAX, EXTERNAL_AWAKE)
ONE_SCALE = Rule(
    "!(has(self.replicas) && has(self.autoscaling))",
    lambda pool: pool.replicas is None or pool.autoscaling is None,
    "give replicas or autoscaling, not both",
)
Replicas = Annotated[
    int, Meta(ge=1, le=1000, description="Engine pods in this pool; 1 if autoscaling is not set.")
]


class PrefillPool(SpecPart, frozen=True):
    replicas: Replicas | None = None
    autoscaling: Annotated[
        PrefillAutoscaling | None,
        Meta(
            description="The number of pods by the prompt tokens that wait, or by somebody else.",
            **ruled(*SCALING_RULES),
        ),
    ] = None
    engine: Annotated[
        PrefillEngine | None,
        Meta(
            description="In what prefill engines differ from decode engines; only with the runtime "
            "vllm."
        ),
    ] = None
    resources: PodResources = Resources()
    pod_template: EngineTemplate = {}
    pod_template_remove: PodTemplateRemove = []


class DecodePool(SpecPart, frozen=True):
    replicas: Replicas | None = None
    autoscaling: Annotated[
        DecodeAutoscaling | None,
        Meta(
            description="The number of pods by the use of their KV cache and their queues, or by "
            "somebody else.",
            **ruled(*SCALING_RULES),
        ),
    ] = None
    resources: PodResources = Resources()
    pod_template: EngineTemplate = {}
    pod_template_remove: PodTemplateRemove = []


Pool = PrefillPool | DecodePool
PoolName = Literal["prefill", "decode"]
