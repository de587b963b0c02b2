"""Rules about other parts of a spec that follow from `spec.engine.runtime`.

Rules about `spec.engine` itself are in `engine.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from diptych_operator.api.base import Rule
from diptych_operator.api.pools import PoolName
from diptych_operator.api.vllm_arguments import OFFLOADING
from diptych_protocol.config import LEAST_LEASE_OF_NIXL_S, RANKS_OF_CONNECTOR

GPUS: Final = ("nvidia.com/gpu", "amd.com/gpu")
"""The GPU resources; each rank of an engine takes one of the kind that its pod has."""

PREFILL_NEEDED = Rule(
    "self.engine.runtime != 'diptych' || has(self.prefill)",
    lambda spec: spec.engine.runtime != "diptych" or spec.prefill is not None,
    "is missing; it must be an object such as {replicas: 1}: the runtime diptych has two pools",
    ".prefill",
)
CONNECTOR_OF_DIPTYCH = Rule(
    "self.engine.runtime != 'diptych' || self.transfer.connector == 'diptych'",
    lambda spec: spec.engine.runtime != "diptych" or spec.transfer.connector == "diptych",
    "must be left out where engine.runtime is diptych: its engines hand KV over by the hinge",
    ".transfer.connector",
)
CONNECTOR_OF_TWO_POOLS = Rule(
    "self.engine.runtime != 'vllm' || !has(self.prefill) || self.transfer.connector != 'none'",
    lambda spec: (
        spec.engine.runtime != "vllm" or spec.prefill is None or spec.transfer.connector != "none"
    ),
    "must be diptych or nixl where there is spec.prefill, whose engines hand KV over; leave "
    "spec.prefill out for one pool whose engines compute prompts and answers",
    ".transfer.connector",
)
CONNECTOR_STAYS = Rule(
    f"!has(self.prefill) || {OFFLOADING.cel.replace('self', 'self.engine.args')}",
    lambda spec: spec.prefill is None or OFFLOADING.kept(spec.engine.args),
    f"{OFFLOADING.message}, which there is where there is spec.prefill",
    ".engine.args",
)
CONNECTOR_IMAGE = Rule(
    "!has(self.transfer.connectorImage) || self.transfer.connectorImage == '' || "
    "self.engine.runtime == 'vllm'",
    lambda spec: not spec.transfer.connector_image or spec.engine.runtime == "vllm",
    "is for engine.runtime vllm only: it brings what vLLM lacks into its pods",
    ".transfer.connectorImage",
)


def _vllm_can_read(uri: str) -> bool:
    return not (uri.startswith(("package://", "dummy://")) or uri.endswith(".gguf"))


MODEL_OF_VLLM = Rule(
    "self.engine.runtime != 'vllm' || !(self.model.uri.startsWith('package://') || "
    "self.model.uri.startsWith('dummy://') || self.model.uri.endsWith('.gguf'))",
    lambda spec: spec.engine.runtime != "vllm" or _vllm_can_read(spec.model.uri),
    "must be a folder in Hugging Face's layout where engine.runtime is vllm: hf://ORG/REPO, "
    "s3://BUCKET/FOLDER, pvc://CLAIM/PATH, oci://IMAGE@sha256:DIGEST or file:///PATH",
    ".model.uri",
)
TRANSPORT_OF_VLLM = Rule(
    "self.engine.runtime != 'vllm' || self.transfer.transport == 'auto'",
    lambda spec: spec.engine.runtime != "vllm" or spec.transfer.transport == "auto",
    "must be left out where engine.runtime is vllm: set UCX_TLS and UCX_NET_DEVICES through "
    "podTemplate",
    ".transfer.transport",
)
LEASE_OF_NIXL = Rule(
    "self.transfer.connector != 'nixl' || "
    f"double(self.transfer.leaseSeconds) >= {LEAST_LEASE_OF_NIXL_S}",
    lambda spec: (
        spec.transfer.connector != "nixl" or spec.transfer.lease_seconds >= LEAST_LEASE_OF_NIXL_S
    ),
    f"must be at least {LEAST_LEASE_OF_NIXL_S:g} where transfer.connector is nixl: vLLM "
    "renews a lease each sixth of it, in whole seconds",
    ".transfer.leaseSeconds",
)
ONE_API_OF_VLLM = Rule(
    "self.engine.runtime != 'vllm' || self.network.engineApi == 'None'",
    lambda spec: spec.engine.runtime != "vllm" or spec.network.engine_api == "None",
    "must be left out where engine.runtime is vllm: vLLM's API is at port 8001 of each engine pod, "
    "and a managed policy opens it to the service's own pods only",
    ".network.engineApi",
)


PREFILL_ENGINE_OF_VLLM = Rule(
    "self.engine.runtime == 'vllm' || !has(self.prefill) || !has(self.prefill.engine)",
    lambda spec: (
        spec.engine.runtime == "vllm" or spec.prefill is None or spec.prefill.engine is None
    ),
    "must be left out where engine.runtime is diptych: the engines of both pools are equal",
    ".prefill.engine",
)


def _prefill_ranks(spec: Any) -> int | None:
    """Where the prefill pool says it itself."""
    own = spec.prefill.engine if spec.prefill is not None else None
    return None if own is None else own.tensor_parallel_size


def _ranks(spec: Any, pool: str) -> int:
    own = _prefill_ranks(spec) if pool == "prefill" else None
    return int(own or spec.engine.tensor_parallel_size)


_RANKS_OF_DECODE: Final = "self.engine.tensorParallelSize"
_RANKS_OF_PREFILL: Final = "self.prefill.engine.tensorParallelSize"
_PREFILL_SAYS_RANKS: Final = (
    f"has(self.prefill) && has(self.prefill.engine) && has({_RANKS_OF_PREFILL})"
)
RANKS_BY_NIXL = Rule(
    f"self.transfer.connector != 'nixl' || !({_PREFILL_SAYS_RANKS}) || "
    f"{_RANKS_OF_DECODE} % {_RANKS_OF_PREFILL} == 0",
    lambda spec: (
        spec.transfer.connector != "nixl"
        or spec.engine.tensor_parallel_size % _ranks(spec, "prefill") == 0
    ),
    "must divide spec.engine.tensorParallelSize, which decode engines have: each of their ranks "
    "reads from one rank of a prefill engine",
    ".prefill.engine.tensorParallelSize",
)
RANKS_BY_DIPTYCH = Rule(
    f"self.transfer.connector != 'diptych' || !({_PREFILL_SAYS_RANKS}) || "
    f"{_RANKS_OF_PREFILL} in {list(RANKS_OF_CONNECTOR)}",
    lambda spec: (
        spec.transfer.connector != "diptych" or (_prefill_ranks(spec) or 1) in RANKS_OF_CONNECTOR
    ),
    f"must be {' or '.join(map(str, RANKS_OF_CONNECTOR))} where transfer.connector is diptych, "
    "which takes no other number of ranks",
    ".prefill.engine.tensorParallelSize",
)
RANKS_OF_DIPTYCH = Rule(
    "self.engine.runtime != 'vllm' || !has(self.prefill) || "
    f"self.transfer.connector != 'diptych' || {_RANKS_OF_DECODE} in {list(RANKS_OF_CONNECTOR)}",
    lambda spec: (
        spec.engine.runtime != "vllm"
        or spec.prefill is None
        or spec.transfer.connector != "diptych"
        or spec.engine.tensor_parallel_size in RANKS_OF_CONNECTOR
    ),
    f"must be {' or '.join(map(str, RANKS_OF_CONNECTOR))} where engine.runtime is vllm and "
    "transfer.connector is diptych, which takes no other number of ranks; transfer.connector nixl "
    "takes more",
    ".engine.tensorParallelSize",
)


def _has_gpus_for_ranks(pool: PoolName, spec: Any) -> bool:
    part = getattr(spec, pool)
    if spec.engine.runtime != "vllm" or part is None:
        return True
    limits = part.resources.limits
    given = [str(limits[name]) for name in GPUS if name in limits]
    return all(number.isdigit() and int(number) >= _ranks(spec, pool) for number in given)


def _gpu_for_each_rank(pool: PoolName, ranks: str) -> Rule:
    limits = f"self.{pool}.resources.limits"
    return Rule(
        f"self.engine.runtime != 'vllm' || !has(self.{pool}) || "
        + " && ".join(
            f"(!('{name}' in {limits}) || int({limits}['{name}']) >= {ranks})" for name in GPUS
        ),
        partial(_has_gpus_for_ranks, pool),
        "must hold at least as many GPUs as an engine has ranks (tensorParallelSize) where "
        "engine.runtime is vllm: each rank takes one",
        f".{pool}.resources.limits",
    )


GPUS_OF_PREFILL = _gpu_for_each_rank(
    "prefill", f"({_PREFILL_SAYS_RANKS} ? {_RANKS_OF_PREFILL} : {_RANKS_OF_DECODE})"
)
GPUS_OF_DECODE = _gpu_for_each_rank("decode", _RANKS_OF_DECODE)
RUNTIME_RULES = (
    PREFILL_NEEDED,
    CONNECTOR_OF_DIPTYCH,
    CONNECTOR_OF_TWO_POOLS,
    CONNECTOR_STAYS,
    CONNECTOR_IMAGE,
    PREFILL_ENGINE_OF_VLLM,
    RANKS_BY_NIXL,
    RANKS_BY_DIPTYCH,
    RANKS_OF_DIPTYCH,
    MODEL_OF_VLLM,
    TRANSPORT_OF_VLLM,
    LEASE_OF_NIXL,
    ONE_API_OF_VLLM,
    GPUS_OF_PREFILL,
    GPUS_OF_DECODE,
)
