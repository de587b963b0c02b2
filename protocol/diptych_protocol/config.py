"""The configuration of one engine, parsed once at the edge. Units are in the names."""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal, Self

import msgspec
from msgspec import Meta

from diptych_protocol.engine_settings import (
    MAX_RANKS,
    EngineSettings,
    LoraModules,
    ReasoningParserName,
    ToolCallParserName,
    TracesEndpoint,
    UsualJsonSchemas,
)
from diptych_protocol.errors import InvalidRequestError
from diptych_protocol.field_ranges import check_fields
from diptych_protocol.router_settings import BatchSettings, CachePerKey, RouterSettings
from diptych_protocol.sampling import UNSAID, SamplingDefaults

Staging = Literal["auto", "always"]
MAX_PLACE_CHARACTERS: Final = 253
"""The most characters in the name of a node or zone; no name in Kubernetes is longer."""

# The custom resource has these settings too, under the same names.
LEASE: Final = Meta(
    le=3600,
    description="How long prefilled blocks stay pinned without a sign of life from their reader.",
)
DRAIN: Final = Meta(
    le=86400,
    description="How long a pod may take to end or move its work: prefill until its blocks are "
    "read, decode until its streams have ended or moved.",
)
Verify = Annotated[
    Literal["Required", "Warn", "Off"],
    Meta(
        description="Before an engine serves, a real request crosses the hinge through it. "
        "Required keeps it out until that worked, or had worked before it restarted; Warn only "
        "reports; Off sends none."
    ),
]


class KVTransferConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine's end of the hinge. Its role is decided per request, by `kv_transfer_params`."""

    listen_host: Annotated[
        str, Meta(description="The address that the hinge listens on: an IPv4 address or a name.")
    ] = "127.0.0.1"
    listen_port: Annotated[int, Meta(ge=0, le=65535, description="0 takes a free port.")] = 0
    advertise_host: Annotated[
        str,
        Meta(
            description="The address other pods reach this engine at; empty means `listen_host`. "
            "A name is looked up once, when the engine starts."
        ),
    ] = ""
    lease_seconds: Annotated[float, LEASE, Meta(ge=0.001)] = 30.0
    load_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=3600,
            description="A decode engine gives a hand-off up after this long; the time that it "
            "waits for staging memory does not count.",
        ),
    ] = 60.0
    staging_bytes: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Host memory for blocks that cannot be received in their place, until "
                "they are unpacked, and as much again for blocks that are sent from a device. "
                "Further hand-offs of this kind wait; a single one may take more. Left out: "
                "256 MiB, or 2 GiB for KV on a device.",
            ),
        ]
        | None
    ) = None
    transport: Annotated[
        str,
        Meta(
            description="What moves the blocks: the name of a module of "
            "`diptych_kv_transfer.transports`. Engines that exchange KV have the same."
        ),
    ] = "ucx"
    staging: Annotated[
        Staging,
        Meta(
            description="auto: blocks go through copies in host memory if KV is on a device, or "
            "comes from an engine of another geometry. always: all blocks do, which is how a "
            "GPU's path runs on a CPU."
        ),
    ] = "auto"


class EngineConfig(EngineSettings, frozen=True, omit_defaults=True):
    """Everything that an EngineCore process needs to start. It is sent to the process as JSON."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="package://PKG/FILE, file:///PATH, a plain path (a GGUF file or a "
            "directory of safetensors), or dummy://?num_hidden_layers=2&hidden_size=64 for random "
            "weights.",
        ),
    ]
    served_name: Annotated[
        str, Meta(description="The name clients use; empty means the last part of `model`.")
    ] = ""
    engine_id: Annotated[
        str, Meta(description="A name for logs, metrics and hand-offs; empty takes a random one.")
    ] = ""
    node: Annotated[
        str,
        Meta(
            max_length=MAX_PLACE_CHARACTERS,
            description="Name of the node that it runs on; empty: not known.",
        ),
    ] = ""
    zone: Annotated[
        str,
        Meta(
            max_length=MAX_PLACE_CHARACTERS,
            description="Name of the zone that the node is in; empty: not known. Routers prefer "
            "to hand KV over within a node or a zone.",
        ),
    ] = ""
    num_blocks: (
        Annotated[
            int, Meta(ge=2, description="KV blocks; left out, they follow from `kv_cache_bytes`.")
        ]
        | None
    ) = None
    kv_cache_bytes: (
        Annotated[
            int,
            Meta(
                ge=1 << 20,
                description="Memory for KV blocks. Left out: on a GPU what "
                "`gpu_memory_utilization` leaves, on a CPU 1 GiB.",
            ),
        ]
        | None
    ) = 1 << 30
    kv_disk_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Most bytes of KV that an engine keeps in ~/.cache/diptych/kv, to read "
            "prefixes that memory has lost, as after a restart; 0: none.",
        ),
    ] = 0
    max_waiting_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="A front-end with more prompt tokens than this that had no answer yet "
                "refuses further ones as overload; a single prompt may be longer. Left out: only "
                "requests are counted.",
            ),
        ]
        | None
    ) = None
    streaming_input_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=86400,
            description="How long a front-end waits for the next piece of a prompt.",
        ),
    ] = 300.0
    stream_interval: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="A stream gets its first token at once, and then this many tokens at a "
            "time, which costs the front-end less.",
        ),
    ] = 1
    journey_events: Annotated[
        bool, Meta(description="Tell each client the stations of its requests' lives.")
    ] = False
    num_threads: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Threads of the model. Left out: every processor that the process may "
                "use but one, which is the front-end's, or all if there are only two; ranks and "
                "cores of one front-end share them.",
            ),
        ]
        | None
    ) = None
    skip_tokenizer_init: Annotated[
        bool, Meta(description="Load no tokenizer: prompts are token ids, and so are answers.")
    ] = False
    kv_transfer: Annotated[
        KVTransferConfig | None,
        Meta(description="The engine's end of the hinge; left out, it takes no part in hand-offs."),
    ] = None
    revision: Annotated[
        str,
        Meta(description="Names the deployment's revision; engines exchange KV only within one."),
    ] = ""
    drain_seconds: Annotated[float, DRAIN, Meta(ge=0)] = 30.0
    worker_extension: Annotated[
        str, Meta(description="module:Class with worker methods of your own for collective_rpc.")
    ] = ""
    allow_functions: Annotated[
        bool,
        Meta(
            description="Insecure: let clients name functions, as module:function, that "
            "collective_rpc and apply_model run in the engine. Who reaches the engine's own socket "
            "can then run any code there."
        ),
    ] = False
    executor_class: Annotated[
        str,
        Meta(
            description="module:Class of your own that runs the model: a subclass of the engine's "
            "ModelRunner, or of LeadRunner where ranks share a model."
        ),
    ] = ""
    logits_processors: Annotated[
        list[str],
        Meta(
            max_length=64,
            title="up to 64 texts",
            description="Functions of your own, as module:function, that requests may name in "
            "`SamplingParams.logits_processors`. One takes the output's token ids and the logits "
            "of the next token, or the prompt's token ids before them, and returns the logits.",
        ),
    ] = msgspec.field(default_factory=list)
    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, le=1, description="Layers are not split over processes: 1 is the only value."),
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_RANKS,
            description="Engine cores behind one front-end that share its requests; each has a "
            "whole model.",
        ),
    ] = 1
    data_parallel_rank: Annotated[
        int, Meta(ge=0, description="This core's place among them; the front-end sets it.")
    ] = 0
    data_parallel_lockstep: Annotated[
        bool,
        Meta(
            description="Cores that share layers (mixtures of experts) step together: while one "
            "works, all do."
        ),
    ] = False
    data_parallel_store: Annotated[
        str,
        Meta(
            description="A file in which cores in lockstep find each other; the front-end sets it."
        ),
    ] = ""
    shutdown_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="After SIGTERM to the core itself, how long its requests may take to end; "
            "0 aborts them.",
        ),
    ] = 0.0

    @property
    def observability_config(self) -> Self:
        """The configuration itself. vLLM has its settings in groups; here one struct has all of
        them."""
        return self

    parallel_config = scheduler_config = cache_config = lora_config = observability_config
    model_config = device_config = load_config = observability_config

    def check(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in range."""
        check_fields(self)
        spec = self.speculative_config
        for field, ok, wanted in (
            ("max_num_batched_tokens", self.max_num_batched_tokens >= self.max_num_seqs,
             f"must be at least max_num_seqs, not {self.max_num_batched_tokens}"),
            ("data_parallel_rank", self.data_parallel_rank < self.data_parallel_size,
             f"must be below data_parallel_size, not {self.data_parallel_rank}"),
            ("data_parallel_size", self.kv_transfer is None or self.data_parallel_size == 1,
             "must be 1 in an engine that takes part in hand-offs"),
            ("async_scheduling", not (self.async_scheduling and self.steps_together),
             "must be false where several ranks compute a step together"),
            ("speculative_config", spec is None or spec.prompt_lookup_min <= spec.prompt_lookup_max,
             "must have a prompt_lookup_min of at most its prompt_lookup_max"),
            ("speculative_config", spec is None or spec.drafts == (spec.model is not None),
             "must have the method draft_model and a model, or neither"),
            ("speculative_config",
             spec is None or not spec.drafts or self.tensor_parallel_size == 1,
             "must have the method ngram where tensor_parallel_size is above 1"),
            ("kv_keep", not self.kv_keep or self.enable_prefix_caching,
             "must be left out without enable_prefix_caching, by which kept KV is found"),
            ("standby", not self.standby or bool(self.kv_keep),
             "needs kv_keep, a folder in memory"),
            ("standby", not self.standby or self.data_parallel_size == 1,
             "must be left out where data_parallel_size is above 1"),
            ("lora_modules", self.name not in self.lora_modules,
             f"may not name {self.name!r}: that is the model's own name"),
        ):  # fmt: skip
            if not ok:
                raise InvalidRequestError(f"{field} {wanted}", param=field)

    @property
    def steps_together(self) -> bool:
        """Whether several ranks compute a step."""
        return self.tensor_parallel_size > 1 or self.data_parallel_lockstep

    def runs_ahead(self, *, on_gpu: bool) -> bool:
        """Whether decodes are launched before the results of the step before are known."""
        if self.async_scheduling is None:
            return on_gpu and not self.steps_together
        return self.async_scheduling

    @property
    def follows_requests(self) -> bool:
        """Whether the core reports the events of requests."""
        return self.journey_events or self.otlp_traces_endpoint is not None

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a service promises to each request (its service-level objectives)."""

    ttft_ms: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=600_000,
                description="The first token comes within so many milliseconds. A router whose "
                "policy is prefix-aware refuses a request that would miss its own.",
            ),
        ]
        | None
    ) = None
    inter_token_ms: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=60_000,
                description="The tokens after the first come in so many milliseconds each, on "
                "average over an answer.",
            ),
        ]
        | None
    ) = None


Runtime = Literal["diptych", "vllm"]
Connector = Literal["diptych", "nixl", "none"]
LEAST_LEASE_OF_NIXL_S: Final = 6.0
"""The shortest lease: vLLM renews a lease after each sixth of its time, in whole seconds."""
RANKS_OF_CONNECTOR: Final = (1, 2, 4, 8)
"""The numbers of tensor-parallel ranks that our connector in vLLM accepts; of any two, one divides
the other. 1 and 2 were run in vLLM, and 4 and 8 without it. The connector and the operator refuse
others."""


class Batches(BatchSettings, frozen=True, omit_defaults=True):
    """The limits of a router's batches, if it has a directory for them."""

    max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 50,
            description="The most that all files and batches may take on the disk. One API key may "
            "have half of it.",
        ),
    ] = 10 << 30


class RouterConfig(RouterSettings, frozen=True, omit_defaults=True):
    """Everything that a router needs to know of its service. It is sent to the process as JSON."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="Where the tokenizer is found; the same text as the engines' `model`.",
        ),
    ]
    served_name: Annotated[
        str, Meta(description="The name clients use; empty means the last part of `model`.")
    ] = ""
    verify: Verify = "Required"
    max_held: Annotated[
        int, Meta(ge=0, description="More waiting requests than this are refused at once.")
    ] = 512
    drain_seconds: Annotated[float, DRAIN, Meta(ge=0)] = 30.0
    lora_modules: LoraModules = msgspec.field(default_factory=dict)
    reasoning_parser: ReasoningParserName = "auto"
    tool_call_parser: ToolCallParserName = "auto"
    json_schemas: UsualJsonSchemas = "exact"
    otlp_traces_endpoint: TracesEndpoint | None = None
    slo: Annotated[Slo, Meta(description="What is promised to each request.")] = Slo()
    sampling: Annotated[
        SamplingDefaults,
        Meta(
            description="What requests get that leave these fields out; left out here too, what "
            "the model's files say (generation_config.json, GGUF metadata)."
        ),
    ] = UNSAID
    batches: Annotated[
        Batches, Meta(description="Files and batches, for a router with `--batch-directory`.")
    ] = Batches()
    cache_per_key: CachePerKey = False

    def check(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in range."""
        check_fields(self)
        if self.elastic_roles and None in (self.slo.ttft_ms, self.slo.inter_token_ms):
            why = "elastic_roles needs both promises of slo, which say what engines are needed for"
            raise InvalidRequestError(why, param="elastic_roles")

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]


class CurveKeys(msgspec.Struct, frozen=True):
    """The CURVE key pair (Z85) that all parties of one service share, and which proves that they
    belong to it.

    The public key is as secret as the other, because a server admits only clients that present it.
    """

    public: str
    secret: str


class UsageContext(enum.Enum):
    """The kind of program that made an engine, in vLLM's terms. It is reported to nobody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
