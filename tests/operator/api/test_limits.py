"""What no administrator has listed is refused alike, by the policy's CEL and by the operator."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, cast

import msgspec
import pytest
from cases import each
from celpy.adapter import json_to_cel
from cluster_kit.crds import inference_service, program
from cluster_kit.reconciling import Store, one_pass

from diptych_operator.api.base import SpecError
from diptych_operator.api.limits import LIMITS, Allowed, check_limits, validations

Listed = dict[str, list[str]]
DEFAULT: Listed = {
    "images": ["*"],
    "hostnames": ["*"],
    "cacheHostPaths": ["/var/lib/diptych/models"],
}


@cache
def programs() -> list[tuple[Any, str]]:
    """The policy's validations, compiled, and their messages."""
    return [(program(rule["expression"]), rule["message"]) for rule in validations()]


def by_policy(spec: dict[str, Any], listed: Listed, about: str = "") -> list[str]:
    """The messages of the policy's validations that the spec breaks, of those that have the words
    `about` in their message: each takes milliseconds."""
    lists = {**msgspec.to_builtins(Allowed()), **listed}
    known = {"object": json_to_cel({"spec": spec}), "variables": json_to_cel(lists)}
    return [message for validation, message in programs()
            if about in message and not validation.evaluate(known)]  # fmt: skip


def by_operator(spec: dict[str, Any], listed: Listed) -> SpecError | None:
    try:
        check_limits(spec, msgspec.convert(listed, Allowed))
    except SpecError as exc:
        return exc
    return None


def pod(**fields: Any) -> dict[str, Any]:
    return {"decode": {"podTemplate": {"spec": fields}}}


CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def container(**fields: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "side", "securityContext": CONFINED, **fields}])


def annotated(name: str, value: str) -> dict[str, Any]:
    return {"decode": {"podTemplate": {"metadata": {"annotations": {name: value}}}}}


def volume(**source: Any) -> dict[str, Any]:
    return pod(volumes=[{"name": "v", **source}])


def fetched(uri: str) -> dict[str, Any]:
    return {"model": {"uri": uri, "credentials": {"secretName": "token"}}}


def image(**parts: Any) -> dict[str, Any]:
    return {"model": {"uri": "dummy://"}, **parts}


POD = "spec.decode.podTemplate.spec"
SIDE = f"{POD}.containers[0]"
REFUSED: list[tuple[dict[str, Any], str, Listed]] = [
    # What is asked for, the field that is named, and what the administrator lists to allow it.
    (pod(hostNetwork=True), f"{POD}.hostNetwork", {"fields": ["hostNetwork"]}),
    (pod(hostPID=True), f"{POD}.hostPID", {"fields": ["hostPID"]}),
    (pod(nodeName="control-plane"), f"{POD}.nodeName", {"fields": ["nodeName"]}),
    (pod(priorityClassName="system-node-critical"), f"{POD}.priorityClassName",
     {"fields": ["priorityClassName"]}),
    (pod(hostIPC=True), f"{POD}.hostIPC", {"fields": ["hostIPC"]}),
    (pod(automountServiceAccountToken=True), f"{POD}.automountServiceAccountToken",
     {"fields": ["automountServiceAccountToken"]}),
    (pod(serviceAccountName="admin"), f"{POD}.serviceAccountName", {"serviceAccounts": ["admin"]}),
    (pod(serviceAccount="admin"), f"{POD}.serviceAccount", {"serviceAccounts": ["admin"]}),
    (pod(securityContext={"runAsUser": 0}), f"{POD}.securityContext.runAsUser",
     {"fields": ["securityContext.runAsUser"]}),
    (pod(securityContext={"runAsNonRoot": False}), f"{POD}.securityContext.runAsNonRoot",
     {"fields": ["securityContext.runAsNonRoot"]}),
    (pod(securityContext={"seccompProfile": {"type": "Unconfined"}}),
     f"{POD}.securityContext.seccompProfile.type",
     {"fields": ["securityContext.seccompProfile.type"]}),
    (pod(securityContext={"seLinuxOptions": {"type": "spc_t"}}),
     f"{POD}.securityContext.seLinuxOptions", {"fields": ["securityContext.seLinuxOptions"]}),
    (pod(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
     f"{POD}.securityContext.appArmorProfile.type",
     {"fields": ["securityContext.appArmorProfile.type"]}),
    (pod(securityContext={"windowsOptions": {"hostProcess": True}}),
     f"{POD}.securityContext.windowsOptions", {"fields": ["securityContext.windowsOptions"]}),
    (pod(securityContext={"sysctls": [{"name": "a", "value": "1"}]}),
     f"{POD}.securityContext.sysctls[0]", {"fields": ["securityContext.sysctls[]"]}),
    (volume(nfs={"server": "a", "path": "/"}), f"{POD}.volumes[0]", {"fields": ["volumes[]"]}),
    (volume(hostPath={"path": "/"}), f"{POD}.volumes[0].hostPath.path", {"hostPaths": ["/"]}),
    (volume(hostPath={"path": "/data/x"}), f"{POD}.volumes[0].hostPath.path",
     {"hostPaths": ["/data"]}),
    (volume(secret={"secretName": "a"}), f"{POD}.volumes[0].secret.secretName",
     {"secrets": ["a"]}),
    (volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "a"}}),
     f"{POD}.volumes[0].csi.nodePublishSecretRef.name", {"secrets": ["a"]}),
    (volume(projected={"sources": [{"secret": {"name": "a"}}]}),
     f"{POD}.volumes[0].projected.sources[0].secret.name", {"secrets": ["a"]}),
    (volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
     f"{POD}.volumes[0].projected.sources[0].serviceAccountToken",
     {"fields": ["volumes[].projected.sources[].serviceAccountToken"]}),
    (container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k"}}}]),
     f"{SIDE}.env[0].valueFrom.secretKeyRef.name", {"secrets": ["a"]}),
    (container(envFrom=[{"secretRef": {"name": "a"}}]), f"{SIDE}.envFrom[0].secretRef.name",
     {"secrets": ["a"]}),
    (container(ports=[{"hostPort": 80}]), f"{SIDE}.ports[0].hostPort",
     {"fields": ["ports[].hostPort"]}),
    (container(securityContext={"privileged": True}), f"{SIDE}.securityContext.privileged",
     {"fields": ["securityContext.privileged"]}),
    (container(securityContext={"allowPrivilegeEscalation": True}),
     f"{SIDE}.securityContext.allowPrivilegeEscalation",
     {"fields": ["securityContext.allowPrivilegeEscalation"]}),
    (container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
     f"{SIDE}.securityContext.capabilities.add[0]", {"capabilities": ["SYS_ADMIN"]}),
    (container(image="a", securityContext={"capabilities": {"drop": ["ALL"]}}),
     f"{SIDE}.securityContext.allowPrivilegeEscalation",
     {"fields": ["securityContext.allowPrivilegeEscalation"]}),
    (container(image="a", securityContext={"allowPrivilegeEscalation": False}),
     f"{SIDE}.securityContext.capabilities.drop",
     {"fields": ["securityContext.capabilities.drop"]}),
    (container(securityContext={"capabilities": {"drop": []}}),
     f"{SIDE}.securityContext.capabilities.drop",
     {"fields": ["securityContext.capabilities.drop"]}),
    *((container(**cast("dict[str, Any]", outer)), f"{SIDE}.{probe}.{way}.host",
       {"fields": [f"{probe}.{way}.host"]})
      for way in ("httpGet", "tcpSocket")
      for host in [{way: {"host": "10.0.0.1", "port": 80}}]
      for probe, outer in [
          *((n, {n: host}) for n in ("livenessProbe", "readinessProbe", "startupProbe")),
          *((f"lifecycle.{n}", {"lifecycle": {n: host}}) for n in ("postStart", "preStop")),
      ]),
    *((annotated(f"{name}.kubernetes.io/engine", "unconfined"),
       "spec.decode.podTemplate.metadata.annotations", {"fields": ["metadata.annotations"]})
      for name in ("container.apparmor.security.beta", "container.seccomp.security.alpha",
                   "seccomp.security.alpha")),
    (pod(ephemeralContainers=[{"name": "e"}]), f"{POD}.ephemeralContainers",
     {"fields": ["ephemeralContainers"]}),
    (volume(projected={"sources": [{"podCertificate": {"signerName": "a/b"}}]}),
     f"{POD}.volumes[0].projected.sources[0].podCertificate",
     {"fields": ["volumes[].projected.sources[].podCertificate"]}),
    (container(securityContext={"procMount": "Unmasked"}), f"{SIDE}.securityContext.procMount",
     {"fields": ["securityContext.procMount"]}),
    (container(securityContext={"runAsUser": 0}), f"{SIDE}.securityContext.runAsUser",
     {"fields": ["securityContext.runAsUser"]}),
    (container(securityContext={"runAsNonRoot": False}), f"{SIDE}.securityContext.runAsNonRoot",
     {"fields": ["securityContext.runAsNonRoot"]}),
    (container(securityContext={"seccompProfile": {"type": "Unconfined"}}),
     f"{SIDE}.securityContext.seccompProfile.type",
     {"fields": ["securityContext.seccompProfile.type"]}),
    (container(securityContext={"seLinuxOptions": {}}), f"{SIDE}.securityContext.seLinuxOptions",
     {"fields": ["securityContext.seLinuxOptions"]}),
    (container(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
     f"{SIDE}.securityContext.appArmorProfile.type",
     {"fields": ["securityContext.appArmorProfile.type"]}),
    (container(securityContext={"windowsOptions": {"hostProcess": True}}),
     f"{SIDE}.securityContext.windowsOptions", {"fields": ["securityContext.windowsOptions"]}),
    ({"router": {"podTemplateRemove": ["spec.securityContext"]}},
     "spec.router.podTemplateRemove[0]", {"fields": ["router.podTemplateRemove[]"]}),
    ({"prefill": {"podTemplateRemove": ["spec.securityContext.runAsNonRoot"]}},
     "spec.prefill.podTemplateRemove[0]", {"fields": ["prefill.podTemplateRemove[]"]}),
    ({"decode": {"podTemplateRemove": ["spec.containers[engine].securityContext"]}},
     "spec.decode.podTemplateRemove[0]", {"fields": ["decode.podTemplateRemove[]"]}),
    (fetched("https://evil.example/a.gguf"), "spec.model.uri",
     {"credentialHosts": ["evil.example"]}),
    ({"model": {"uri": "hf://a/b", "cache": {"hostPath": "/etc"}}}, "spec.model.cache.hostPath",
     {"cacheHostPaths": ["/etc"]}),
]  # fmt: skip


def with_model(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = inference_service(spec)["spec"]
    return found


@each(("spec", "field", "listed"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_is_not_listed_is_refused_by_both_and_what_is_listed_by_none(
    spec: dict[str, Any], field: str, listed: Listed
) -> None:
    spec = with_model(spec)
    refusal = by_operator(spec, DEFAULT)
    assert refusal is not None
    assert refusal.field == field
    (name,) = listed
    (message,) = by_policy(spec, DEFAULT, f"limits.allow.{name}")
    for words in (str(refusal), message):
        assert f"limits.allow.{name}" in words
    for lists in (DEFAULT | listed, DEFAULT | {name: ["*"]}):
        assert by_operator(spec, lists) is None
        assert by_policy(spec, lists, message) == []


def of_a_route(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec of a ModelRoute that asks for what a service's spec asks for."""
    parts = (part for part in spec.values() if isinstance(part, dict))
    fields = ("image", "podTemplate", "podTemplateRemove")
    return {name: part[name] for part in parts for name in fields if name in part}


ROUTES = [(of_a_route(spec), listed) for spec, _, listed in REFUSED if of_a_route(spec)]
OF_EACH_LIST = [*{min(listed): (spec, listed) for spec, listed in ROUTES}.values()]
"""One that is refused by each list; the expressions are those for a service."""


@pytest.mark.parametrize("routes", [OF_EACH_LIST, pytest.param(ROUTES, marks=pytest.mark.slow)])
def test_a_route_may_ask_for_no_more_than_a_service(
    routes: list[tuple[dict[str, Any], Listed]],
) -> None:
    for spec, listed in ROUTES:
        assert by_operator(spec, DEFAULT) is not None, spec
        (name,) = listed
        assert by_operator(spec, DEFAULT | {name: ["*"]}) is None, spec
    for spec, listed in routes:
        (name,) = listed
        assert len(by_policy(spec, DEFAULT, f"limits.allow.{name}")) == 1, spec


IMAGES = [
    {"image": "evil.example/a:1"},
    image(engine={"image": "evil.example/a:1"}), image(router={"image": "evil.example/a"}),
    image(prefill={"engine": {"image": "evil.example/a:1"}}),
    image(transfer={"connectorImage": "evil.example/a@sha256:0"}),
    {"model": {"uri": "oci://evil.example/a@sha256:0"}},
    {"engine": {"speculativeConfig": {"model": "oci://evil.example/a@sha256:0"}}},
    container(image="evil.example/a:1"),
    volume(image={"reference": "evil.example/a:1"}),
    pod(initContainers=[{"name": "i", "image": "evil.example/a:1", "securityContext": CONFINED}]),
]  # fmt: skip


@each("spec", IMAGES, ids=str)
def test_images_come_from_what_is_listed(spec: dict[str, Any]) -> None:
    spec = with_model(spec)
    for lists in (["good.example"], ["evil.exampl"], ["evil.example/a/b"], []):
        assert by_operator(spec, {"images": lists}) is not None
        assert len(by_policy(spec, {"images": lists}, "allow.images")) == 1
    for lists in (["evil.example"], ["evil.example/a"], ["good.example", "*"]):
        assert by_operator(spec, {"images": lists}) is None
        assert by_policy(spec, {"images": lists}, "allow.images") == []


HOSTNAMES = [
    ("a.team.example", ["team.example"], True),
    ("*.team.example", ["other.example", "team.example"], True),
    ("team.example", ["team.example"], True),
    ("", ["*"], True),
    (None, ["*"], True),
    ("a.myteam.example", ["team.example"], False),
    ("team.example.evil.example", ["team.example"], False),
    ("", ["team.example"], False),
    (None, ["team.example"], False),
    ("team.example", [], False),
]


@each(("hostname", "listed", "allowed"), HOSTNAMES)
def test_services_take_no_names_of_gateways_that_are_not_listed(
    hostname: str | None, listed: list[str], allowed: bool
) -> None:
    gateway = {"name": "shared"} | ({} if hostname is None else {"hostname": hostname})
    spec = with_model({"expose": {"gateway": gateway}})
    refusal = by_operator(spec, {"hostnames": listed})
    assert (refusal is None) == allowed
    assert len(by_policy(spec, {"hostnames": listed}, "allow.hostnames")) == (not allowed)
    assert refusal is None or refusal.field == "spec.expose.gateway.hostname"


FREE = [
    {},
    {"expose": {"gateway": {"name": "shared"}}},
    pod(nodeSelector={"gpu": "yes"}, tolerations=[{"operator": "Exists"}], hostNetwork=False),
    pod(securityContext={"runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}),
    volume(persistentVolumeClaim={"claimName": "m"}),
    volume(emptyDir={}),
    container(image="any/image", env=[{"name": "A", "value": "1"}], ports=[{"containerPort": 1}]),
    {"decode": {"podTemplateRemove": ["spec.securityContext.runAsUser"]}},
    # Of a container of ours, which has no image here, the rest is as we make it.
    pod(initContainers=[{"name": "model", "env": [{"name": "HTTPS_PROXY", "value": "p"}]}]),
    annotated("example.org/team", "search"),
    fetched("hf://a/b"),
    fetched("s3://a/b"),
    {"model": {"uri": "https://any.example/a.gguf"}},
    {"model": {"uri": "hf://a/b", "cache": {"hostPath": "/var/lib/diptych/models"}}},
]


@each("spec", FREE, ids=str)
def test_the_usual_needs_no_listing(spec: dict[str, Any]) -> None:
    spec = with_model(spec)
    assert by_operator(spec, DEFAULT) is None
    assert by_policy(spec, DEFAULT) == []


def test_a_folder_beside_a_listed_one_is_not_listed() -> None:
    for path in ("/database", "/dat", "/"):
        spec = with_model(volume(hostPath={"path": path}))
        assert by_operator(spec, {"hostPaths": ["/data"]}) is not None
        assert len(by_policy(spec, {"hostPaths": ["/data"]}, "allow.hostPaths")) == 1


def test_each_limit_is_tried_here() -> None:
    refusals = [by_operator(with_model(spec), DEFAULT) for spec, *_ in REFUSED]
    refusals += [by_operator(with_model(spec), {}) for spec in IMAGES]
    refusals += [by_operator(with_model({"expose": {"gateway": {"name": "shared"}}}), {})]
    tried = {re.sub(r"[0-9]+", "", refusal.field) for refusal in refusals if refusal is not None}
    assert [limit for limit, _ in LIMITS if not any(t.endswith(limit.path) for t in tried)] == []
    assert len(programs()) == len(LIMITS)


async def test_an_operator_makes_no_pods_beyond_the_limits_and_says_so() -> None:
    store, allowed = Store(), Allowed(images=["*"])
    store.spec = container(securityContext={"privileged": True})
    await one_pass(store, allowed)
    assert store.deployments() == []
    degraded = store.condition("Degraded")
    assert degraded["reason"] == "SpecInvalid"
    assert f"{SIDE}.securityContext.privileged: True is not allowed" in degraded["message"]
    await one_pass(store)
    assert store.deployments(), "an operator without limits makes them"


# https://kubernetes.io/docs/concepts/security/pod-security-standards/, each control of both levels.
POD_SECURITY = {
    "baseline: HostProcess": [
        where(securityContext={"windowsOptions": {"hostProcess": True}})
        for where in (pod, container)
    ],
    "baseline: Host Namespaces": [pod(**{n: True}) for n in ("hostNetwork", "hostPID", "hostIPC")],
    "baseline: Privileged Containers": [container(securityContext={"privileged": True})],
    "baseline: Capabilities": [container(securityContext={"capabilities": {"add": ["NET_RAW"]}})],
    "baseline: HostPath Volumes": [volume(hostPath={"path": "/proc"})],
    "baseline: Host Ports": [container(ports=[{"containerPort": 1, "hostPort": 1}])],
    "baseline: Host Probes / Lifecycle Hooks": [
        container(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
        container(lifecycle={"postStart": {"tcpSocket": {"host": "169.254.169.254", "port": 80}}}),
    ],
    "baseline: AppArmor": [
        pod(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
        annotated("container.apparmor.security.beta.kubernetes.io/engine", "unconfined"),
    ],
    "baseline: SELinux": [
        where(securityContext={"seLinuxOptions": {"type": "spc_t", "user": "u", "role": "r"}})
        for where in (pod, container)
    ],
    "baseline: /proc Mount Type": [container(securityContext={"procMount": "Unmasked"})],
    "baseline: Seccomp": [
        pod(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        annotated("seccomp.security.alpha.kubernetes.io/pod", "unconfined"),
    ],
    "baseline: Sysctls": [
        pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]})
    ],
    "restricted: Volume Types": [volume(iscsi={"iqn": "i"}), volume(nfs={"server": "s"})],
    "restricted: Privilege Escalation": [
        container(securityContext={"allowPrivilegeEscalation": True}),
        pod(containers=[{"name": "side", "image": "a"}]),
    ],
    "restricted: Running as Non-root": [
        where(securityContext={"runAsNonRoot": False}) for where in (pod, container)
    ],
    "restricted: Running as Non-root user": [
        where(securityContext={"runAsUser": 0}) for where in (pod, container)
    ],
    "restricted: Seccomp": [
        {"decode": {"podTemplateRemove": ["spec.securityContext.seccompProfile"]}}
    ],
    "restricted: Capabilities": [
        container(securityContext={"capabilities": {"drop": ["KILL"]}}),
        pod(initContainers=[{"name": "i", "image": "a",
                             "securityContext": {"allowPrivilegeEscalation": False}}]),
    ],
}  # fmt: skip


@each("control", POD_SECURITY)
def test_what_pod_security_standards_forbid_is_refused_by_both(control: str) -> None:
    for spec in map(with_model, POD_SECURITY[control]):
        refusal = by_operator(spec, DEFAULT)
        assert refusal is not None, spec
        (remedy,) = re.findall(r"limits\.allow\.\w+", str(refusal))
        assert by_policy(spec, DEFAULT, remedy), spec


async def test_a_service_beyond_the_limits_can_be_stopped() -> None:
    store = Store()
    store.spec = container(image="side:1", securityContext={"privileged": True})
    await one_pass(store)
    assert {found["spec"]["replicas"] for found in store.deployments()} == {1}
    store.spec |= {"suspend": True}
    await one_pass(store, Allowed())
    assert {found["spec"]["replicas"] for found in store.deployments()} == {0}
