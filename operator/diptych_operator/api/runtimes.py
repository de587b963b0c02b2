"""What the choice of `spec.engine.runtime` asks of the other parts of a spec, as rules.

What it asks of `spec.engine` itself stands beside that, in `engine.py`.
"""

from __future__ import annotations

from typing import Any, Final

from diptych_operator.api.base import Rule

GPUS: Final = ("nvidia.com/gpu", "amd.com/gpu")
"""The resources of which each rank of an engine takes one, where a pod has any."""

PREFILL_NEEDED = Rule(
    "self.engine.runtime != 'diptych' || has(self.prefill)",
    lambda spec: spec.engine.runtime != "diptych" or spec.prefill is not None,
    "is missing; it must be an object such as {replicas: 1}: the runtime diptych has two pools",
    ".prefill",
)
ONE_POOL_OF_VLLM = Rule(
    "self.engine.runtime != 'vllm' || !has(self.prefill)",
    lambda spec: spec.engine.runtime != "vllm" or spec.prefill is None,
    "must be left out where engine.runtime is vllm: its engines hand no KV over, so each computes "
    "prompts and answers; give spec.decode the replicas",
    ".prefill",
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
NO_HINGE_TO_SET = Rule(
    "self.engine.runtime != 'vllm' || self.transfer.transport == 'auto'",
    lambda spec: spec.engine.runtime != "vllm" or spec.transfer.transport == "auto",
    "must be left out where engine.runtime is vllm: its engines hand no KV over",
    ".transfer.transport",
)
ONE_API_OF_VLLM = Rule(
    "self.engine.runtime != 'vllm' || self.network.engineApi == 'None'",
    lambda spec: spec.engine.runtime != "vllm" or spec.network.engine_api == "None",
    "must be left out where engine.runtime is vllm: vLLM's API is at port 8000 of each engine pod, "
    "and a managed policy opens it to the service's own pods only",
    ".network.engineApi",
)


def _has_gpus_for_ranks(spec: Any) -> bool:
    if spec.engine.runtime != "vllm":
        return True
    limits = spec.decode.resources.limits
    given = [str(limits[name]) for name in GPUS if name in limits]
    return all(
        number.isdigit() and int(number) >= spec.engine.tensor_parallel_size for number in given
    )


_LIMITS: Final = "self.decode.resources.limits"
GPU_FOR_EACH_RANK = Rule(
    "self.engine.runtime != 'vllm' || "
    + " && ".join(
        f"(!('{name}' in {_LIMITS}) || int({_LIMITS}['{name}']) >= self.engine.tensorParallelSize)"
        for name in GPUS
    ),
    _has_gpus_for_ranks,
    "must hold at least spec.engine.tensorParallelSize GPUs where engine.runtime is vllm: each of "
    "an engine's ranks takes one",
    ".decode.resources.limits",
)
RUNTIME_RULES = (
    PREFILL_NEEDED,
    ONE_POOL_OF_VLLM,
    MODEL_OF_VLLM,
    NO_HINGE_TO_SET,
    ONE_API_OF_VLLM,
    GPU_FOR_EACH_RANK,
)
