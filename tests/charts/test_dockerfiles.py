"""The images: pinned, without root, and with no more in them than they need: no compiler, but for
the one that Triton calls on a GPU."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_kit.charts import ROOT

from diptych_operator.api.names import CONNECTOR_DIR, ENGINE_PORTS, ROUTER_PORTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
IMAGES = {path.name.removesuffix(".Dockerfile"): path for path in ROOT.glob("docker/*.Dockerfile")}
PROGRAMS = {"operator": "operator", "router": "router", "engine": "engine", "engine.cuda": "engine"}
COMPILES = {"engine.cuda"}
"""Triton builds a C module against the libcuda of the node that it runs on, which no build of an
image has: the driver is the node's."""
FURTHER = {"router": ",tracing,gateway", "engine": ",tracing"}
"""The extras of programs that send spans, or answer gateways, if they are asked to."""
PORTS = {"operator": {8080}, "router": set(ROUTER_PORTS.values())}
CONNECTOR = "vllm"
"""No program: a folder that is copied into pods of vLLM, or laid on top of vLLM's image."""


@dataclass(frozen=True)
class Stage:
    """One FROM and the instructions behind it, each with its line breaks taken out."""

    base: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, keyword: str) -> list[str]:
        return [text for word, text in self.instructions if word == keyword]

    def only(self, keyword: str) -> str:
        (text,) = self.all(keyword)
        return text


def stages(path: Path) -> list[Stage]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    logical = "\n".join(lines).replace("\\\n", " ").splitlines()
    found: list[Stage] = []
    for line in filter(None, logical):
        keyword, _, text = line.partition(" ")
        if keyword == "FROM":
            found.append(Stage(text, ()))
        elif found:
            stage = found.pop()
            found.append(Stage(stage.base, (*stage.instructions, (keyword, text.strip()))))
    return found


def requirements(extra: str) -> set[str]:
    """Names of all that an extra installs, through the extras it names."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        if own := re.fullmatch(r"diptych\[([\w,]+)\]", requirement):
            found |= {name for other in own[1].split(",") for name in requirements(other)}
        else:
            found.add(re.split(r"[=<>\[ ]", requirement)[0])
    return found


@pytest.fixture(params=PROGRAMS)
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_there_is_an_image_for_each_program() -> None:
    assert IMAGES.keys() == PROGRAMS.keys() | {CONNECTOR}


def test_all_stand_on_one_pinned_base() -> None:
    bases = {stage.base.split()[0] for path in IMAGES.values() for stage in stages(path)}
    (base,) = bases - {"${VLLM_IMAGE}"}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)


def test_the_final_stage_runs_as_nobody_and_builds_nothing(image: str) -> None:
    *_, final = stages(IMAGES[image])
    assert final.only("USER") == "10001:10001"
    assert all("--from=build" in source for source in final.all("COPY"))
    installs = [command for command in final.all("RUN") if "apt-get" in command]
    assert len(installs) == (image in COMPILES)
    for tool in ("pip ", "gcc", "curl"):
        assert all(tool not in each for each in final.all("RUN") if each not in installs)
    environment = final.only("ENV")
    for setting in ("HOME=/tmp", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"):
        assert setting in environment.split()
    labels = final.only("LABEL")
    for label in ("title", "description", "licenses", "version"):
        assert f"org.opencontainers.image.{label}=" in labels


@pytest.mark.parametrize("image", COMPILES)
def test_what_triton_needs_is_there_and_what_it_makes_is_kept_where_pods_can_write(
    image: str,
) -> None:
    """A compiler and libc's headers; Python's are the base's, CUDA's are Triton's. In a pod /tmp is
    the only folder to write to, and its .cache may be a volume."""
    *_, final = stages(IMAGES[image])
    (install,) = (command for command in final.all("RUN") if "apt-get" in command)
    packages = install.partition("--no-install-recommends")[2].partition("&&")[0].split()
    assert packages == ["gcc", "libc6-dev"]
    assert "rm -rf /var/lib/apt/lists/*" in install
    environment = final.only("ENV").split()
    assert "TRITON_CACHE_DIR=/tmp/.cache/triton" in environment


def test_an_image_runs_its_program_with_its_extras_and_says_its_ports(image: str) -> None:
    build, final = stages(IMAGES[image])
    program = PROGRAMS[image]
    installed = re.findall(r"pip install '\.\[([\w,]+)\]'", " ".join(build.all("RUN")))
    assert installed == [f"{program}{FURTHER.get(program, '')}"]
    assert final.only("ENTRYPOINT") == f'["python", "-m", "diptych_{program}"]'
    ports = PORTS.get(program, set(ENGINE_PORTS.values()))
    assert {int(port) for port in final.only("EXPOSE").split()} == ports


@pytest.mark.parametrize("extra", ["operator", "router"])
def test_only_engines_install_torch(extra: str) -> None:
    assert "torch" in requirements("engine")
    assert not {"torch", "libucx-cu13", "numba", "cupy"} & requirements(extra)


def test_an_image_has_the_versions_that_were_tested(image: str) -> None:
    build, _ = stages(IMAGES[image])
    (command,) = (run for run in build.all("RUN") if "pip install '.[" in run)
    assert "--constraint requirements.lock" in command
    assert any("requirements.lock" in files.split() for files in build.all("COPY"))


def test_commands_of_a_shell_are_joined_and_not_given_to_programs(image: str) -> None:
    """A backslash before && makes it an argument of the command before."""
    build, final = stages(IMAGES[image])
    for command in [*build.all("RUN"), *final.all("RUN")]:
        assert "\\&" not in command


def test_the_connector_is_a_folder_without_what_vllm_has_itself() -> None:
    """And without byte code, because vLLM's Python may be another."""
    build, on_top, alone = stages(IMAGES[CONNECTOR])
    *installs, slim = build.all("RUN")
    assert len(installs) == 2
    assert slim == f"python docker/slim.py {CONNECTOR_DIR}"
    for command in installs:
        options = command.partition("pip install ")[2].split()
        assert {"--no-deps", "--no-compile", "--target", CONNECTOR_DIR} <= set(options)
    assert "libucx-cu13 --constraint requirements.lock" in installs[0]
    assert installs[1].endswith(" .")
    assert requirements("vllm") - {"numpy", "pyzmq"} == {"libucx-cu13"}
    for stage in (on_top, alone):
        assert stage.only("COPY") == f"--from=build {CONNECTOR_DIR} {CONNECTOR_DIR}"
    assert on_top.only("ENV") == f"PYTHONPATH={CONNECTOR_DIR}"
    assert on_top.base == "${VLLM_IMAGE} AS vllm"
    assert alone.only("USER") == "10001:10001"


def test_the_cpu_image_takes_the_projects_torch_without_cuda() -> None:
    build, _ = stages(IMAGES["engine"])
    (version,) = (v.split("=")[1] for v in build.all("ARG") if v.startswith("TORCH_VERSION="))
    assert f"torch=={version}" in EXTRAS["engine"]
    first, second = (r for r in build.all("RUN") if "torch" in r or "'.[engine," in r)
    assert "https://download.pytorch.org/whl/cpu" in first
    assert "'.[engine," in second


def test_the_build_sees_the_packages_and_nothing_else() -> None:
    """`.dockerignore` lets in what hatchling needs, and what takes out the needless."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = {line.removeprefix("!").rstrip("/") for line in lines if line.startswith("!")}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    folders = {package.split("/")[0] for package in packages}
    assert allowed == folders | {
        *("pyproject.toml", "requirements.lock", "README.md", "LICENSE", "docker/slim.py")
    }
