"""The InferenceService: typed once here; the CRD, its defaults and its help derive from it.

What must be equal in both pools stands in `spec.model`, `spec.engine` and `spec.transfer`; a pool
carries only what may differ.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

GROUP = "diptych.dev"
VERSION = "v1alpha1"
API_VERSION = "diptych.dev/v1alpha1"
KIND = "InferenceService"

MAX_NAME_LENGTH = 40
"""Leaves room for `-prefill` and the suffixes that Kubernetes adds, within its 63 characters."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

Quantity = Annotated[
    Annotated[int, Meta(ge=0)]
    | Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")],
    Meta(
        description="A Kubernetes quantity, such as 2, 500m or 4Gi.",
        examples=["500m", "4Gi"],
        extra_json_schema={"x-kubernetes-int-or-string": True},
    ),
]


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Common to all parts a user writes: camelCase outside, and no unknown fields."""


class Model(_Spec, frozen=True):
    uri: Annotated[
        str,
        Meta(
            pattern=r"^(package://[A-Za-z_][A-Za-z0-9_]*/.+|file:///.+|dummy://.*)$",
            max_length=1024,
            description="Where the weights are, as each engine pod sees it: package://PKG/FILE (a "
            "file inside an installed Python package), file:///PATH (a GGUF file or a directory of "
            "safetensors), or dummy://?num_hidden_layers=2 (random weights, for measurements).",
            title="a URI",
            examples=["package://PKG/FILE", "file:///PATH", "dummy://"],
        ),
    ]
    served_name: Annotated[
        str,
        Meta(
            max_length=253,
            description="The model name clients send; empty takes the name of this object.",
        ),
    ] = ""


class Engine(_Spec, frozen=True):
    """Defaults are those of the engine itself, written out so that `kubectl explain` shows them."""

    image: Annotated[
        str,
        Meta(min_length=1, max_length=512, description="Container image of the engine pods."),
    ] = "diptych-engine:0.1.0"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Where the model runs; auto takes a CUDA device if there is one."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Type of weights and KV cache; auto is float32 on CPU, else bfloat16."),
    ] = "auto"
    block_size: Annotated[
        Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
        Meta(description="Tokens in one KV block."),
    ] = 16
    kv_cache_memory: Annotated[
        str,
        Meta(
            pattern=r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$",
            description="Memory for KV blocks in each engine pod, such as 512Mi or 24Gi.",
            examples=["512Mi", "24Gi"],
        ),
    ] = "1Gi"
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=1 << 24,
                description="Longest prompt plus output, in tokens; left out, the model's limit.",
            ),
        ]
        | None
    ) = None
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096, description="Most requests computed in one step.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Token budget of one step; longer prompts are prefilled in chunks. At "
            "least maxNumSeqs.",
        ),
    ] = 512
    max_num_waiting: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="An engine refuses requests as overload beyond this many in its queue.",
        ),
    ] = 1024
    enable_prefix_caching: Annotated[
        bool, Meta(description="Keep the KV of finished prompts to reuse for equal prefixes.")
    ] = True


class Transfer(_Spec, frozen=True):
    lease_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="How long prefilled blocks stay pinned without a sign of life from the "
            "decode engine that is to read them.",
        ),
    ] = 30.0
    transport: Annotated[
        Literal["auto", "rdma", "tcp", "shm"],
        Meta(
            description="What carries KV blocks. auto takes the best that both ends offer; rdma "
            "fails rather than falls back; shm joins processes of one machine outside containers."
        ),
    ] = "auto"


class Resources(_Spec, frozen=True):
    limits: Annotated[
        dict[str, Quantity], Meta(description="Most that a pod may use, such as {cpu: 4}.")
    ] = {}
    requests: Annotated[
        dict[str, Quantity], Meta(description="What a pod is guaranteed; sets where it fits.")
    ] = {}


PodResources = Annotated[
    Resources,
    Meta(description="Compute resources of each pod. A CPU limit also sets the engine's threads."),
]
PodTemplate = Annotated[
    dict[str, Any],
    Meta(
        description="A partial pod template (metadata, spec) merged over the rendered one: objects "
        "field by field, containers by name, env, volumes, volumeMounts and ports replaced by "
        "name; null deletes a field.",
        extra_json_schema={"x-kubernetes-preserve-unknown-fields": True},
    ),
]


class Pool(_Spec, frozen=True):
    replicas: Annotated[int, Meta(ge=1, le=1000, description="Engine pods in this pool.")]
    resources: PodResources = Resources()
    pod_template: PodTemplate = {}


class Router(_Spec, frozen=True):
    image: Annotated[
        str,
        Meta(min_length=1, max_length=512, description="Container image of the router pods."),
    ] = "diptych-router:0.1.0"
    replicas: Annotated[int, Meta(ge=1, le=100, description="Router pods.")] = 1
    resources: Annotated[Resources, Meta(description="Compute resources of each router pod.")] = (
        Resources()
    )
    pod_template: PodTemplate = {}


_STEP_BUDGET_RULE = {
    "rule": "self.maxNumBatchedTokens >= self.maxNumSeqs",
    "message": "maxNumBatchedTokens must be at least maxNumSeqs",
}


class Spec(_Spec, frozen=True, kw_only=True):
    model: Annotated[Model, Meta(description="The model that both pools serve.")]
    engine: Annotated[
        Engine,
        Meta(
            description="Engine settings, equal in both pools.",
            extra_json_schema={"x-kubernetes-validations": [_STEP_BUDGET_RULE]},
        ),
    ] = Engine()
    transfer: Annotated[
        Transfer, Meta(description="The hand-off of KV blocks from prefill to decode.")
    ] = Transfer()
    prefill: Annotated[
        Pool, Meta(description="The pool that computes prompts.", examples=["{replicas: 1}"])
    ]
    decode: Annotated[
        Pool, Meta(description="The pool that generates tokens.", examples=["{replicas: 1}"])
    ]
    router: Annotated[
        Router, Meta(description="The proxy that clients talk to; serves the OpenAI API.")
    ] = Router()


class Condition(_Spec, frozen=True):
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    observed_generation: int = 0


class Status(_Spec, frozen=True):
    observed_generation: Annotated[
        int, Meta(description="The metadata.generation that this status speaks of.")
    ] = 0
    url: Annotated[str, Meta(description="Base URL of the OpenAI API inside the cluster.")] = ""
    prefill: Annotated[str, Meta(description="Ready of wanted prefill pods, such as 2/2.")] = ""
    decode: Annotated[str, Meta(description="Ready of wanted decode pods, such as 4/4.")] = ""
    conditions: Annotated[
        list[Condition],
        Meta(
            description="The state of the service, one condition per type.",
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        ),
    ] = []


class ObjectMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The part of Kubernetes' metadata that matters here; the rest is Kubernetes' own business."""

    name: Annotated[
        str,
        Meta(
            pattern=NAME_PATTERN,
            max_length=MAX_NAME_LENGTH,
            title="lower-case letters, digits and dashes",
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


class InferenceService(_Spec, frozen=True):
    """An LLM service in two pools, prefill and decode, joined by a KV cache that travels."""

    api_version: Literal["diptych.dev/v1alpha1"]
    kind: Literal["InferenceService"]
    metadata: ObjectMeta
    spec: Spec
    status: Status = Status()

    @property
    def served_name(self) -> str:
        """The model's name as clients send it."""
        return self.spec.model.served_name or self.metadata.name
