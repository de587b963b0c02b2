"""The settings of an engine: each is declared once, with its type, its range and its meaning.

The engine's configuration (`config.py`), its checks and its command line, the custom resource with
its CRD, and the reference page are derived from the fields of `EngineSettings`. A new setting is a
field here, and the code that uses it. Names in backticks are fields. Where the custom resource
shows a description, they are written in its form.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

MAX_RANKS = 64
"""Limit on the ranks of tensor and of data parallelism."""
BlockSize = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
SchedulingPolicy = Literal["fcfs", "priority"]
JsonSchemas = Literal["exact", "lenient"]

# What routers have, too (`RouterConfig`).
ReasoningParserName = Annotated[
    Literal["auto", "none", "think", "harmony"],
    Meta(
        description="How the model marks its reasoning, which no structured output constrains. "
        "auto: as its chat template shows (none with vLLM); think: between such tags, as Qwen's; "
        "harmony: in channels, as gpt-oss; none: all text is the answer."
    ),
]
ToolCallParserName = Annotated[
    Literal[
        "auto",
        "hermes",
        "llama",
        "mistral",
        "granite",
        "phi4_mini",
        "deepseek",
        "pythonic",
        "qwen3_coder",
    ],
    Meta(
        description="How the model writes calls of tools (docs/answers.md). auto: as its chat "
        "template shows, in channels where reasoning is in channels."
    ),
]
UsualJsonSchemas = Annotated[
    JsonSchemas,
    Meta(
        description="What happens to a request whose JSON schema has keywords that cannot be "
        "enforced, unless it says so itself. exact: refused; lenient: left out and named in the "
        "header x-diptych-not-enforced."
    ),
]
LoraModules = Annotated[
    dict[str, Annotated[str, Meta(max_length=4096, description="Where it is.")]],
    Meta(
        max_length=1024,
        description="Adapters that are there from the start: name -> directory in the engine. "
        "Clients ask for them as models.",
    ),
]
TracesEndpoint = Annotated[
    str,
    Meta(
        pattern="^https?://",
        max_length=2048,
        title="an http(s) URL",
        description="Where spans of each request go, by OTLP over HTTP, such as "
        "http://HOST:4318/v1/traces. Needs the extra tracing.",
    ),
]


SPECULATION: Final = Meta(
    description="Guess the next tokens of an answer (docs/answers.md). Left out: none."
)


class SpeculativeConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Which tokens are guessed, with vLLM's names."""

    method: Annotated[
        Literal["ngram", "draft_model"],
        Meta(
            description="ngram: what followed the last tokens where they stood before (prompt "
            "lookup). draft_model: what `model` says."
        ),
    ] = "ngram"
    model: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=4096,
                description="A small model of the same tokenizer: its path in the engine, or, in "
                "a service, its URI.",
            ),
        ]
        | None
    ) = None
    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=64, description="Most guesses of a request in a step, if they pay.")
    ] = 16
    prompt_lookup_min: Annotated[
        int, Meta(ge=1, le=64, description="Fewest last tokens that must have stood before.")
    ] = 3
    prompt_lookup_max: Annotated[
        int, Meta(ge=1, le=64, description="Most last tokens that are compared.")
    ] = 16

    @property
    def drafts(self) -> bool:
        """Whether a model guesses."""
        return self.method == "draft_model"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All engines of a service have the same; `None` and `auto` leave the choice to the engine."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Where the model runs; auto takes a CUDA device if there is one."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Type of weights and activations; auto is float32 on CPU, else bfloat16."),
    ] = "auto"
    weight_packing: Annotated[
        Literal["auto", "q8", "q4", "none"],
        Meta(
            description="auto: weights of 4 to 8 bits, on a CPU also of 16, stay as the file has "
            "them; q8, q4: floats too are rounded to so many bits, embeddings and the output to "
            "8; none: everything in `dtype`."
        ),
    ] = "auto"
    activations: Annotated[
        Literal["auto", "q8"],
        Meta(
            description="What products with packed weights round their inputs to. auto: 16 bits; "
            "q8: 8 bits, as llama.cpp does, on CPUs with AVX-512 VNNI: faster, but answers differ "
            "more. With AMX, prompts are in bfloat16."
        ),
    ] = "auto"
    cpu_level: Annotated[
        Literal["auto", "none", "avx2", "vnni", "amx"],
        Meta(
            description="Which of a CPU's instructions kernels use, at most those that it has; "
            "auto: the highest level of each machine, or what DIPTYCH_CPU_LEVEL says. none: no "
            "compiled kernel."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "fp8"],
        Meta(
            description="Type of keys and values in the KV cache; auto is `dtype`, or bfloat16 for "
            "quantised weights on CPUs. bfloat16 halves the cache and its hand-offs; fp8 "
            "(e4m3, GPUs only) halves them again and rounds to 4 digits of 2."
        ),
    ] = "auto"
    block_size: Annotated[BlockSize, Meta(description="Tokens in one KV block.")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            ge=0.05,
            le=1,
            description="How much of a GPU's memory an engine may fill where the KV cache takes "
            "what is free.",
        ),
    ] = 0.9
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
            "least `max_num_seqs`.",
        ),
    ] = 512
    enough_prompt_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=1 << 20,
                description="A step that holds so many prompt tokens begins no further prompt. "
                "Left out: 256 on a CPU, no limit on a GPU.",
            ),
        ]
        | None
    ) = None
    async_scheduling: (
        Annotated[
            bool,
            Meta(
                description="Launch decodes before the results of the step before are known. Left "
                "out: on a GPU, unless ranks share a step."
            ),
        ]
        | None
    ) = None
    speculative_config: Annotated[SpeculativeConfig | None, SPECULATION] = None
    max_num_waiting: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="An engine refuses requests as overload beyond this many in its queue.",
        ),
    ] = 1024
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Meta(
            description="fcfs: first come, first served. priority: requests with a lower priority "
            "go first and are the last to lose their blocks; fcfs refuses them."
        ),
    ] = "fcfs"
    enable_prefix_caching: Annotated[
        bool, Meta(description="Keep the KV of finished prompts to reuse for equal prefixes.")
    ] = True
    encoder_cache_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Image tokens whose features an engine keeps. A larger image is refused.",
        ),
    ] = 16384
    max_idle_sessions: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Requests that may wait for the next piece of their prompt; one more ends "
            "the one that has waited longest.",
        ),
    ] = 64
    pooling: Annotated[
        Literal["last", "mean"],
        Meta(
            description="How an embedding is made of a prompt's hidden states: last takes the "
            "last token's, mean the mean."
        ),
    ] = "last"
    reasoning_parser: ReasoningParserName = "auto"
    tool_call_parser: ToolCallParserName = "auto"
    json_schemas: UsualJsonSchemas = "exact"
    seed: Annotated[
        int, Meta(description="Seeds dummy weights and requests that bring no seed.")
    ] = 0
    kv_keep: Annotated[
        str,
        Meta(
            pattern="^(/[A-Za-z0-9._-]+)*$",
            max_length=512,
            title="the path of a folder",
            description="Folder in memory, such as /dev/shm, in which KV outlives an engine that "
            "dies (docs/handoff.md). CPUs only.",
        ),
    ] = ""
    standby: Annotated[
        bool,
        Meta(
            description="A second process stands by in each pod, and goes on when the first dies. "
            "Needs `kv_keep`."
        ),
    ] = False
    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="LoRA adapters loaded at a time; more may be used in turn. 0: requests may "
            "bring none.",
        ),
    ] = 8
    max_lora_rank: Annotated[
        int, Meta(ge=1, le=4096, description="Adapters of a higher rank are refused.")
    ] = 64
    lora_modules: LoraModules = {}
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_RANKS,
            description="Processes that share every layer's work; each has its own threads and "
            "its own memory for KV.",
        ),
    ] = 1
    enable_return_routed_experts: Annotated[
        bool,
        Meta(
            description="Answers tell which experts each of their tokens went through; only for a "
            "model that has some."
        ),
    ] = False
    otlp_traces_endpoint: TracesEndpoint | None = None
    profile_dir: Annotated[
        str,
        Meta(
            max_length=4096,
            description="Directory that profiles are written to; left out, none may be started.",
        ),
    ] = ""
