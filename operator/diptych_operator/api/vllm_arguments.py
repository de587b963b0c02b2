"""Checks the arguments of `vllm serve` that a service gives.

vLLM accepts more than whole names: each unambiguous beginning (`--tensor-par=2`), and parts of a
JSON argument (`--kv-transfer-config.kv_role=x`), which it appends to all other arguments. It also
treats underscores as dashes. So the rules treat beginnings and parts of names as the names
themselves, and refuse underscores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

from msgspec import Meta

from diptych_operator.api.base import Rule, ruled

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
        "kv-transfer-config", "kv-events-config", "tokens-only",
        "skip-tokenizer-init", "disable-log-stats",
    ),
    "set spec.engine.tensorParallelSize": ("tensor-parallel-size",),
    "a pod has one engine; set replicas, or spec.engine.tensorParallelSize": (
        "data-parallel-*", "nnodes", "node-rank", "master-*", "api-server-count",
    ),
    "set spec.availability.drainSeconds": ("shutdown-timeout",),
    "write each argument by itself": ("config",),
}  # fmt: skip
"""Arguments of vLLM that a service may not give -> what to do instead. A star: any ending."""

EQUAL_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "how KV lies in memory depends on them": (
        "block-size", "kv-cache-dtype", "kv-cache-dtype-skip-layers", "attention-backend",
        "attention-config", "disable-sliding-window", "disable-hybrid-kv-cache-manager", "mamba-*",
        "kv-sharing-*",
    ),
    "what KV is computed from depends on them": (
        "dtype", "max-model-len", "quantization", "quantization-config", "hf-overrides",
        "hf-config-path", "config-format", "model-impl", "model-class-overrides", "code-revision",
        "load-format", "model-loader-extra-config", "ignore-patterns", "mm-processor-kwargs",
    ),
    "KV of a speculative model or of adapters depends on them": (
        "speculative-config", "spec-*", "enable-lora", "lora-*",
    ),
    "which rank has what of KV depends on them": (
        "pipeline-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size",
        "dcp-*", "pcp-*", "cp-*",
    ),
}  # fmt: skip
"""Arguments of vLLM that must be the same in both pools, by what of KV depends on them. A star
stands for any ending. API servers refuse a rule whose pattern is too long, so there are several."""

_FORM: Final = r"^--[a-z][a-z0-9-]*((\.[A-Za-z0-9_.+-]+)?=.*)?$"
"""A part of a JSON argument has its value in the same text: vLLM would take the next one for it."""


def _beginnings(name: str, others: Sequence[str] = ()) -> str:
    """A regular expression for a name and each of its beginnings: `a(b(c)?)?` for `abc`.

    others: names that have a rule of their own, which sees their beginnings: `ab(c)?` beside `a`.
    """
    letters = name.removesuffix("*")
    found = "[a-z0-9-]*" if name.endswith("*") else ""
    known = max((len(other) for other in others if letters.startswith(other)), default=0)
    for letter in reversed(letters[known + 1 :]):
        found = f"({letter}{found})?"
    return letters[: known + 1] + found


def _begins(name: str, other: str) -> bool:
    """It is a beginning of another name, whose pattern sees it."""
    return name != other and other.startswith(name)


def _none_is_one(pattern: str, arguments: Sequence[str]) -> bool:
    return not any(re.search(pattern, argument) for argument in arguments)


def _none_of(
    names: Sequence[str], remedy: str, *, others: Sequence[str] = (), negated: str = ""
) -> Rule:
    """No argument has one of these names, nor a part or a beginning of one.

    others: as in `_beginnings`. negated: what may stand before a name, as a regular expression.
    """
    longest = (name for name in names if not any(_begins(name, other) for other in names))
    pattern = f"^--{negated}({'|'.join(_beginnings(name, others) for name in longest)})([=.]|$)"
    listed = ", ".join(f"--{name}" for name in names)
    return Rule(
        f"!self.exists(a, a.matches('{pattern}'))",
        partial(_none_is_one, pattern),
        f"must not hold {listed}, whole or abbreviated: {remedy}",
    )


ARGUMENT_RULES: Final = tuple(_none_of(names, say) for say, names in OWNED_ARGUMENTS.items())
EQUAL_IN_BOTH: Final = tuple(
    _none_of(
        names,
        f"{why}, so both pools have the same; give them in spec.engine.args",
        others=[name for group in OWNED_ARGUMENTS.values() for name in group],
        negated="(no-)?",
    )
    for why, names in EQUAL_ARGUMENTS.items()
)
OFFLOADING: Final = _none_of(
    ("kv-offloading-*",), "vLLM then takes its own connector in place of the one that hands KV over"
)
"""For services of two pools."""

Argument = Annotated[
    str,
    Meta(
        pattern=_FORM,
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
