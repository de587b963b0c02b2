"""What `make demo` and `make test` begin with: where it runs, where it fetches, what it says."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import install
import pytest
from cases import each

SOON_S = 0.2


@contextmanager
def index_of_wheels(folder: Path) -> Iterator[str]:
    """A server that has a page for torch, and nothing else."""
    (folder / "torch").mkdir()
    (folder / "torch/index.html").write_text("<a href='torch-2.13.0+cpu.whl'>torch</a>")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def index_that_never_answers() -> Iterator[str]:
    """It takes connections, and that is all it does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@each("machine", ["x86_64", "aarch64"])
@each("minor", [11, 12, 13, 14])
def test_every_python_that_is_promised_will_do(machine: str, minor: int) -> None:
    assert install.refusal("Linux", machine, (3, minor), "glibc") == ""


@each(
    ("system", "machine", "version", "remedy"),
    [
        ("Darwin", "arm64", (3, 13), "docker run"),
        ("Darwin", "arm64", (3, 9), "docker run"),
        ("Windows", "AMD64", (3, 13), "WSL2"),
        ("Linux", "armv7l", (3, 13), "x86_64 or aarch64"),
        ("FreeBSD", "x86_64", (3, 13), "Linux"),
        ("Linux", "x86_64", (2, 7), "PYTHON=python3"),
        ("Linux", "x86_64", (3, 10), "PYTHON=python3"),
        ("Linux", "x86_64", (3, 15), "PYTHON=python3"),
    ],
)
def test_elsewhere_one_sentence_says_what_to_do(
    system: str, machine: str, version: tuple[int, int], remedy: str
) -> None:
    sentence = install.refusal(system, machine, version, "glibc")
    assert remedy in sentence
    assert "\n" not in sentence


def test_a_linux_without_glibc_is_told_so() -> None:
    assert "glibc" in install.refusal("Linux", "x86_64", (3, 13), "")


def test_an_environment_whose_making_was_interrupted_is_made_again(tmp_path: Path) -> None:
    """It has a Python, and no pip yet."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = install.make_environment(venv)
    subprocess.run([str(python), "-c", "import pip"], check=True)


def test_a_folder_that_was_there_before_outlives_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(SystemExit, match="-venv"):
        install.make_environment(tmp_path)
    assert kept.read_text() == "mine"


def test_a_python_that_is_too_old_can_read_the_sentence() -> None:
    """Its parser, and all that runs when the file is loaded: quoted annotations are left alone."""
    tree = ast.parse(Path(install.__file__).read_text(), feature_version=(3, 6))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            annotations = [node.returns, *(argument.annotation for argument in node.args.args)]
            assert not any(isinstance(a, ast.Subscript | ast.BinOp) for a in annotations)
        assert not isinstance(node, ast.ImportFrom) or node.module != "__future__"


@pytest.mark.parametrize(
    "sign", ["dev/nvidia0", "proc/driver/nvidia/version", "usr/lib/wsl/lib/nvidia-smi"]
)
def test_a_gpu_is_known_by_its_driver(tmp_path: Path, sign: str) -> None:
    assert not install.has_nvidia_gpu(tmp_path, "")
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    assert install.has_nvidia_gpu(tmp_path, "")


def test_a_gpu_is_known_by_its_tool(tmp_path: Path) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    assert install.has_nvidia_gpu(tmp_path, str(tool.parent))


def test_without_a_gpu_torch_comes_from_the_index_of_cpu_wheels(tmp_path: Path) -> None:
    with index_of_wheels(tmp_path) as url:
        assert install.torch_index(False, url, install.PROBE_S) == url


def test_with_a_gpu_torch_comes_from_where_pip_looks(tmp_path: Path) -> None:
    with index_of_wheels(tmp_path) as url:
        assert install.torch_index(True, url, install.PROBE_S) == ""


def test_an_index_that_never_answers_is_given_up() -> None:
    with index_that_never_answers() as url:
        assert install.torch_index(False, url, SOON_S) == ""


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid", "not a url"])
def test_an_index_that_is_not_there_is_given_up(url: str) -> None:
    assert install.torch_index(False, url, SOON_S) == ""


def test_an_index_without_torch_is_given_up(tmp_path: Path) -> None:
    with index_of_wheels(tmp_path) as url:
        assert install.torch_index(False, url + "/elsewhere", install.PROBE_S) == ""


@pytest.mark.parametrize("what", ["demo", "test"])
def test_it_says_from_where_it_fetches_and_how_much(what: str) -> None:
    small = install.announcement(what, False, install.CPU_INDEX)
    assert install.CPU_INDEX in small
    assert f"{install.CPU_TORCH_MEGABYTES} MB" in small
    assert f"{install.MEGABYTES[what]} MB" in small
    for gpu, why in ((True, "NVIDIA GPU"), (False, "cannot be used")):
        large = install.announcement(what, gpu, "")
        assert why in large
        assert f"{install.CUDA_TORCH_MEGABYTES} MB" in large


def test_the_version_that_is_pinned_is_found() -> None:
    assert install.pinned("uv", 'test = ["uvicorn==0.54.0", "uv==0.13.9"]') == "uv==0.13.9"
    with pytest.raises(ValueError, match="torch"):
        install.pinned("torch", "torchvision==1.0")


def test_an_environment_with_torch_is_asked_for_its_version() -> None:
    lock = (install.ROOT / install.LOCK).read_text()
    assert install.has_torch(Path(sys.executable), install.pinned("torch", lock))
    assert not install.has_torch(Path(sys.executable), "torch==1.0.0")


def test_help_names_what_can_be_installed() -> None:
    done = subprocess.run(
        [sys.executable, install.__file__, "--help"], capture_output=True, text=True, check=True
    )
    assert all(what in done.stdout for what in ("demo", "test", "lock"))
