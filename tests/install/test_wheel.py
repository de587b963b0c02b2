"""The wheel alone, in an environment of its own and far from the clone, is the whole program."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import pytest
from free_ports import free_port
from waits import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
COMPILED = "diptych_kernels/native/__pycache__/*.o"
"""Here are kernels that the same sources make, so that they are not compiled again."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Installed(NamedTuple):
    folder: Path
    environment: dict[str, str]

    def command(self, name: str = "diptych") -> str:
        return str(self.folder / "venv/bin" / name)

    def run(self, *arguments: str, name: str = "diptych") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.command(name), *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes."""
    folder = tmp_path_factory.mktemp("dist")
    (recipe,) = re.findall(r"\$\(BIN\)/uv build (.*) --out-dir dist$", makefile(), re.M)
    options = recipe.replace("$(BIN)", str(BIN)).split()
    subprocess.run([BIN / "uv", "build", *options, "--out-dir", folder], cwd=ROOT, check=True)
    return folder


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A virtual environment with pip, and the wheel. What others publish comes from the packages
    of the tests, whose own clone is not among them: torch alone is 200 MB to fetch."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=True)
    (wheel,) = dist.glob("*.whl")
    python = folder / "venv/bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, cwd=folder)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    others = Path(pytest.__file__).parents[1]
    (site / "others.pth").write_text(f"{others}\n")
    for kernel in (ROOT / "kernels").glob(COMPILED):
        shutil.copy(kernel, site / kernel.relative_to(ROOT / "kernels"))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP"))
    }
    environment |= {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), "NO_COLOR": "1"}
    return Installed(folder, environment)


def test_nothing_comes_from_the_clone(installed: Installed) -> None:
    own = "import diptych, diptych_engine, diptych_router, sys; print(diptych.__file__, *sys.path)"
    done = installed.run("-c", own, name="python")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed.folder))
    assert not re.search(rf"{re.escape(str(ROOT))}/(?!\.venv)", done.stdout)


def test_the_wheel_and_the_sdist_have_what_the_program_names(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    listed = subprocess.run(
        ["git", "ls-files", "docs/*.md", "examples", "charts/diptych", "*/static/*"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read("diptych-0.1.0.dist-info/METADATA").decode()
    for name in listed:
        own = name.partition("/")[2] if "/static/" in name else f"diptych/files/{name}"
        assert own in names
    assert "Name: diptych\n" in metadata
    with tarfile.open(sdist) as archive:
        assert f"{sdist.name.removesuffix('.tar.gz')}/pyproject.toml" in archive.getnames()


def test_doctor_finds_all_that_is_needed(installed: Installed) -> None:
    done = installed.run("doctor", "--json")
    checks = {check["name"]: check for check in msgspec.json.decode(done.stdout)}
    assert checks["packages"]["state"] == "ok", checks["packages"]
    assert done.returncode == 0, done.stdout


def test_examples_and_pages_are_found_from_anywhere(installed: Installed) -> None:
    assert "kind: Deployment" in installed.run("render", "examples/smollm2.yaml").stdout
    (docs,) = re.findall(r"docs/\.\.\. are in\s+(\S+)$", installed.run("--help").stdout, re.M)
    assert Path(docs, "routing.md").exists()
    assert docs.startswith(str(installed.folder))


def test_up_answers_and_bench_draws(installed: Installed) -> None:
    port = free_port()
    log = installed.folder / "up.log"
    with log.open("w") as output:
        up = subprocess.Popen(
            [installed.command(), "up", "smollm2:135m", "--plain", "--port", str(port)],
            cwd=installed.folder, env=installed.environment, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_until(lambda: "Ctrl-C ends it" in log.read_text() or up.poll() is not None)
        assert up.poll() is None, log.read_text()
        page = httpx.get(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S)
        assert page.status_code == 200
        said = installed.run(
            "chat", "--once", "What is the capital of France?",
            "--temperature", "0", "--max-tokens", "8",
        )  # fmt: skip
        assert "Paris" in said.stdout, said.stderr
        picture = installed.folder / "run.svg"
        drawn = installed.run("bench", "-n", "2", "--output-tokens", "4", "--svg", str(picture))
        assert drawn.returncode == 0, drawn.stderr
        assert picture.read_text().startswith("<?xml")
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(PATIENCE_S)


def test_without_an_extra_the_advice_can_be_followed(installed: Installed, dist: Path) -> None:
    """Its `pip` would fetch what is missing; here it finds all that is named, and needs nothing."""
    bare = installed.folder / "bare"
    venv.create(bare, with_pip=True)
    (wheel,) = dist.glob("*.whl")
    python = str(bare / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    (site,) = bare.glob("lib/python*/site-packages")
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    done = subprocess.run([bare / "bin/diptych"], capture_output=True, text=True)
    (command,) = [line.split() for line in done.stderr.splitlines() if " -m pip " in line]
    assert command[:4] == [python, "-m", "pip", "install"]
    (site / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    quoted = [word.strip("'") for word in command]
    tried = subprocess.run(
        [*quoted, "--dry-run", "--no-index", "--no-deps"], capture_output=True, text=True
    )
    assert tried.returncode == 0, tried.stderr
    assert "Would install" not in tried.stdout
