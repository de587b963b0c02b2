"""`spec.engine`: which program the engines run, and what it computes with.

There are two programs. The fields of `EngineSettings` are the settings of our own engine. vLLM is
given its arguments under its own names, in `args`. What only one of the programs has is refused by
name where the other one runs; `VLLM_INSTEAD` and `OWNED_ARGUMENTS` are the tables of that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from diptych_operator.api.base import Rule, SpecPart, ruled, spec_part
from diptych_protocol import EngineSettings
from diptych_protocol.config import Runtime

OWNED_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "the operator says where engines listen": (
        "host", "port", "uds", "ssl-*", "grpc", "grpc-port", "root-path", "headless",
    ),
    "write the model into spec.model": (
        "model", "served-model-name", "tokenizer", "revision", "tokenizer-revision", "hf-token",
        "download-dir",
    ),
    "engines are open to the service's own pods only; keys of clients are spec.router.apiKeys": (
        "api-key",
    ),
    "the operator says how routers and engines speak": (
        "kv-transfer-config", "kv-t*", "kv-events-config", "kv-e*", "enable-scale-out",
        "tokens-only", "skip-tokenizer-init", "disable-log-stats",
    ),
    "set spec.engine.tensorParallelSize": ("tensor-parallel-size",),
    "a pod has one engine; set replicas, or spec.engine.tensorParallelSize": (
        "data-parallel-*", "nnodes", "node-rank", "master-*",
    ),
    "set spec.availability.drainSeconds": ("shutdown-timeout",),
    "write each argument by itself": ("config",),
}  # fmt: skip
"""vLLM's arguments that a service may not give itself, by what is to be done instead. A star stands
for any ending. vLLM takes abbreviations, and adds dotted ones to the JSON of the whole argument."""

_NAME_AND_VALUE: Final = r"^--[a-z][a-z0-9-]*(\.[A-Za-z0-9_.+-]+)?(=.*)?$"


def none_matches(pattern: str, arguments: Sequence[str]) -> bool:
    """Whether no argument begins with what the pattern names."""
    return not any(re.search(pattern, argument) for argument in arguments)


def _owned(remedy: str, names: Sequence[str]) -> Rule:
    pattern = f"^--({'|'.join(names).replace('*', '[a-z-]+')})([=.]|$)"
    listed = ", ".join(f"--{name}" for name in names)
    return Rule(
        f"!self.exists(a, a.matches('{pattern}'))",
        partial(none_matches, pattern),
        f"must not hold {listed}: {remedy}",
    )


ARGUMENT_RULES: Final = tuple(_owned(*group) for group in OWNED_ARGUMENTS.items())

Argument = Annotated[
    str,
    Meta(
        pattern=_NAME_AND_VALUE,
        max_length=1024,
        title="--name or --name=value",
        description="One argument with its value, such as --max-model-len=16384.",
        examples=["--enforce-eager", "--max-model-len=16384"],
    ),
]
Arguments = Annotated[
    list[Argument],
    Meta(
        max_length=64,
        title="a list of arguments",
        description="Arguments of `vllm serve`, under vLLM's names; only with the runtime vllm. "
        "Those that the operator sets itself are refused.",
        **ruled(*ARGUMENT_RULES),
    ),
]

if TYPE_CHECKING:

    class Engine(EngineSettings, SpecPart, frozen=True):
        """`EngineSettings` as a part of the spec, with what only pods have."""

        runtime: Runtime = "diptych"
        image: str = ""
        args: list[str] = []
        kv_cache_memory: str = "1Gi"

else:
    Engine = spec_part(
        "Engine",
        EngineSettings,
        runtime=(
            Annotated[
                Runtime,
                Meta(
                    description="The program that engines run. diptych: our own, in two pools. "
                    "vllm: `vllm serve`, from an image of vLLM, in one pool or two "
                    "(docs/vllm-pods.md); of the fields below it has image, args, "
                    "tensorParallelSize, reasoningParser and otlpTracesEndpoint."
                ),
            ],
            "diptych",
        ),
        image=(
            Annotated[
                str,
                Meta(
                    pattern=r"^\S*$",
                    max_length=512,
                    title="an image reference",
                    description="Container image of the engine pods; left out, the one that the "
                    "operator was installed with. The status says which it is. The runtime vllm "
                    "needs one, such as vllm/vllm-openai:v0.32.0.",
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
    )
    """Defaults are those of the engine, written out so that `kubectl explain` shows them."""

VLLM_HAS: Final = frozenset(
    {
        "runtime", "image", "args",
        "tensor_parallel_size",
        # These are the routers' business, whatever the engines run.
        "reasoning_parser", "otlp_traces_endpoint",
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
}
"""The argument of vLLM that does what the field does for our own engine, where there is one."""


def _is_default(name: str, default: Any, engine: Engine) -> bool:
    return engine.runtime != "vllm" or getattr(engine, name) == default


def _not_for_vllm(field: msgspec.inspect.Field) -> Rule:
    """The field is at its default, as API servers write it out, wherever vLLM runs."""
    name, default = field.encode_name, _default(field)
    if default is None:
        cel = f"!has(self.{name})"
    elif default == "":
        cel = f"!has(self.{name}) || self.{name} == ''"
    elif default == {}:
        cel = f"size(self.{name}) == 0"
    else:
        cel = f"self.{name} == {json.dumps(default).replace(chr(34), chr(39))}"
    argument = VLLM_INSTEAD.get(field.name)
    remedy = f"; give {argument} in engine.args" if argument else ", which has nothing like it"
    return Rule(
        f"self.runtime != 'vllm' || {cel}",
        partial(_is_default, field.name, default),
        f"is not for the runtime vllm{remedy}",
        f".{name}",
    )


def _default(field: msgspec.inspect.Field) -> Any:
    if field.default_factory is msgspec.NODEFAULT:
        return field.default
    return field.default_factory()


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
NOT_FOR_VLLM = tuple(
    _not_for_vllm(field)
    for field in msgspec.inspect.type_info(Engine).fields  # type: ignore[attr-defined]
    if field.name not in VLLM_HAS
)
ENGINE_RULES = (STEP_BUDGET, VLLM_IMAGE, ARGS_FOR_VLLM, *NOT_FOR_VLLM)
