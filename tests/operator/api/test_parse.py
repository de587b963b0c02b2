"""Wrong YAML is answered with one line that names the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_operator.api.base import SpecError
from diptych_operator.api.crd import schema_of
from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse, parse_object
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import Condition, PoolStatus, Status
from diptych_operator.revision import revision

GOOD = """\
apiVersion: diptych.dev/v1alpha1
kind: InferenceService
metadata: {name: smollm2}
spec:
  model: {uri: "dummy://"}
  prefill: {replicas: 1}
  decode: {replicas: 2}
"""


def test_the_example_is_the_smallest_service_and_takes_every_default() -> None:
    example = Path(__file__).parents[3] / "examples" / "smollm2.yaml"
    service = parse(example.read_text())
    assert service.served_name == "smollm2"
    assert service.metadata.namespace == "default"
    assert service.spec.engine.block_size == 16
    assert service.spec.router.replicas == 1


def live(status: Any) -> dict[str, Any]:
    """An object as an API server sends it."""
    return {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {
            "name": "smollm2",
            "namespace": "team",
            "uid": "0e7a1d38-2013-419a-b920-b07aa07bd684",
            "generation": 3,
            "resourceVersion": "312",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "2026-01-02T00:00:00Z",
            "deletionGracePeriodSeconds": 0,
            "finalizers": ["example.org/keep"],
            "annotations": {"diptych.dev/rotate-secrets": "1"},
            "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {".": {}}}}],
        },
        "spec": {
            "model": {"uri": "dummy://", "cache": {}, "revision": ""},
            "transfer": {"leaseSeconds": 45},
            "prefill": {"podTemplate": {"spec": {"nodeSelector": None}}},
            "decode": {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}},
        },
        "status": status,
    }


def test_an_object_of_an_api_server_is_read_with_its_metadata_and_status() -> None:
    ready = {
        "type": "Available",
        "status": "True",
        "reason": "Ready",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"observedGeneration": 3, "prefill": {"summary": "1/1"}, "conditions": [ready]}
    service = parse_object(live(status | {"ofANewerOperator": {"a": 1}}), Images())
    assert service.metadata.uid == "0e7a1d38-2013-419a-b920-b07aa07bd684"
    assert (service.metadata.generation, service.metadata.namespace) == (3, "team")
    assert service.spec.transfer.lease_seconds == 45.0
    assert service.status == Status(
        observed_generation=3,
        prefill=PoolStatus(summary="1/1"),
        conditions=[Condition("Available", "True", "Ready", "", "2026-01-01T00:00:00Z")],
    )


def test_fields_of_a_newer_crd_change_nothing_for_an_older_operator() -> None:
    """While an operator is replaced, its successor's CRD is there already, with its defaults."""
    known, newer = live({}), live({})
    newer["ofANewerCrd"] = {"a": 1}
    newer["spec"] |= {"tracing": {"enabled": True}, "engine": {"kvDtype": "fp8", "blockSize": 16}}
    newer["spec"]["model"]["cache"] = {"shared": {"claims": [{"name": "a"}]}}
    newer["spec"]["decode"]["autoscaling"]["tokensPerReplica"] = None
    assert parse_object(newer, Images()) == parse_object(known, Images())
    assert revision(parse_object(newer, Images())) == revision(parse_object(known, Images()))


def test_what_is_free_in_form_is_kept_whole_for_an_api_server_s_object() -> None:
    raw = live({})
    template = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}]},
        "ofANewerKubernetes": {"a": [1, None]},
    }
    raw["spec"]["prefill"] = {"podTemplate": template, "resources": {"limits": {"a.b/gpu": 1}}}
    prefill = parse_object(raw, Images()).pools["prefill"]
    assert prefill.pod_template == template
    assert prefill.resources.limits == {"a.b/gpu": 1}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("decode", {"replicas": 0, "newer": 1},
         "spec.decode.replicas: must be an integer from 1 to 1000, not 0"),
        ("engine", {"blockSize": 3, "newer": 1},
         "spec.engine.blockSize: must be 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 or 1024, not 3"),
        ("router", [], "spec.router: must be an object, not a list"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_known_field_is_refused_wherever_it_comes_from(
    part: str, value: Any, message: str
) -> None:
    raw = live({})
    raw["spec"][part] = value
    with pytest.raises(SpecError) as caught:
        parse_object(raw, Images())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "status",
    [None, {}, "gone", {"prefill": "1/1"}, {"conditions": [{"type": "Available"}]}],
    ids=str,
)
def test_a_status_that_cannot_be_read_counts_as_empty(status: Any) -> None:
    assert parse_object(live(status), Images()).status == Status()


@given(raw=st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
        st.sampled_from(["conditions", "prefill", "type", "bytes", "ready"]), inner
    ),
    max_leaves=5,
))  # fmt: skip
def test_no_status_whatever_keeps_a_service_from_being_read(raw: object) -> None:
    assert parse_object(live(raw), Images()).metadata.name == "smollm2"


@each(
    ("old", "new", "message"),
    [
        ("replicas: 1", "replicas: two",
         "spec.prefill.replicas: must be an integer from 1 to 1000, not 'two'"),
        ("replicas: 1", "replicas: 0",
         "spec.prefill.replicas: must be an integer from 1 to 1000, not 0"),
        ("replicas: 1", "replicas: true",
         "spec.prefill.replicas: must be an integer from 1 to 1000, not true"),
        ("replicas: 1", "replicas: []",
         "spec.prefill.replicas: must be an integer from 1 to 1000, not a list"),
        ("replicas: 1", "replica: 1",
         "spec.prefill.replica: unknown field; did you mean replicas?"),
        ("replicas: 1", "replicas: 1, zzz: 1",
         "spec.prefill.zzz: unknown field; known here: autoscaling, engine, podTemplate, "
         "podTemplateRemove, replicas, resources"),
        ("replicas: 1", "blockSize: 32",
         "spec.prefill.blockSize: unknown field; it stands in spec.engine, where it holds for both "
         "pools"),
        ("replicas: 2", "autoscaling: {maxReplica: 4}",
         "spec.decode.autoscaling.maxReplica: unknown field; did you mean maxReplicas?"),
        ("replicas: 2", "autoscaling: {minReplicas: 4}",
         "spec.decode.autoscaling.maxReplicas: is missing; it must be an integer from 1 to 1000"),
        ("replicas: 2", "autoscaling: 4", "spec.decode.autoscaling: must be an object, not 4"),
        ("replicas: 2", "replicas: 2, autoscaling: {maxReplicas: 4}",
         "spec.decode: give replicas or autoscaling, not both"),
        ("replicas: 1", "replicas: 1, replicas: 2",
         "line 6: 'replicas' stands here twice; keep one"),
        ("replicas: 1", "replicas: 1, resources: {limits: {memory: 1Gi, cpu: 0.5}}",
         "spec.prefill.resources.limits.cpu: must be a quantity such as 500m or 4Gi, not 0.5"),
        ("replicas: 1", "replicas: 1, resources: {limits: {cpu: -1}}",
         "spec.prefill.resources.limits.cpu: must be a quantity such as 500m or 4Gi, not -1"),
        ("replicas: 1", "replicas: 1, resources: {limits: {cpu: '%s'}}" % ("1" * 33),
         "spec.prefill.resources.limits.cpu: must be a quantity such as 500m or 4Gi, not "
         f"'{'1' * 33}'"),
        ("replicas: 1", f"resources: {{limits: {{{', '.join(f'r{i}: 1' for i in range(33))}}}}}",
         "spec.prefill.resources.limits: must be an object of at most 32 fields, not one of 33"),
        ("replicas: 1", "replicas: 1, podTemplate: []",
         "spec.prefill.podTemplate: must be an object, not a list"),
        ("replicas: 1", "replicas: 1, podTemplate: {metadata: {labels: {1: a}}}",
         'line 6: key 1 must be text; write "1"'),
        ("  decode: {replicas: 2}\n", "",
         "spec.decode: is missing; it must be an object such as {replicas: 1}"),
        ('{uri: "dummy://"}', "{}",
         "spec.model.uri: is missing; it must be a URI (at most 1024 characters) such as "
         "hf://ORG/REPO or pvc://CLAIM/PATH or package://PKG/FILE"),
        ("dummy://", "gs://bucket/model",
         "spec.model.uri: must be a URI (at most 1024 characters) such as hf://ORG/REPO or "
         "pvc://CLAIM/PATH or package://PKG/FILE, not 'gs://bucket/model'"),
        ("dummy://", "hf://llama",
         "spec.model.uri: must be hf://ORG/REPO or hf://ORG/REPO/FILE.gguf"),
        ('{uri: "dummy://"}', '{uri: "dummy://", sha256: abc}',
         "spec.model.sha256: must be 64 hexadecimal digits, not 'abc'"),
        ('{uri: "dummy://"}', '{uri: "dummy://", cache: {hostPath: models}}',
         "spec.model.cache.hostPath: must be an absolute path (at most 1024 characters), not "
         "'models'"),
        ('{uri: "dummy://"}', '{uri: "dummy://", cache: {pvc: {claimName: A b}}}',
         "spec.model.cache.pvc.claimName: must be the name of a PersistentVolumeClaim (at most 253 "
         "characters), not 'A b'"),
        ("{name: smollm2}", "{name: SmolLM2}",
         "metadata.name: must be lower-case letters, digits and dashes (at most 40 characters) "
         "such as smollm2, not 'SmolLM2'"),
        ("v1alpha1", "v1", "apiVersion: must be diptych.dev/v1alpha1, not 'diptych.dev/v1'"),
        ("kind: InferenceService\n", "", "kind: must be InferenceService, not nothing"),
        ("spec:", "engine: {}\nspec:",
         "engine: unknown field; known here: apiVersion, kind, metadata, spec, status"),
        ("spec:", "spec:\n  engine: {blockSize: 3}",
         "spec.engine.blockSize: must be 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 or 1024, not 3"),
        ("spec:", "spec:\n  engine: {maxNumSeqs: 64, maxNumBatchedTokens: 8}",
         "spec.engine.maxNumBatchedTokens: must be at least maxNumSeqs: every request of a step "
         "takes a token"),
        ("spec:", "spec:\n  engine: {image: a b}",
         "spec.engine.image: must be an image reference (at most 512 characters), not 'a b'"),
        ("spec:", "spec:\n  rollout: {type: Rolling}",
         "spec.rollout.type: must be BlueGreen, Canary, PairedRolling or Recreate, not 'Rolling'"),
        ("spec:", "spec:\n  suspend: 1", "spec.suspend: must be true or false, not 1"),
        ("spec:", "spec:\n  network: {policy: }",
         "spec.network.policy: must be Managed or None, not null"),
        ("spec:", "spec:\n  engine: {kvCacheMemory: 3GB}",
         "spec.engine.kvCacheMemory: must be text such as 24Gi or auto, not '3GB'"),
        ("spec:", "spec:\n  transfer: {leaseSeconds: .nan}",
         "spec.transfer.leaseSeconds: must be a number from 1 to 3600, not nan"),
        ("spec:", "spec:\n  transfer: {transport: ucx}",
         "spec.transfer.transport: must be auto, rdma, shm or tcp, not 'ucx'"),
        ("spec:", "spec:\n  router: {allowedHosts: llm.example.com}",
         'spec.router.allowedHosts: must be a list such as ["llm.example.com"], not '
         "'llm.example.com'"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_remedy(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(SpecError) as caught:
        parse(GOOD.replace(old, new, 1))
    assert str(caught.value) == message


@each(
    ("text", "start"),
    [
        ("a: [", "line 1: not YAML: "),
        ("- 1", "file: must hold one InferenceService object, not a list"),
        ("", "file: must hold one InferenceService object, not null"),
        (GOOD + "---\n" + GOOD, "file: must hold one InferenceService, not 2; it has Inference"),
        ("kind: A\n---\nkind: B", "file: must hold one InferenceService, not 0; it has A, B"),
        (GOOD + "---\n[", "line 9: not YAML: "),
        ("a: !!python/name:os.system", "line 1: not YAML: could not determine a constructor"),
        ("a: \x00", "file: not YAML: unacceptable character"),
        ("a: " + "[" * 5000, "file: not YAML: "),
        ("a: " + "b" * (2 << 20), "file: is larger than"),
        ("a: &a {b: *a}", "file: its aliases repeat too much"),
        (GOOD + f"x: [&x {'x' * 9999}, {'*x, ' * 999}]", "file: its aliases repeat too much"),
        ("".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 40)).replace("*b0", "1"),
         "file: its aliases repeat too much"),
    ],
)  # fmt: skip
def test_what_is_no_service_at_all_is_refused(text: str, start: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert str(caught.value).startswith(start)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["replicas", "uri", "cpu", "limits", "x"]), inner)
    ),
    max_leaves=4,
)


@given(
    field=st.sampled_from(["model", "engine", "transfer", "prefill", "decode", "router", "x"]),
    value=json_values,
)
def test_any_value_in_any_place_gives_a_service_or_one_line(field: str, value: object) -> None:
    spec = {"model": {"uri": "dummy://"}, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    raw = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "a"},
        "spec": spec | {field: value},
    }
    message = complaint(yaml.safe_dump(raw))
    assert message is None or message.startswith((f"spec.{field}", "line "))
    assert message is None or "\n" not in message


def places(schema: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """The paths of all fields that a schema names."""
    for name, inner in schema.get("properties", {}).items():
        yield (*above, name)
        yield from places(inner, *above, name)


def test_each_field_says_what_it_may_hold_instead_of_what_it_may_not() -> None:
    for path in places(schema_of(InferenceService)["properties"]["spec"], "spec"):
        for wrong in ("?", [1.5], -1.5):
            raw = yaml.safe_load(GOOD)
            inner = raw
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = wrong
            message = complaint(yaml.safe_dump(raw))
            assert message is None or "\n" not in message, path


def complaint(text: str) -> str | None:
    try:
        parse(text)
    except SpecError as exc:
        return str(exc)
    return None
