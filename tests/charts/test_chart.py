"""What the chart renders: complete, restricted, and nothing that was not asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from celpy.adapter import json_to_cel
from cluster_kit.charts import (
    CHART,
    NAMESPACE,
    RELEASE,
    ROOT,
    Helm,
    Object,
    load_script,
    of_kind,
    only,
    read_yaml,
)
from cluster_kit.crds import program
from waits import PATIENCE_S

from diptych_operator.api.crd import VERSION_ANNOTATION
from diptych_operator.api.images import REGISTRY, PodDefaults, published
from diptych_operator.api.limits import Allowed, validations
from diptych_operator.api.names import (
    ADMIN_PORT,
    HTTP_PORT,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    OPERATOR_LABELS,
    object_name,
)
from diptych_operator.api.parse import parse
from diptych_operator.api.service import KIND

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
GOLDEN = Path(__file__).parent / "golden" / "default.yaml"
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
MONITORING = {
    name: {"enabled": True}
    for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
}
WINDOWS = ["Sat,Sun 01:00-05:00 Europe/Berlin", "Mon-Fri 22:00-24:00 UTC"]
POD_DEFAULTS = {
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "models",
    "priorityClassName": "serving",
    "engineResources": {"limits": {"cpu": 4}, "requests": {"memory": "8Gi"}},
    "routerResources": {"limits": {"cpu": "500m"}},
}
MATRIX: dict[str, dict[str, Any]] = {
    "default": {},
    "namespaced": {"scope": "namespaced", "namespaces": ["team-a", "team-b"]},
    "one replica": {"replicas": 1},
    "own account and roles": {
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False},
    },
    "monitoring": {"monitoring": MONITORING},
    "monitoring of some namespaces": {
        "scope": "namespaced", "namespaces": ["team-a"], "monitoring": MONITORING,
    },
    "everything set": {
        "images": {
            "registry": "example.org/mine",
            "operator": {"repository": "operator", "digest": "sha256:" + "a" * 64},
            "engine": {"repository": "diptych-engine-cuda"},
            "router": {"tag": "next"},
        },
        "imagePullSecrets": [{"name": "registry"}],
        "logLevel": "debug", "operator": {"maxConcurrentRollouts": 0, "rolloutWindows": WINDOWS},
        "podLabels": {"team": "ml"}, "podAnnotations": {"note": "yes"},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-cluster-critical",
        "resources": {"requests": {"cpu": 1}, "limits": {"memory": "1Gi"}},
        "serviceAccount": {"annotations": {"note": "yes"}},
        "monitoring": MONITORING,
        "commonLabels": {"cost": "ml", "app.kubernetes.io/name": "mine"},
        "deploymentAnnotations": {"note": "yes"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [
                {"key": "pool", "operator": "Exists"}]}}]}},
        "topologySpreadConstraints": [
            {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
        ],
        "podDnsPolicy": "None", "podDnsConfig": {"nameservers": ["10.0.0.10"]},
        "strategy": {"type": "Recreate"},
        "extraArgs": ["--log-level=warning"],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
        "securityContext": {"runAsUser": 10001, "fsGroupChangePolicy": "OnRootMismatch"},
        "networkPolicy": {"enabled": True, "extraEgressRules": [{"ports": [{"port": 3128}]}]},
        "podDefaults": POD_DEFAULTS,
        "prePull": {
            "enabled": True, "images": ["engine", "router", "vllmConnector"],
            "nodeSelector": {"pool": "models"}, "tolerations": [{"operator": "Exists"}],
        },
        "testService": {"model": {"uri": "package://m/m.gguf"}, "prefill": {}, "decode": {}},
    },
    "long names": {"fullnameOverride": "x" * 63},
}  # fmt: skip


@pytest.fixture(params=MATRIX)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MATRIX[request.param]


def as_helm_writes(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def pods(objects: list[Object]) -> list[Object]:
    """The specification of every pod: of Deployments and bare ones."""
    kinds = ("Deployment", "DaemonSet")
    templates = [d["spec"]["template"] for kind in kinds for d in of_kind(objects, kind)]
    return [pod["spec"] for pod in templates + of_kind(objects, "Pod")]


def test_lint_finds_nothing(helm: Helm, values: dict[str, Any]) -> None:
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


def test_the_default_renders_as_its_golden_file(helm: Helm) -> None:
    """`UPDATE_GOLDEN=1 pytest tests/charts` writes the file anew."""
    text = helm.template({"crds": {"install": False}}, "--skip-tests")
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    # Releases of Helm differ in the order.
    golden, rendered = (
        sorted(read_yaml(part), key=lambda o: (o["kind"], o["metadata"]["name"]))
        for part in (GOLDEN.read_text(), text)
    )
    assert golden == rendered


def test_what_is_generated_is_up_to_date() -> None:
    """The chart's CRDs are those in crds/, byte for byte; the README lists today's values."""
    written = load_script(ROOT / "charts" / "generate.py").generated()
    assert set((CHART / "files" / "crds").iterdir()) <= written.keys()
    for path, content in written.items():
        assert path.read_bytes() == content, f"{path} is stale: run python charts/generate.py"


def test_chart_crds_and_images_have_the_projects_version() -> None:
    """The installed project's, too, by which the operator names the images."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION
    for crd in (ROOT / "crds").glob("*.yaml"):
        annotations = next(read_yaml(crd.read_text()))["metadata"]["annotations"]
        assert annotations == {VERSION_ANNOTATION: VERSION}
    assert published("engine").endswith(f"/diptych-engine:{VERSION}")


def test_what_a_release_stamps_is_up_to_date() -> None:
    """Version and registry are each written by hand in one place: `python3 charts/stamp.py`."""
    stamp = load_script(ROOT / "charts" / "stamp.py")
    assert stamp.version() == VERSION
    assert stamp.registry() == REGISTRY
    for path, text in stamp.stamped(VERSION, REGISTRY, stamp.home()).items():
        assert (ROOT / path).read_text() == text, f"{path} is stale: python3 charts/stamp.py"


def test_a_release_stamps_every_file_that_has_version_registry_or_home() -> None:
    stamp = load_script(ROOT / "charts" / "stamp.py")
    stamped = stamp.stamped("9.8.7", "example.org/else", "https://example.org/home")
    for name in ("Chart.yaml", "files/alerts.yaml"):
        text = stamped.pop(Path("charts/diptych") / name)
        assert "https://example.org/home" in text
        assert stamp.home() not in text
        assert ("9.8.7" in text) == (name == "Chart.yaml")
    assert {path.name for path in stamped} == {
        *("values.yaml", "images.py"),
        *(path.name for path in ROOT.glob("docker/*.Dockerfile")),
        *(path.name for path in ROOT.glob("crds/*.yaml")),
        *("full.yaml", "llama-gpu.yaml"),
    }
    for path, text in stamped.items():
        has_both = path.parent.name == "examples"  # whole names of images
        assert "9.8.7" in text or "example.org/else" in text, path
        assert ("9.8.7" in text and "example.org/else" in text) == has_both, path


@pytest.mark.parametrize("keep", [True, False])
def test_the_crds_are_rendered_unchanged_and_kept_if_asked(helm: Helm, keep: bool) -> None:
    rendered = of_kind(helm.render({"crds": {"keep": keep}}), "CustomResourceDefinition")
    for crd in rendered:
        metadata = crd["metadata"]
        assert metadata["annotations"].pop("helm.sh/resource-policy", None) == (
            "keep" if keep else None
        )
        del metadata["labels"]
    sources = sorted((ROOT / "crds").glob("*.yaml"))
    assert rendered == [next(read_yaml(source.read_text())) for source in sources]


def test_no_crd_where_another_release_brings_it(helm: Helm) -> None:
    assert not of_kind(helm.render({"crds": {"install": False}}), "CustomResourceDefinition")


def test_every_pod_is_restricted(helm: Helm, values: dict[str, Any]) -> None:
    """As the Pod Security Standard "restricted" has it, with a read-only root besides."""
    found = pods(helm.render(values))
    assert len(found) == 2 + ("prePull" in values), "the operator, the test, who has images"
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all("hostPath" not in volume for volume in pod.get("volumes", ()))
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()


POLICY = ("--api-versions", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy")


def test_limits_are_the_operators_and_the_api_servers_where_it_has_policies(helm: Helm) -> None:
    values = {"limits": {"allow": {"hostPaths": ["/data"]}}}
    rendered = helm.render(values, *POLICY)
    (argument,) = [
        each for each in pods(rendered)[0]["containers"][0]["args"] if each.startswith("--limits=")
    ]
    allowed = json.loads(argument.removeprefix("--limits="))
    assert msgspec.to_builtins(msgspec.convert(allowed, Allowed)) == allowed
    assert allowed["hostPaths"] == ["/data"]
    policy = only(rendered, "ValidatingAdmissionPolicy")
    assert policy["spec"]["validations"] == validations()
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["inferenceservices", "modelroutes"]
    variables = {each["name"]: each["expression"] for each in policy["spec"]["variables"]}
    assert {name: json.loads(text) for name, text in variables.items()} == allowed
    binding = only(rendered, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert "matchResources" not in binding["spec"]


NEW, OLD = {"engine": {"image": "a"}}, {"engine": {"image": "b"}}


@pytest.mark.parametrize(
    ("operation", "spec", "before", "judged"),
    [("CREATE", NEW, None, True), ("UPDATE", NEW, OLD, True), ("UPDATE", NEW, NEW, False),
     ("UPDATE", NEW | {"suspend": True}, NEW, False),
     ("UPDATE", NEW, NEW | {"suspend": True}, True)],
)  # fmt: skip
def test_a_service_older_than_a_limit_can_be_stopped_annotated_and_deleted(
    helm: Helm, operation: str, spec: Object, before: Object | None, judged: bool
) -> None:
    policy = only(helm.render({}, *POLICY), "ValidatingAdmissionPolicy")
    known = {
        "request": json_to_cel({"operation": operation}),
        "object": json_to_cel({"spec": spec}),
        "oldObject": json_to_cel({"spec": before} if before else None),
    }
    conditions = [each["expression"] for each in policy["spec"].get("matchConditions", ())]
    programs = [program(text) for text in conditions]
    assert all(program.evaluate(known) for program in programs) == judged


@pytest.mark.parametrize(
    ("values", "arguments"),
    [({}, ()), ({"limits": {"admissionPolicy": False}}, POLICY),
     ({"limits": {"enabled": False}}, POLICY)],
)  # fmt: skip
def test_there_is_no_policy_where_there_can_or_shall_be_none(
    helm: Helm, values: dict[str, Any], arguments: tuple[str, ...]
) -> None:
    rendered = helm.render(values, *arguments)
    assert not of_kind(rendered, "ValidatingAdmissionPolicy")
    told = pods(rendered)[0]["containers"][0]["args"]
    asked = values.get("limits", {}).get("enabled", True)
    assert any(each.startswith("--limits=") for each in told) == asked


def test_values_of_an_older_chart_are_refused_with_the_remedy(helm: Helm) -> None:
    """So they are with `helm upgrade --reuse-values`."""
    assert "upgrade with --reset-then-reuse-values" in helm.refusal({"limits": None})
    for name in Allowed.__struct_encode_fields__:
        said = helm.refusal({"limits": {"allow": {name: None}}})
        assert f"the values have no limits.allow.{name}: upgrade with --reset-then-reuse" in said


def test_a_policy_of_some_namespaces_binds_those_only(helm: Helm) -> None:
    rendered = helm.render(MATRIX["namespaced"], *POLICY)
    (chosen,) = only(rendered, "ValidatingAdmissionPolicyBinding")["spec"]["matchResources"][
        "namespaceSelector"
    ]["matchExpressions"]
    assert chosen["values"] == ["team-a", "team-b"]


def test_pods_name_no_user_where_the_cluster_chooses_it(helm: Helm) -> None:
    found = pods(helm.render({"clusterChoosesUser": True}))
    for pod in found:
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    assert "--cluster-chooses-user" in found[0]["containers"][0]["args"]


def test_the_operator_is_told_what_to_serve_and_who_it_is(helm: Helm) -> None:
    (container,) = pods(helm.render(MATRIX["namespaced"]))[0]["containers"]
    assert container["command"] == ["python", "-m", "diptych_operator"]
    assert container["args"] == [
        "--namespaces=team-a,team-b",
        "--release=$(POD_NAMESPACE)/diptych-operator",
        "--metrics-port=8080",
        f"--engine-image={published('engine')}",
        f"--router-image={published('router')}",
        f"--vllm-connector-image={published('vllm-connector')}",
        "--max-concurrent-rollouts=1",
        f"--limits={as_helm_writes(DEFAULTS['limits']['allow'])}",
        f"--pod-defaults={as_helm_writes(DEFAULTS['podDefaults'])}",
        "--log-level=info",
    ]
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"]}
    assert fields == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert container["ports"] == [{"name": "metrics", "containerPort": 8080, "protocol": "TCP"}]


def test_the_operator_understands_its_arguments(helm: Helm, tmp_path: Path) -> None:
    """It gets as far as looking for a cluster; wrong arguments would end it with status 2."""
    values = {"podDefaults": POD_DEFAULTS, "operator": {"rolloutWindows": WINDOWS}}
    (container,) = pods(helm.render(MATRIX["namespaced"] | values))[0]["containers"]
    done = subprocess.run(
        [sys.executable, *container["command"][1:], *container["args"]],
        env={"PATH": os.environ["PATH"], "KUBECONFIG": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1, done.stderr
    assert "no cluster" in done.stderr


def test_what_is_set_arrives(helm: Helm) -> None:
    everything = MATRIX["everything set"]
    deployment = only(helm.render(everything), "Deployment")
    template, pod = deployment["spec"]["template"], deployment["spec"]["template"]["spec"]
    assert template["metadata"]["labels"].items() >= {"team": "ml"}.items()
    assert template["metadata"]["annotations"] == {"note": "yes"}
    for field in ("imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName",
                  "affinity", "topologySpreadConstraints"):  # fmt: skip
        assert pod[field] == everything[field]
    assert pod["dnsPolicy"] == everything["podDnsPolicy"]
    assert pod["dnsConfig"] == everything["podDnsConfig"]
    assert deployment["spec"]["strategy"] == everything["strategy"]
    assert deployment["metadata"]["annotations"] == {"note": "yes"}
    assert pod["volumes"] == [{"name": "tmp", "emptyDir": {}}, *everything["volumes"]]
    assert pod["securityContext"].items() >= everything["securityContext"].items()
    (container,) = pod["containers"]
    assert container["volumeMounts"][1:] == everything["volumeMounts"]
    assert container["env"][2:] == everything["extraEnv"]
    assert container["image"] == "example.org/mine/operator@sha256:" + "a" * 64
    assert container["resources"]["requests"] == {"cpu": 1, "memory": "128Mi"}
    assert container["args"][-2:] == ["--log-level=debug", "--log-level=warning"]
    windows = [each for each in container["args"] if each.startswith("--rollout-window=")]
    assert windows == [f"--rollout-window={each}" for each in WINDOWS]
    (told,) = [each for each in container["args"] if each.startswith("--pod-defaults=")]
    defaults = msgspec.json.decode(told.removeprefix("--pod-defaults="), type=PodDefaults)
    assert defaults == msgspec.convert(POD_DEFAULTS, PodDefaults) != PodDefaults()


def test_every_object_has_the_common_labels_and_keeps_those_it_is_known_by(helm: Helm) -> None:
    for item in helm.render(MATRIX["everything set"]):
        labels = item["metadata"]["labels"]
        assert labels["cost"] == "ml", item["kind"]
        assert labels["app.kubernetes.io/name"] in (
            "diptych-operator",
            "diptych-test",
            "diptych-images",
        )


def test_security_contexts_are_merged_over_the_charts(helm: Helm) -> None:
    values = {
        "securityContext": {"runAsUser": 1000680000},
        "containerSecurityContext": {"readOnlyRootFilesystem": False},
    }
    for pod in pods(helm.render(values)):
        assert pod["securityContext"]["runAsUser"] == 1000680000
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_more_objects_may_be_templates(helm: Helm) -> None:
    one = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-a"}}
    other = "apiVersion: v1\nkind: Secret\nmetadata: {name: '{{ .Values.nameOverride }}b'}"
    found = of_kind(helm.render({"extraObjects": [one, other], "nameOverride": "x"}), "Secret")
    assert {secret["metadata"]["name"] for secret in found} == {"diptych-a", "xb"}


@pytest.mark.parametrize("name", ["default", "namespaced"])
def test_the_operators_network_policy_lets_it_work(helm: Helm, name: str) -> None:
    """It asks the API server, and the admin ports of routers, wherever it serves."""
    assert not of_kind(helm.render(MATRIX[name]), "NetworkPolicy")
    objects = helm.render(MATRIX[name] | {"networkPolicy": {"enabled": True}})
    spec = only(objects, "NetworkPolicy")["spec"]
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["ingress"] == [{"ports": [{"port": "metrics", "protocol": "TCP"}]}]
    (to,) = [rule for rule in spec["egress"] if "to" in rule]
    assert to["ports"] == [{"port": ADMIN_PORT, "protocol": "TCP"}]
    (where,) = to["to"]
    assert where["podSelector"]["matchLabels"] == {MANAGED_BY_LABEL: MANAGED_BY}
    chosen = where["namespaceSelector"].get("matchExpressions", [{}])[0].get("values")
    assert chosen == MATRIX[name].get("namespaces")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_chart_with_this_one_as_a_part_may_leave_it_out(
    helm: Helm, tmp_path: Path, enabled: bool
) -> None:
    part = {"name": "diptych", "version": VERSION, "condition": "diptych.enabled"}
    chart = {"apiVersion": "v2", "name": "all", "version": "1.0.0", "dependencies": [part]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    shutil.copytree(CHART, tmp_path / "charts" / "diptych")
    done = helm("template", "all", str(tmp_path), values={"diptych": {"enabled": enabled}})
    assert done.returncode == 0, done.stderr
    assert ("kind: Deployment" in done.stdout) == enabled


def test_helm_test_proves_a_service_where_it_is_given_one(helm: Helm) -> None:
    spec = MATRIX["everything set"]["testService"]
    for name, home in (("default", NAMESPACE), ("namespaced", "team-a")):
        values = MATRIX[name]
        assert not of_kind(helm.render(values), KIND)
        objects = helm.render(values | {"testService": spec})
        service = only(objects, KIND)
        assert service["metadata"]["annotations"]["helm.sh/hook"] == "test"
        assert service["metadata"]["namespace"] == home
        assert parse(json.dumps(service)).spec.model.uri == spec["model"]["uri"]
        environment = {e["name"]: e["value"] for e in pods(objects)[1]["containers"][0]["env"]}
        name = object_name(parse(json.dumps(service)), "router")
        assert environment["SERVICE"] == f"http://{name}.{home}.svc:{HTTP_PORT}"


COMPONENTS = ("operator", "engine", "router", "vllm-connector")
"""Each has an image; the first is the operator's own."""


def images(objects: list[Object]) -> list[str]:
    """The operator's image, and those that it gives to services."""
    (container,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    told = [a.partition("=") for a in container["args"] if "-image=" in a]
    assert [name for name, _, _ in told] == [f"--{name}-image" for name in COMPONENTS[1:]]
    return [container["image"], *(image for _, _, image in told)]


def test_the_default_images_are_those_of_the_release(helm: Helm) -> None:
    """As `diptych render` has them, which is not told of values."""
    assert images(helm.render()) == [published(c) for c in COMPONENTS]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (MATRIX["everything set"],
         ["example.org/mine/operator@sha256:" + "a" * 64,
          f"example.org/mine/diptych-engine-cuda:{VERSION}",
          "example.org/mine/diptych-router:next",
          f"example.org/mine/diptych-vllm-connector:{VERSION}"]),
        ({"global": {"imageRegistry": "mirror:5000/x/"}},
         [f"mirror:5000/x/diptych-{c}:{VERSION}" for c in COMPONENTS]),
        ({"images": {"registry": ""}},
         [f"diptych-{c}:{VERSION}" for c in COMPONENTS]),
    ],
    ids=["each its own", "a mirror for all", "no registry"],
)  # fmt: skip
def test_images_come_from_where_the_values_say(
    helm: Helm, values: dict[str, Any], expected: list[str]
) -> None:
    assert images(helm.render(values)) == expected


@pytest.mark.parametrize(
    ("values", "rendered"),
    [
        ({}, True),
        ({"replicas": 1}, False),
        ({"podDisruptionBudget": {"enabled": False}}, False),
    ],
)
def test_a_disruption_budget_never_blocks_a_lone_pod(
    helm: Helm, values: dict[str, Any], rendered: bool
) -> None:
    assert bool(of_kind(helm.render(values), "PodDisruptionBudget")) is rendered


def test_a_pod_on_each_node_needs_the_images_of_services_before_they_do(helm: Helm) -> None:
    values = {"prePull": {"enabled": True, "nodeSelector": {"pool": "models"}}}
    objects = helm.render(values)
    fetches = only(objects, "DaemonSet")["spec"]
    pod = fetches["template"]["spec"]
    said = pods(objects)[0]["containers"][0]["args"]
    assert pod["nodeSelector"] == {"pool": "models"}
    assert [c["name"] for c in pod["initContainers"]] == ["engine", "router"]
    for container in pod["initContainers"]:
        assert f"--{container['name']}-image={container['image']}" in said
    selector = fetches["selector"]["matchLabels"]
    assert selector.items() <= fetches["template"]["metadata"]["labels"].items()
    operators = only(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert not operators.items() <= fetches["template"]["metadata"]["labels"].items()


def test_selectors_pick_the_operator_and_not_the_test_pod(helm: Helm) -> None:
    objects = helm.render({"podLabels": {"team": "ml"}})
    deployment, service = only(objects, "Deployment"), only(objects, "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        service["spec"]["selector"],
        deployment["spec"]["selector"]["matchLabels"],
        only(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert not selector.items() <= only(objects, "Pod")["metadata"]["labels"].items()


def test_engines_let_the_operator_through(helm: Helm, values: dict[str, Any]) -> None:
    """The NetworkPolicies of services know the operator's pods by these labels."""
    labels = only(helm.render(values), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert OPERATOR_LABELS.items() <= labels.items()


def test_names_fit_however_long_the_release(helm: Helm, values: dict[str, Any]) -> None:
    done = helm("template", "r" * 53, str(CHART), "-n", "n" * 63, values=values)
    assert done.returncode == 0, done.stderr
    for item in read_yaml(done.stdout):
        # RBAC names may be path segments; all others end up in labels and host names.
        limit = 253 if "rbac" in item["apiVersion"] or "Custom" in item["kind"] else 63
        assert len(item["metadata"]["name"]) <= limit


def test_the_notes_hold_an_example_that_works(helm: Helm) -> None:
    done = helm("install", RELEASE, str(CHART), "-n", NAMESPACE, "--dry-run=client")
    if "cluster unreachable" in done.stderr:
        pytest.skip("Helm 3 prints notes only where there is a cluster")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    example = notes.partition("<<EOF\n")[2].partition("EOF\n")[0]
    assert parse(example).metadata.name == "smollm2"
    assert f"helm -n {NAMESPACE} test {RELEASE}" in notes
