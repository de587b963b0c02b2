"""The workflows of GitHub: pinned, with few rights, and made of steps that run elsewhere as well.

No workflow can run here. So a step is either a verb of `.ci/run`, or it is executed below in a copy
of the repository with an empty environment, or it says what it needs that only a runner has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from cluster_kit.charts import CHART, ROOT, Helm

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(path.name for path in FOLDER.glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
CI_RUN = (ROOT / ".ci" / "run").read_text()
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
OWNER = "SomeBody"
NEEDS_A_RUNNER = re.compile(
    r"\b(docker|kind|kubectl) |^helm (registry|push)|^gh release|mkdocs gh-deploy"
    r"|e2e/kind/(up|smoke)\.sh|^sudo apt-get ",
    re.M,
)
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
STAMP = 'python3 charts/stamp.py --registry "${REGISTRY}"'
STAMP += ' --home "${GITHUB_SERVER_URL}/${GITHUB_REPOSITORY}"'
TIMEOUT_S = 120
WRITES = {
    ("release.yml", "image"): {"packages"},
    ("release.yml", "publish"): {"contents", "packages"},
    ("docs.yml", "site"): {"contents"},
}
"""What a job may write to, by workflow and name."""


def load(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def steps(name: str) -> Iterator[dict[str, Any]]:
    for job in load(name)["jobs"].values():
        yield from job["steps"]


def scripts() -> list[tuple[str, dict[str, Any]]]:
    """(workflow, step) of each distinct text that some step runs."""
    found = {step["run"]: (name, step) for name in FILES for step in steps(name) if "run" in step}
    return list(found.values())


def verb(script: str) -> str | None:
    """The target of a step that is nothing but `make TARGET`."""
    found = re.fullmatch(r"make ([\w-]+)( \w+=\w+)*\n?", script)
    return found[1] if found else None


def runs_anywhere(script: str) -> bool:
    return verb(script) is None and not NEEDS_A_RUNNER.search(script)


def jobs() -> Iterator[tuple[str, str, list[str]]]:
    """(workflow, job, scripts) of each job with scripts that run anywhere."""
    for name in FILES:
        for job, about in load(name)["jobs"].items():
            found = [step["run"] for step in about["steps"] if "run" in step]
            if anywhere := [script for script in found if runs_anywhere(script)]:
                yield name, job, anywhere


JOBS = list(jobs())


@pytest.fixture(params=FILES)
def workflow(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_action_is_pinned_to_a_commit_and_says_its_version(workflow: str) -> None:
    used = re.findall(r"uses: (.*)$", (FOLDER / workflow).read_text(), re.MULTILINE)
    assert used
    for action in used:
        assert PINNED.fullmatch(action), action


def test_an_action_has_one_version_everywhere() -> None:
    texts = "\n".join((FOLDER / name).read_text() for name in FILES)
    used = {line.split("@")[0]: line for line in re.findall(r"uses: (.*)$", texts, re.MULTILINE)}
    assert set(re.findall(r"uses: (.*)$", texts, re.MULTILINE)) == set(used.values())


def test_every_job_ends_in_time_and_may_little(workflow: str) -> None:
    loaded = load(workflow)
    assert loaded["permissions"] == {"contents": "read"}
    for name, job in loaded["jobs"].items():
        writes = {w for w, right in job.get("permissions", {}).items() if right == "write"}
        assert writes == WRITES.get((workflow, name), set())
        assert job["timeout-minutes"] <= 90
        assert "latest" not in job["runs-on"]


def test_what_is_published_was_tried_before() -> None:
    jobs = load("release.yml")["jobs"]
    tried = [step.get("run", "") for step in jobs["chart"]["steps"]]
    build, install = (
        next(i for i, run in enumerate(tried) if run.startswith(f"e2e/kind/{script}.sh"))
        for script in ("up", "smoke")
    )
    assert any(run.startswith("helm package") for run in tried[:build])
    assert build < install
    assert jobs["image"]["needs"] == "chart"
    assert set(jobs["publish"]["needs"]) == {"wheel", "chart", "image"}
    for job in ("wheel", "chart"):
        runs = [step.get("run", "") for step in jobs[job]["steps"]]
        checked, stamped = runs.index(".github/release-version.sh"), runs.index(STAMP)
        made = "make dist" if job == "wheel" else "helm package charts/diptych --destination dist"
        assert checked < stamped < runs.index(made), "of one version, under a name that is ours"


def test_every_script_is_a_verb_of_ci_or_executed_here_or_needs_a_runner() -> None:
    for _, step in scripts():
        if (target := verb(step["run"])) is not None:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
            assert re.search(rf"\bmake .*\b{target}\b", CI_RUN), f".ci/run does not make {target}"
        else:
            assert "make " not in step["run"]


@pytest.mark.parametrize(("workflow", "step"), scripts(), ids=lambda value: "")
def test_no_script_is_put_together_from_expressions(workflow: str, step: dict[str, Any]) -> None:
    """What others may choose, such as a branch's name, comes by the environment and is data."""
    assert "${{" not in step["run"]


class Bare:
    """A machine with a copy of the repository, Python, helm, a Python index without our name, and
    nothing in its environment."""

    def __init__(self, folder: Path, helm: Helm, index: str) -> None:
        self.index = index
        self.root, self.home, self.output = folder / "root", folder / "home", folder / "output"
        programs = folder / "bin"
        programs.mkdir()
        self.home.mkdir()
        (programs / "python3").symlink_to(sys.executable)
        (programs / "helm").symlink_to(helm.path)
        self._path = f"{programs}:/usr/bin:/bin"
        for part in ("charts", "crds", "docker", "examples", ".github", "operator"):
            shutil.copytree(ROOT / part, self.root / part)
        shutil.copy(ROOT / "pyproject.toml", self.root)

    def run(self, script: str, tag: str = f"v{VERSION}") -> subprocess.CompletedProcess[str]:
        """As GitHub runs a step, for a tag that somebody with capitals in the name has pushed."""
        given = {"IMAGE": "diptych-router", "VERSION": VERSION, "REGISTRY": f"ghcr.io/{OWNER}"}
        of_github = {
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_REF_NAME": tag,
            "GITHUB_REPOSITORY": f"{OWNER}/diptych",
            "GITHUB_SERVER_URL": "https://github.com",
            "INDEX": self.index,
        }
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script],
            cwd=self.root,
            env={"PATH": self._path, "HOME": str(self.home)} | given | of_github,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a Python index, and the file in which it would tell about our name."""
    about = tmp_path / "index/pypi/diptych/json"
    about.parent.mkdir(parents=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}", about
        server.shutdown()


@pytest.fixture
def bare(tmp_path: Path, helm: Helm, index: tuple[str, Path]) -> Bare:
    return Bare(tmp_path, helm, index[0])


@pytest.mark.parametrize(("workflow", "job", "scripts"), JOBS, ids=lambda value: str(value)[:20])
def test_the_scripts_of_a_job_run_in_a_bare_environment(
    bare: Bare, workflow: str, job: str, scripts: list[str]
) -> None:
    for script in scripts:
        done = bare.run(script)
        assert done.returncode == 0, f"{script}: {done.stderr}"


def test_the_chart_that_a_release_packages_names_the_images_that_it_pushes(
    bare: Bare, helm: Helm
) -> None:
    (scripts,) = (s for name, job, s in JOBS if (name, job) == ("release.yml", "chart"))
    for script in scripts:
        bare.run(script)
    (packaged,) = (bare.root / "dist").iterdir()
    assert packaged.name == f"diptych-{VERSION}.tgz"
    rendered = helm("template", "diptych", str(packaged)).stdout
    (scripts,) = (s for name, job, s in JOBS if (name, job) == ("release.yml", "image"))
    bare.run(scripts[-1])
    outputs = bare.output.read_text().splitlines()
    pushed = f"ghcr.io/{OWNER.lower()}/diptych-router:{VERSION}"
    assert outputs == [f"version={VERSION}", f"reference={pushed}"]
    assert f"--router-image={pushed}\n" in rendered


def test_a_tag_that_is_not_the_version_is_refused_with_the_remedy(bare: Bare) -> None:
    done = bare.run(".github/release-version.sh", tag="v0.0.7")
    assert done.returncode == 1
    assert f"tag v{VERSION}, or correct the file" in done.stderr


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (f'{{"project_urls": {{"Repository": "https://github.com/{OWNER}/diptych"}}}}', 0),
        ('{"project_urls": {"Repository": "https://github.com/stranger/diptych"}}', 1),
        (f'{{"project_urls": {{"Repository": "https://github.com/{OWNER}/diptych-2"}}}}', 1),
        ('{"project_urls": null}', 1),
    ],
)
def test_a_name_that_a_stranger_has_is_not_published_under(
    bare: Bare, index: tuple[str, Path], told: str, code: int
) -> None:
    index[1].write_text(told)
    done = bare.run(".github/release-version.sh")
    assert done.returncode == code
    assert ("choose another name" in done.stderr) == bool(code)


def test_a_name_of_which_nobody_knows_whose_it_is_is_not_published_under(bare: Bare) -> None:
    bare.index = "http://127.0.0.1:1"
    assert bare.run(".github/release-version.sh").returncode != 0
    assert not bare.output.exists()


@pytest.mark.parametrize("workflow", ["images.yml", "release.yml"])
def test_every_image_is_built_on_a_change_and_on_a_tag(workflow: str) -> None:
    matrix = load(workflow)["jobs"]["image"]["strategy"]["matrix"]
    built = set(matrix.get("name", ())) | {entry["name"] for entry in matrix.get("include", ())}
    assert built == {p.name.removesuffix(".Dockerfile") for p in ROOT.glob("docker/*.Dockerfile")}


def test_published_images_hold_the_examples_model_like_those_that_were_tried() -> None:
    """Its service is the first that anybody applies."""
    tried = (ROOT / "e2e/kind/up.sh").read_text()
    for entry in load("release.yml")["jobs"]["image"]["strategy"]["matrix"]["include"]:
        dockerfile = (ROOT / "docker" / f"{entry['name']}.Dockerfile").read_text()
        if "ARG MODEL_PACKAGES" in dockerfile:
            assert f"MODEL_PACKAGES={entry['models']}" in tried
        else:
            assert "models" not in entry


def test_a_change_of_anything_that_images_hold_builds_them() -> None:
    watched = load("images.yml")[True]["pull_request"]["paths"]  # YAML reads `on` as true
    copied = {
        line.removeprefix("!").rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!") and not line.startswith("!docker/")
    }
    assert {path.removesuffix("/**") for path in watched} >= copied | {"docker", ".dockerignore"}


def test_clusters_are_pinned_by_digest_and_reach_from_the_floor_on() -> None:
    matrix = load("e2e-kind.yml")["jobs"]["e2e"]["strategy"]["matrix"]["include"]
    for entry in matrix:
        version = re.escape(entry["kubernetes"])
        assert re.fullmatch(rf"kindest/node:v{version}\.\d+@sha256:[0-9a-f]{{64}}", entry["node"])
    floor = re.search(r"Kubernetes (1\.\d+) or later", (ROOT / "docs/install.md").read_text())
    assert floor is not None
    assert matrix[0]["kubernetes"] == floor[1]
    assert len(matrix) >= 2
