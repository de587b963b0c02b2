"""`spec.engine`: which program the engines run, and what it computes with.

There are two programs. The fields of `EngineSettings` are the settings of our own engine. vLLM is
given its arguments under its own names, in `args` (`vllm_arguments.py`). What only one of the
programs has is refused by name where the other one runs; `VLLM_INSTEAD` is the table of that.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from diptych_operator.api.base import ImageReference, Rule, SpecPart, default_of, ruled, spec_part
from diptych_operator.api.vllm_arguments import (
    ARGUMENT_RULES,
    EQUAL_IN_BOTH,
    OFFLOADING,
    Argument,
    Arguments,
)
from diptych_protocol import EngineSettings, ReasoningParserName, SpeculativeConfig
from diptych_protocol.config import Runtime
from diptych_protocol.engine_settings import MAX_RANKS, SPECULATION

LOOK_UP_ORDER = Rule(
    "self.promptLookupMin <= self.promptLookupMax",
    lambda guesses: guesses.prompt_lookup_min <= guesses.prompt_lookup_max,
    "must have a promptLookupMin of at most its promptLookupMax",
)
DRAFT_MODEL = Rule(
    "(self.method == 'draft_model') == has(self.model)",
    lambda guesses: (guesses.method == "draft_model") == (guesses.model is not None),
    "must have the method draft_model and a model, or neither",
)

if TYPE_CHECKING:

    class Speculation(SpeculativeConfig, SpecPart, frozen=True):
        """The engine's `SpeculativeConfig` as a part of the spec."""

    class Engine(EngineSettings, SpecPart, frozen=True):
        """`EngineSettings` as a part of the spec, with what only pods have."""

        speculative_config: Speculation | None = None

        runtime: Runtime = "diptych"
        image: str = ""
        args: list[str] = []
        kv_cache_memory: str = "1Gi"
        kv_cache_disk: str = "none"

else:
    Speculation = spec_part("Speculation", SpeculativeConfig)
    Engine = spec_part(
        "Engine",
        EngineSettings,
        runtime=(
            Annotated[
                Runtime,
                Meta(
                    description="What engines run. diptych: our own program, in two pools. vllm: "
                    "`vllm serve`, in one pool or two (docs/vllm.md); of the fields below it has "
                    "image, args, tensorParallelSize, reasoningParser, toolCallParser, "
                    "jsonSchemas and otlpTracesEndpoint."
                ),
            ],
            "diptych",
        ),
        image=(
            Annotated[
                ImageReference,
                Meta(
                    description="Container image of the engine pods; left out, the operator's. "
                    "The status says which it is. The runtime vllm needs one, such as "
                    "vllm/vllm-openai:v0.32.0."
                ),
            ],
            "",
        ),
        args=(Arguments, []),
        kv_cache_memory=(
            Annotated[
                str,
                Meta(
                    pattern=r"^(auto|[1-9][0-9]{0,5}(Mi|Gi|Ti))$",
                    description="Memory for KV blocks in each engine process, such as 512Mi or "
                    "24Gi. auto takes what gpuMemoryUtilization leaves of a GPU, and 1Gi on a CPU.",
                    examples=["24Gi", "auto"],
                ),
            ],
            "1Gi",
        ),
        kv_cache_disk=(
            Annotated[
                str,
                Meta(
                    pattern=r"^(none|[1-9][0-9]{0,5}(Mi|Gi|Ti))$",
                    description="Most KV that an engine keeps in ~/.cache/diptych/kv, to read "
                    "prefixes that memory has lost, as after a restart.",
                    examples=["100Gi", "none"],
                ),
            ],
            "none",
        ),
        speculative_config=(
            Annotated[Speculation | None, SPECULATION, Meta(**ruled(LOOK_UP_ORDER, DRAFT_MODEL))],
            None,
        ),
    )
    """Defaults are those of the engine, written out so that `kubectl explain` shows them."""


VLLM_HAS: Final = frozenset(
    {
        "runtime", "image", "args",
        "tensor_parallel_size",
        # These are the routers' business, whatever the engines run.
        "reasoning_parser", "tool_call_parser", "json_schemas", "otlp_traces_endpoint",
        "lora_modules",
    }
)  # fmt: skip
"""Fields that mean something where the runtime is vllm. All others must be at their defaults."""

VLLM_INSTEAD: Final = {
    "async_scheduling": "--async-scheduling",
    "block_size": "--block-size",
    "dtype": "--dtype",
    "enable_prefix_caching": "--no-enable-prefix-caching",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "kv_cache_memory": "--kv-cache-memory-bytes",
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "max_num_waiting": "--max-num-queued-reqs",
    "pooling": "--pooler-config",
    "profile_dir": "--profiler-config",
    "scheduling_policy": "--scheduling-policy",
    "seed": "--seed",
    "speculative_config": "--speculative-config",
}
"""The argument of vLLM that does what the field does for our own engine, where there is one."""


def _is_default(name: str, default: Any, engine: Engine) -> bool:
    return engine.runtime != "vllm" or getattr(engine, name) == default


def _not_for_vllm(field: msgspec.inspect.Field) -> Rule:
    """The field is at its default, as API servers write it out, wherever vLLM runs."""
    name, default = field.encode_name, default_of(field)
    if default is None:
        cel = f"!has(self.{name})"
    elif default == "":
        cel = f"!has(self.{name}) || self.{name} == ''"
    elif default == {}:
        cel = f"size(self.{name}) == 0"
    else:
        cel = f"self.{name} == {json.dumps(default).replace(chr(34), chr(39))}"
    argument = VLLM_INSTEAD.get(field.name)
    remedy = f"; give {argument} in engine.args" if argument else ", which lacks it"
    return Rule(
        f"self.runtime != 'vllm' || {cel}",
        partial(_is_default, field.name, default),
        f"is not for the runtime vllm{remedy}",
        f".{name}",
    )


STEP_BUDGET = Rule(
    "self.maxNumBatchedTokens >= self.maxNumSeqs",
    lambda engine: engine.max_num_batched_tokens >= engine.max_num_seqs,
    "must be at least maxNumSeqs: every request of a step takes a token",
    ".maxNumBatchedTokens",
)
VLLM_IMAGE = Rule(
    "self.runtime != 'vllm' || has(self.image) && self.image != ''",
    lambda engine: engine.runtime != "vllm" or bool(engine.image),
    "is needed where runtime is vllm: name an image of vLLM, such as vllm/vllm-openai:v0.32.0",
    ".image",
)
ARGS_FOR_VLLM = Rule(
    "self.runtime == 'vllm' || size(self.args) == 0",
    lambda engine: engine.runtime == "vllm" or not engine.args,
    "are arguments of vLLM; the runtime diptych has a field for each of its settings",
    ".args",
)
DRAFTS_OF_ONE_RANK = Rule(
    "!has(self.speculativeConfig) || self.speculativeConfig.method != 'draft_model' || "
    "self.tensorParallelSize == 1",
    lambda engine: (
        engine.speculative_config is None
        or engine.speculative_config.method != "draft_model"
        or engine.tensor_parallel_size == 1
    ),
    "must be ngram where tensorParallelSize is above 1: several ranks have no draft model",
    ".speculativeConfig.method",
)
STANDBY_KEEPS_KV = Rule(
    "self.runtime == 'vllm' || !self.standby || has(self.kvKeep) && self.kvKeep != ''",
    lambda engine: engine.runtime == "vllm" or not engine.standby or bool(engine.kv_keep),
    "needs kvKeep, a folder in memory",
    ".standby",
)
NOT_FOR_VLLM = tuple(
    _not_for_vllm(field)
    for field in msgspec.inspect.type_info(Engine).fields  # type: ignore[attr-defined]
    if field.name not in VLLM_HAS
)
ENGINE_RULES = (
    STEP_BUDGET, VLLM_IMAGE, ARGS_FOR_VLLM, DRAFTS_OF_ONE_RANK, STANDBY_KEEPS_KV, *NOT_FOR_VLLM,
)  # fmt: skip


def draft_uri(engine: Engine) -> str:
    """Return the URI of the model that guesses tokens; empty if there is none, or if the spec has
    its path in the engine."""
    guesses = engine.speculative_config
    model = guesses.model if guesses is not None else None
    return model if model is not None and "://" in model else ""


def reasoning_parser(engine: Engine) -> ReasoningParserName:
    """What routers read. vLLM constrains an answer from its first token on unless its own arguments
    name a parser, so with it only a format that somebody chose is read."""
    on_its_own = engine.runtime == "vllm" and engine.reasoning_parser == "auto"
    return "none" if on_its_own else engine.reasoning_parser


class PrefillEngine(SpecPart, frozen=True):
    image: Annotated[
        ImageReference,
        Meta(
            description="Container image of prefill pods; left out, spec.engine.image. It must be "
            "the same build of vLLM."
        ),
    ] = ""
    args: Annotated[
        list[Argument],
        Meta(
            max_length=64,
            title="a list of arguments",
            description="Arguments of `vllm serve` for prefill pods, after spec.engine.args; the "
            "last of a name counts. Those on which KV depends are refused.",
            **ruled(*ARGUMENT_RULES, *EQUAL_IN_BOTH, OFFLOADING),
        ),
    ] = []
    tensor_parallel_size: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_RANKS,
                description="Ranks of each prefill engine; left out, "
                "spec.engine.tensorParallelSize. With the connector nixl that is a multiple of "
                "it.",
            ),
        ]
        | None
    ) = None
