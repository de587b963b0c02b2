"""The workflows of GitHub: pinned, with few rights, and calling verbs that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart_kit import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(path.name for path in FOLDER.glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def load(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def steps(name: str) -> Iterator[dict[str, Any]]:
    for job in load(name)["jobs"].values():
        yield from job["steps"]


@pytest.fixture(params=FILES)
def workflow(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_action_is_pinned_to_a_version(workflow: str) -> None:
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+(\.\d+)*", step["uses"]), step["uses"]


def test_every_job_ends_in_time_and_may_little(workflow: str) -> None:
    loaded = load(workflow)
    writes = {what for what, right in loaded["permissions"].items() if right == "write"}
    assert writes == ({"packages"} if workflow == "images.yml" else set())
    for job in loaded["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert "latest" not in job["runs-on"]


def test_every_make_target_exists(workflow: str) -> None:
    for step in steps(workflow):
        for target in re.findall(r"^\s*make (\S+)", step.get("run", ""), re.MULTILINE):
            name = target.replace(".venv", "$(VENV)")
            assert re.search(rf"^{re.escape(name)}:", MAKEFILE, re.MULTILINE), target


def test_a_tag_pushes_every_image() -> None:
    matrix = load("images.yml")["jobs"]["image"]["strategy"]["matrix"]["include"]
    built = {entry["name"] for entry in matrix}
    assert built == {p.name.removesuffix(".Dockerfile") for p in ROOT.glob("docker/*.Dockerfile")}


def test_clusters_are_pinned_by_digest() -> None:
    matrix = load("e2e-kind.yml")["jobs"]["e2e"]["strategy"]["matrix"]["include"]
    assert len(matrix) >= 2
    for entry in matrix:
        version = re.escape(entry["kubernetes"])
        assert re.fullmatch(rf"kindest/node:v{version}\.\d+@sha256:[0-9a-f]{{64}}", entry["node"])
