"""`pip install diptych`, without an extra: its commands say which extras do what."""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import msgspec
import pytest

from diptych.start import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = ("cli", "frontend", "protocol")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the packages of the project and what they always need; no extra."""
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    (site / "diptych.pth").write_text("\n".join(f"{ROOT / own}" for own in OWN))
    known = importlib.metadata.distribution("diptych").locate_file("diptych-0.1.0.dist-info")
    (site / "diptych-0.1.0.dist-info").symlink_to(str(known))
    return folder / "venv/bin/python"


def command(name: str) -> str:
    """The body of a console script, as pip writes it."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    assert script.value == PROJECT["scripts"][name]
    module, _, function = script.value.partition(":")
    return f"import sys; from {module} import {function}; sys.exit({function}())"


@pytest.mark.parametrize("name", sorted(PROJECT["scripts"]))
def test_without_an_extra_a_command_says_which_extras_do_what(base: Path, name: str) -> None:
    done = subprocess.run(
        [base, "-c", command(name), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"  uv pip install --python {base} " in done.stderr, "this environment has no pip"
    for extra in ("cli", "engine", "router"):
        for requirement in PROJECT["optional-dependencies"][extra]:
            assert requirement.partition("==")[0].partition("[")[0].replace("_", "-") in done.stderr
    for extra, what in EXTRAS.items():
        assert f"  {extra} " in done.stderr
        assert what in done.stderr


@pytest.mark.parametrize("name", sorted(PROJECT["scripts"]))
def test_with_the_extra_a_command_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", command(name), "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat", "--model", "m", "--once", b"\xff"], "no valid text"),
        (["chat", "--api-key", "\u00e9", "--model", "m", "--once", "x"], "no valid text"),
        (["render", "smollm2:135m"], "No space"),
        (["--help"], "No space"),
    ],
)
def test_what_no_command_can_read_or_write_is_said_in_one_line(
    small_server: str, arguments: list[str | bytes], says: str
) -> None:
    program = [sys.executable, "-c", command("diptych"), *arguments]
    if arguments[0] == "chat":
        program += ["--url", f"{small_server}/v1"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert says in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_a_chat_whose_input_is_closed_ends() -> None:
    program = f"exec 0<&-; exec {shlex.quote(sys.executable)} -c {shlex.quote(command('diptych'))}"
    done = subprocess.run(
        ["sh", "-c", f"{program} chat --url http://127.0.0.1:1 --model m"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "", "")


def test_every_extra_is_explained() -> None:
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys()


def test_who_has_no_home_is_told_to_name_one() -> None:
    """Such as a user of a container whom its system does not know."""
    unknown = "import os, pwd; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__"
    program = [sys.executable, "-c", f"{unknown}; {command('diptych')}", "models"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Set HOME to a folder" in done.stderr
    assert "Traceback" not in done.stderr


LOOK = """
import os, sys
from pathlib import Path
from diptych.start import diptych
told = Path(sys.argv.pop())
try:
    diptych()
finally:
    told.write_text(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""


def test_no_socket_has_the_place_of_a_stream_that_was_closed(tmp_path: Path) -> None:
    """A process of a nursery would take it for its own output."""
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"]
    told = tmp_path / "told"
    program = [sys.executable, "-c", LOOK, "--version", str(told)]
    subprocess.run([*closed, *program], check=True)
    assert told.read_text().split() == ["/dev/null"] * 3
