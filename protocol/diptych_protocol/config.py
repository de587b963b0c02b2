"""The configuration of one engine, parsed once at the edge. Units are in the names."""

from __future__ import annotations

from typing import Literal

import msgspec

from diptych_protocol.errors import InvalidRequestError

MAX_RANKS = 64
"""Of either kind of parallelism."""
RANKS = f"between 1 and {MAX_RANKS}"
CPU_LEVELS = ("auto", "none", "avx2", "vnni", "amx")

SchedulingPolicy = Literal["fcfs", "priority"]
Staging = Literal["auto", "always"]


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The engine's end of the hinge. Its role is decided per request, by `kv_transfer_params`."""

    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    """0 takes a free port."""
    advertise_host: str = ""
    """The address other pods reach this engine at; empty means `listen_host`. A name is looked up
    once, when the engine starts."""
    lease_seconds: float = 30.0
    """How long prefilled blocks stay pinned without a sign of life from the decode engine."""
    load_timeout_s: float = 60.0
    """A decode engine gives a hand-off up after this long, a wait for staging left out."""
    staging_bytes: int | None = None
    """Room in host memory for what comes and cannot be received in its place, until it is unpacked,
    and as much again for what is sent from a device; further such hand-offs wait. A single one may
    take more. None: 256 MiB, or 2 GiB for KV on a device."""
    staging: Staging = "auto"
    """`auto`: blocks go through copies in host memory if KV is on a device, or comes from an engine
    of another geometry. `always`: all blocks do, which is how a GPU's path runs on a CPU."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything an EngineCore process needs to start; travels to it as JSON."""

    model: str
    """`package://PKG/FILE`, `file:///PATH`, a plain path (a GGUF file or a directory of
    safetensors), or `dummy://?num_hidden_layers=2&hidden_size=64` for random weights."""
    served_name: str = ""
    """The name clients use; empty means the last part of `model`."""
    engine_id: str = ""
    """A name for logs, metrics and hand-offs; empty takes a random one."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    dtype: str = "auto"
    """`auto` (float32 on CPU, bfloat16 on CUDA), `float32` or `bfloat16`."""
    weight_packing: str = "auto"
    """`auto`: on a CPU in float32, the 4- and 8-bit weights of a GGUF file are multiplied as they
    are, with activations rounded to 8 bits. `none`: everything in `dtype`."""
    cpu_level: str = "auto"
    """Which of the processor's instructions kernels use: `avx2`, `vnni`, `amx`, or `none` for no
    compiled kernel at all. `auto`: what `$DIPTYCH_CPU_LEVEL` says, or the highest that there is. It
    is one for a whole process."""
    kv_cache_dtype: str = "auto"
    """`auto`: `dtype`, but bfloat16 where weights are packed, whose products are rounded further
    than that. `float32` or `bfloat16`; models in bfloat16 and those on CUDA keep KV in `dtype`."""
    block_size: int = 16
    """Tokens a KV block holds; a power of two."""
    num_blocks: int | None = None
    """KV blocks; None derives them from `kv_cache_bytes`."""
    kv_cache_bytes: int | None = 1 << 30
    """None: on a GPU what `gpu_memory_utilization` leaves, on a CPU 1 GiB."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's own limit."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step; longer prompts are prefilled in chunks."""
    enough_prompt_tokens: int | None = None
    """A step that holds so many prompt tokens begins no further prompt, which would only make those
    in it wait for it. None: 256 on a CPU, on a GPU as many as a step may hold."""
    async_scheduling: bool | None = None
    """Launch decodes before the results of the step before are known. None: on a GPU, where the
    device would wait for the host between steps, unless several ranks compute a step together."""
    max_num_waiting: int = 1024
    """More waiting requests than this are refused as overload."""
    max_waiting_tokens: int | None = None
    """A front-end with more prompt tokens than this that had no answer yet refuses further ones as
    overload; a single prompt may be longer. None: only requests are counted."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """`fcfs`: first come, first served. `priority`: requests with a lower `priority` go first, and
    are the last to lose their blocks; other policies refuse a request that has one."""
    max_idle_sessions: int = 64
    """Requests that may wait for the next piece of their prompt; one more ends the one that has
    waited longest."""
    streaming_input_timeout_s: float = 300.0
    """How long a front-end waits for the next piece of a prompt."""
    journey_events: bool = False
    """Tell each client the stations of its requests' lives: see `RequestJourneyEvent`."""
    otlp_traces_endpoint: str | None = None
    """Where a span of each request goes, by OTLP over HTTP: `http://HOST:4318/v1/traces`. Needs the
    extra `tracing`."""
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    """Threads of the model. None takes every processor that the process may use but one, which is
    the front-end's, or all if there are only two; ranks and cores of one front-end share them."""
    pooling: str = "last"
    """How an embedding is made of a prompt's hidden states: `last` takes that of the last token,
    `mean` the mean of all."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, and so are answers."""
    seed: int = 0
    """Seeds dummy weights and requests that bring no seed."""
    kv_transfer: KVTransferConfig | None = None
    """None: this engine takes no part in hand-offs."""
    revision: str = ""
    """Names the deployment's revision; engines exchange KV only within one."""
    drain_seconds: float = 30.0
    """After SIGTERM, how long requests and leases may take to end or move elsewhere."""
    max_loras: int = 8
    """LoRA adapters loaded at a time; more may be used in turn. 0: requests may bring none."""
    max_lora_rank: int = 64
    """Adapters of a higher rank are refused."""
    lora_modules: dict[str, str] = {}
    """Adapters that are there from the start: name -> directory. Clients ask for them as models."""
    worker_extension: str = ""
    """`module:Class` with worker methods of your own for `collective_rpc`."""
    tensor_parallel_size: int = 1
    """Processes that share every layer's work; each has `num_threads` and `kv_cache_bytes`."""
    pipeline_parallel_size: int = 1
    """Layers are not split over processes: 1 is the only value."""
    data_parallel_size: int = 1
    """Engine cores behind one front-end that share its requests; each has a whole model."""
    data_parallel_rank: int = 0
    """This core's place among them; the front-end sets it."""
    data_parallel_lockstep: bool = False
    """Cores that share layers (mixtures of experts) step together: while one works, all do."""
    data_parallel_store: str = ""
    """A file in which cores in lock-step find each other; the front-end sets it."""
    shutdown_timeout_s: float = 0.0
    """After SIGTERM to the core itself, how long its requests may take to end; 0 aborts them."""
    profile_dir: str = ""
    """Where profiles are written; empty: none may be started."""
    gpu_memory_utilization: float = 0.9
    """How much of a GPU's memory may be in use when `kv_cache_bytes` is None: weights, KV and a
    step's tensors together. Adapters that are loaded later are not counted."""

    def check(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in range."""
        power_of_two = self.block_size > 0 and self.block_size & (self.block_size - 1) == 0
        for field, ok, wanted in (
            ("model", bool(self.model), "set"),
            ("device", self.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda"),
            ("dtype", self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"),
            ("weight_packing", self.weight_packing in ("auto", "none"), "auto or none"),
            ("cpu_level", self.cpu_level in CPU_LEVELS, "auto, none, avx2, vnni or amx"),
            ("kv_cache_dtype", self.kv_cache_dtype in ("auto", "float32", "bfloat16"),
             "auto, float32 or bfloat16"),
            ("block_size", power_of_two and self.block_size <= 1024, "a power of two up to 1024"),
            ("num_blocks", self.num_blocks is None or self.num_blocks >= 2, "at least 2"),
            ("kv_cache_bytes", self.kv_cache_bytes is None or self.kv_cache_bytes >= 1 << 20,
             "at least 1 MiB"),
            ("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1,
             "above 0 and at most 1"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            ("max_num_seqs", 1 <= self.max_num_seqs <= 4096, "between 1 and 4096"),
            ("max_num_batched_tokens", self.max_num_batched_tokens >= self.max_num_seqs,
             "at least max_num_seqs"),
            ("enough_prompt_tokens", self.enough_prompt_tokens is None
             or self.enough_prompt_tokens >= 1, "at least 1"),
            ("max_num_waiting", self.max_num_waiting >= 1, "at least 1"),
            ("pooling", self.pooling in ("last", "mean"), "last or mean"),
            ("scheduling_policy", self.scheduling_policy in ("fcfs", "priority"),
             "fcfs or priority"),
            ("pipeline_parallel_size", self.pipeline_parallel_size == 1, "1"),
            ("max_waiting_tokens", self.max_waiting_tokens is None or self.max_waiting_tokens >= 1,
             "at least 1"),
            ("otlp_traces_endpoint", _is_http(self.otlp_traces_endpoint), "an http(s) URL"),
            ("max_idle_sessions", 0 <= self.max_idle_sessions <= 4096, "between 0 and 4096"),
            ("streaming_input_timeout_s", 0 < self.streaming_input_timeout_s <= 86400,
             "above 0 and at most 86400"),
            ("num_threads", self.num_threads is None or self.num_threads >= 1, "at least 1"),
            ("drain_seconds", 0 <= self.drain_seconds <= 86400, "between 0 and 86400"),
            ("max_loras", 0 <= self.max_loras <= 1024, "between 0 and 1024"),
            ("max_lora_rank", 1 <= self.max_lora_rank <= 4096, "between 1 and 4096"),
            ("tensor_parallel_size", 1 <= self.tensor_parallel_size <= MAX_RANKS, RANKS),
            ("data_parallel_size", 1 <= self.data_parallel_size <= MAX_RANKS, RANKS),
            ("data_parallel_rank", 0 <= self.data_parallel_rank < self.data_parallel_size,
             "below data_parallel_size"),
            ("shutdown_timeout_s", 0 <= self.shutdown_timeout_s <= 86400, "between 0 and 86400"),
        ):  # fmt: skip
            if not ok:
                raise InvalidRequestError(
                    f"{field} must be {wanted}, not {getattr(self, field)!r}", param=field
                )
        if self.name in self.lora_modules:
            raise InvalidRequestError(
                f"lora_modules: {self.name!r} is the model's own name", param="lora_modules"
            )
        if self.async_scheduling and self.steps_together:
            raise InvalidRequestError(
                "async_scheduling must be false where several ranks compute a step together",
                param="async_scheduling",
            )
        if self.kv_transfer is not None and self.data_parallel_size > 1:
            raise InvalidRequestError(
                "data_parallel_size must be 1 in an engine that takes part in hand-offs",
                param="data_parallel_size",
            )

    @property
    def steps_together(self) -> bool:
        """Several ranks compute a step."""
        return self.tensor_parallel_size > 1 or self.data_parallel_lockstep

    def runs_ahead(self, *, on_gpu: bool) -> bool:
        """Whether decodes are launched before the results of the step before are known."""
        if self.async_scheduling is None:
            return on_gpu and not self.steps_together
        return self.async_scheduling

    @property
    def follows_requests(self) -> bool:
        """The core tells the stations of requests."""
        return self.journey_events or self.otlp_traces_endpoint is not None

    @property
    def name(self) -> str:
        """The model's name as clients see it."""
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]


def _is_http(url: str | None) -> bool:
    return url is None or url.startswith(("http://", "https://"))


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a router needs to know of the service it fronts; travels to it as JSON."""

    model: str
    """Where the tokenizer is found; the same text as `EngineConfig.model`."""
    served_name: str = ""
    """The name clients use; empty means the last part of `model`."""
    verify: Literal["required", "warn", "off"] = "required"
    """Before an engine gets requests, a canary crosses the hinge through it: `required` keeps an
    engine out until that worked, `warn` only reports, `off` sends none."""
    hold_seconds: float = 30.0
    """How long a request waits for a pool that is empty before it is refused."""
    max_held: int = 512
    """More waiting requests than this are refused at once."""
    drain_seconds: float = 30.0
    """After SIGTERM, how long answers under way may take."""
    lora_modules: dict[str, str] = {}
    """Adapters that clients may ask for as models; the same as `EngineConfig.lora_modules`."""

    def check(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in range."""
        for field, ok, wanted in (
            ("model", bool(self.model), "set"),
            ("hold_seconds", 0 <= self.hold_seconds <= 86400, "between 0 and 86400"),
            ("max_held", self.max_held >= 0, "at least 0"),
            ("drain_seconds", 0 <= self.drain_seconds <= 86400, "between 0 and 86400"),
        ):
            if not ok:
                raise InvalidRequestError(
                    f"{field} must be {wanted}, not {getattr(self, field)!r}", param=field
                )

    @property
    def name(self) -> str:
        """The model's name as clients see it."""
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]


class CurveKeys(msgspec.Struct, frozen=True):
    """The CURVE key pair (Z85) that all parties of one service share; proves membership.

    The public key is as secret as the other: a server admits only clients that present it.
    """

    public: str
    secret: str
