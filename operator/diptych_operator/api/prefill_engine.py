"""`spec.prefill.engine`: in what prefill pods may differ from decode pods, where both run vLLM.

What decides how KV lies in memory must be equal, so it cannot be given here. What is given comes
after `spec.engine.args`, and vLLM takes the last of an argument that is there twice.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from msgspec import Meta

from diptych_operator.api.base import Rule, SpecPart, ruled
from diptych_operator.api.engine import ARGUMENT_RULES, Argument, none_matches
from diptych_protocol.engine_settings import MAX_RANKS

EQUAL_ARGUMENTS: Final = (
    "block-size", "kv-cache-dtype", "kv-cache-dtype-skip-layers", "dtype", "max-model-len",
    "quantization", "quantization-config", "hf-overrides", "hf-config-path", "config-format",
    "model-impl", "model-class-overrides", "code-revision", "attention-backend",
    "attention-config", "disable-sliding-window", "disable-hybrid-kv-cache-manager", "mamba-*",
    "speculative-config", "spec-*", "enable-lora", "lora-*", "load-format",
    "model-loader-extra-config", "ignore-patterns", "pipeline-parallel-size",
    "decode-context-parallel-size", "prefill-context-parallel-size", "dcp-*", "pcp-*", "cp-*",
    "kv-sharing-*", "mm-processor-kwargs",
)  # fmt: skip
"""Arguments of vLLM on which KV depends: what it is computed from, and how it lies in memory. A
star stands for any ending."""
_EQUAL_PATTERN: Final = f"^--(no-)?({'|'.join(EQUAL_ARGUMENTS).replace('*', '[a-z-]+')})([=.]|$)"
EQUAL_IN_BOTH: Final = Rule(
    f"!self.exists(a, a.matches('{_EQUAL_PATTERN}'))",
    partial(none_matches, _EQUAL_PATTERN),
    f"must not hold {', '.join(f'--{name}' for name in EQUAL_ARGUMENTS)}: KV depends on them, so "
    "both pools have the same; give them in spec.engine.args",
)


class PrefillEngine(SpecPart, frozen=True):
    image: Annotated[
        str,
        Meta(
            pattern=r"^\S*$",
            max_length=512,
            title="an image reference",
            description="Container image of prefill pods, such as one for other processors; left "
            "out, spec.engine.image. It must be the same build of vLLM: only the engines' own "
            "handshake can tell.",
        ),
    ] = ""
    args: Annotated[
        list[Argument],
        Meta(
            max_length=64,
            title="a list of arguments",
            description="Arguments of `vllm serve` for prefill pods; they come after "
            "spec.engine.args, and the last of the same name counts. Those on which KV depends "
            "are refused.",
            **ruled(*ARGUMENT_RULES, EQUAL_IN_BOTH),
        ),
    ] = []
    tensor_parallel_size: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_RANKS,
                description="Ranks of each prefill engine; left out, as many as decode engines "
                "have (spec.engine.tensorParallelSize). With the connector nixl those are a "
                "multiple of it; with diptych one of the two numbers divides the other.",
            ),
        ]
        | None
    ) = None
