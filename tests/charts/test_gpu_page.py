"""The commands and the YAML for GPUs in docs/vllm.md are what chart, CRD and operator take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml
from cluster_kit.charts import ROOT, Helm, only
from cluster_kit.crds import broken_rules, service_of

from diptych_operator.api.crd import custom_resource_definition
from diptych_operator.api.images import Images
from diptych_operator.api.merge import merge
from diptych_operator.api.parse import parse_object
from diptych_operator.api.service import InferenceService
from diptych_operator.render import ServiceSecrets, render
from diptych_operator.status.reasons import ConditionType, Reason
from diptych_protocol import CurveKeys

Object = dict[str, Any]
_, _, REST = (ROOT / "docs/vllm.md").read_text().partition("\n## GPUs, step by step\n")
PAGE = REST.partition("\n## ")[0]
EXAMPLE = service_of(ROOT / "examples/vllm-gpu.yaml")
SERVICE, NAMESPACE = EXAMPLE["metadata"]["name"], "llm"
REVISION = "3f9a1c07"
SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), admin_token="T" * 43)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands(program: str) -> Iterator[list[str]]:
    """The arguments of each command of a program; a backslash at its end continues a line."""
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split(" | "):
                words = [word for word in shlex.split(part) if word != "&"]
                if words[0] == program:
                    yield words[1:]


def objects() -> list[Object]:
    """What the page's YAML says in whole: what the service uses."""
    return [
        item for block in blocks("yaml") for item in yaml.safe_load_all(block) if "kind" in item
    ]


def changes() -> list[Object]:
    """The parts of a service that the page shows to be added to the example."""
    found = [yaml.safe_load_all(block) for block in blocks("yaml")]
    return [item for items in found for item in items if "kind" not in item]


def parsed(service: Object) -> InferenceService:
    service = service | {"metadata": service["metadata"] | {"namespace": NAMESPACE}}
    return parse_object(service, Images())


def rendered(service: Object) -> list[Object]:
    return render(parsed(service), SECRETS)


def engine_of(service: Object, pool: str) -> tuple[Object, Object]:
    """The pod of an engine, and its container."""
    deployments = [item for item in rendered(service) if item["kind"] == "Deployment"]
    (found,) = (d for d in deployments if d["metadata"]["labels"]["diptych.dev/role"] == pool)
    pod: Object = found["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def test_the_chart_takes_the_values_of_the_page(helm: Helm) -> None:
    (install,) = commands("helm")
    assert install[:3] == ["install", "diptych", "charts/diptych"]
    settings = [install[at + 1] for at, word in enumerate(install) if word == "--set"]
    assert "--create-namespace" in install
    namespace = install[install.index("--namespace") + 1]
    made = helm("template", "diptych", str(ROOT / "charts/diptych"), "--namespace", namespace,
                *(word for setting in settings for word in ("--set", setting)))  # fmt: skip
    assert made.returncode == 0, made.stderr
    operator = only([o for o in yaml.safe_load_all(made.stdout) if o], "Deployment")
    (image,) = (c["image"] for c in operator["spec"]["template"]["spec"]["containers"])
    pushed = {words[1] for words in commands("docker") if words[0] == "push"}
    assert image in pushed
    told = [
        word for words in commands("kubectl") for word in words if word.startswith("deployment/")
    ]
    assert told == [f"deployment/{operator['metadata']['name']}"]
    tags = {image.rpartition(":")[2] for image in pushed}
    assert all(f"REGISTRY/{name}:{tag}" in made.stdout for tag in tags for name in (
        "diptych-router", "diptych-vllm-connector"))  # fmt: skip


def test_the_images_are_built_of_files_that_there_are() -> None:
    builds = [words for words in commands("docker") if words[0] == "build"]
    assert len(builds) == 3
    for words in builds:
        assert (ROOT / words[words.index("-f") + 1]).is_file()
    assert {words[words.index("-t") + 1] for words in builds} == {
        words[1] for words in commands("docker") if words[0] == "push"
    }


def test_the_example_is_admitted_and_finds_the_secret_and_the_claims_of_the_page() -> None:
    assert broken_rules(EXAMPLE) == set()
    pod, container = engine_of(EXAMPLE, "decode")
    (secret,) = (words for words in commands("kubectl") if "secret" in words)
    assert secret[-2] == EXAMPLE["spec"]["model"]["credentials"]["secretName"]
    assert secret[-1].startswith("--from-literal=token=")
    claimed = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claimed == {item["metadata"]["name"] for item in objects()}
    assert all(item["spec"]["accessModes"] == ["ReadWriteMany"] for item in objects())
    (tried,) = (words[-3] for words in commands("docker") if words[0] == "run")
    assert tried == container["image"]
    (transfer,) = (a for a in container["args"] if a.startswith("--kv-transfer-config="))
    assert "NixlConnector" in transfer


@pytest.mark.parametrize("change", changes(), ids=["several GPUs", "InfiniBand"])
def test_what_the_page_adds_to_the_example_is_admitted_and_reaches_the_pods(change: Object) -> None:
    service = merge(EXAMPLE, change, "spec")
    assert broken_rules(service) == set()
    pools = [pool for pool in ("prefill", "decode") if pool in change["spec"]]
    for pool in pools:
        _, container = engine_of(service, pool)
        limits = change["spec"][pool]["resources"]["limits"]
        assert {name: str(number) for name, number in limits.items()}.items() <= (
            container["resources"]["limits"].items()
        )
        if "engine" in change["spec"]:
            ranks = change["spec"]["engine"]["tensorParallelSize"]
            assert f"--tensor-parallel-size={ranks}" in container["args"]
        else:
            assert container["securityContext"]["capabilities"] == {
                "drop": ["ALL"], "add": ["IPC_LOCK"],
            }  # fmt: skip
            assert {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"} in container["env"]


def test_the_commands_name_what_there_is() -> None:
    made = {(item["kind"].lower(), item["metadata"]["name"]) for item in rendered(EXAMPLE)}
    kinds = custom_resource_definition()["spec"]["names"]
    known = {kinds["singular"], kinds["plural"], *kinds["shortNames"]}
    for words in commands("kubectl"):
        for kind, _, name in (word.partition("/") for word in words if "/" in word):
            if kind == "service":
                assert (kind, name) in made
            elif kind in known:
                assert name == SERVICE
            elif kind == "examples":
                assert (ROOT / kind / name).is_file()
        for condition in (w.partition("condition=")[2] for w in words if "for=condition=" in w):
            assert condition in list(ConditionType)
        if "-l" in words:
            asked = dict(pair.split("=") for pair in words[words.index("-l") + 1].split(","))
            labels = [item["metadata"]["labels"].items() for item in rendered(EXAMPLE)]
            assert any(asked.items() <= found for found in labels)
    (forward,) = (w for w in commands("kubectl") if f"service/{SERVICE}-router" in w)
    (router,) = (o for o in rendered(EXAMPLE) if o["kind"] == "Service"
                 and o["metadata"]["name"] == f"{SERVICE}-router")  # fmt: skip
    assert int(forward[-1].partition(":")[2]) in [p["port"] for p in router["spec"]["ports"]]
    (question,) = (w for w in commands("curl") if "-d" in w)
    body = msgspec.json.decode(question[question.index("-d") + 1])
    assert body["model"] == parsed(EXAMPLE).served_name


def test_the_reasons_and_conditions_in_the_table_of_troubles_are_the_operators() -> None:
    _, _, table = PAGE.partition("### When it does not work")
    named = set(re.findall(r"^\| `([A-Z][A-Za-z]+)`", table, re.MULTILINE))
    assert len(named) > 5
    assert named <= {reason.value for reason in Reason}


def test_the_page_shows_what_kubectl_prints() -> None:
    (block,) = blocks("console")
    listing = block.splitlines()
    (version,) = custom_resource_definition()["spec"]["versions"]
    columns = [c["name"].upper() for c in version["additionalPrinterColumns"] if not c["priority"]]
    assert listing[1].split() == ["NAME", *columns]
    shown = dict(zip(listing[1].split(), listing[2].split(), strict=True))
    assert shown["MODEL"] == EXAMPLE["spec"]["model"]["uri"]
    assert shown["REVISION"] == REVISION
