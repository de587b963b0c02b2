"""What docker/*.Dockerfile say is built, and runs as in a pod: as nobody, and on files that nobody
can write to. So is what docker/slim.py took out of them not missed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from browser_kit import served
from cluster_kit.charts import ROOT
from e2e.dockerfiles import MISSING, Buildah, enter
from e2e.images import build_arguments
from free_ports import free_port
from waits import PATIENCE_S, wait_until

from diptych_operator.api.names import CONNECTOR_DIR

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}, and root"),
]
MAX_MIB = {"operator": 80, "router": 200, "engine": 900, "vllm": 40}
"""What an image may weigh over its base, without the example's model."""
MODELS = Path("opt/diptych/models")
EXAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "examples/smollm2.yaml").read_text())


class Image:
    def __init__(self, buildah: Buildah, name: str) -> None:
        reference = f"diptych-tried-{name}"
        buildah.build(name, reference, *build_arguments(name))
        config = buildah.config(reference)
        self.user = config["User"]
        self.environment: list[str] = config["Env"]
        self.program: list[str] = config["Entrypoint"]
        self.root = buildah.files(reference)

    def run(self, *command: str, variables: tuple[str, ...] = ()) -> str:
        done = subprocess.run(
            [*enter(self.root, [*self.environment, *variables]), *command],
            capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def mebibytes(self) -> float:
        return (_bytes(self.root / "opt") - _bytes(self.root / MODELS)) / 2**20


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def images() -> Iterator[dict[str, Image]]:
    buildah = Buildah(ROOT / "build/images/buildah")
    try:
        yield {name: Image(buildah, name) for name in MAX_MIB}
    finally:
        buildah.remove_containers()


@pytest.mark.parametrize("name", MAX_MIB)
def test_an_image_weighs_little_over_its_base(images: dict[str, Image], name: str) -> None:
    weight = images[name].mebibytes()
    print(f"{name}: {weight:.0f} MiB over the base")
    assert weight < MAX_MIB[name]


@pytest.mark.parametrize("name", ["operator", "router", "engine"])
def test_a_program_finds_all_that_it_imports_as_nobody(images: dict[str, Image], name: str) -> None:
    image = images[name]
    assert image.user == "10001:10001"
    assert "usage: " in image.run(*image.program, "--help")
    told = image.run("python", "-c", "import os; print(os.getuid(), os.access('/', os.W_OK))")
    assert told.split() == ["10001", "False"]


def test_the_connector_is_copied_and_brings_ucx(images: dict[str, Image]) -> None:
    image = images["vllm"]
    load = "import libucx; libucx.load_library()"
    copied = f"{image.program[0]} --recursive --no-target-directory {CONNECTOR_DIR} /tmp/there"
    image.run("sh", "-euc", f"{copied}; PYTHONPATH=/tmp/there python -c '{load}'")


def test_pods_of_the_images_answer_and_hand_over(images: dict[str, Image], tmp_path: Path) -> None:
    """Pods look for their `python` on a path that leads into an image."""
    shared = tmp_path / "run"
    shared.mkdir()
    spec: dict[str, Any] = {"model": {"uri": EXAMPLE["spec"]["model"]["uri"]}}
    for part, name in (("prefill", "engine"), ("decode", "engine"), ("router", "router")):
        program = tmp_path / part / "python"
        program.parent.mkdir()
        entered = enter(images[name].root, images[name].environment, shared=shared)
        program.write_text(f'#!/bin/sh\nexec {shlex.join([*entered, "python"])} "$@"\n')
        program.chmod(0o755)
        # What begins with /tmp is a pod's own, and left out.
        path = {"name": "PATH", "value": f"/usr/sbin:{program.parent}:/usr/bin:/sbin:/bin"}
        containers = [{"name": name, "env": [path]}]
        spec[part] = {"replicas": 1, "podTemplate": {"spec": {"containers": containers}}}
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(EXAMPLE | {"spec": spec}))
    # By its name: what is started as a module, tests fork from a process of their own.
    program = Path(sys.executable).with_name("diptych")
    up = [str(program), "up", str(tmp_path / "service.yaml")]
    with served(up, shared, free_port()) as running:
        question = {"role": "user", "content": "What is the capital of France?"}
        asked = {"model": "smollm2", "messages": [question], "max_tokens": 8, "temperature": 0}
        url = f"{running.url}/v1/chat/completions"
        reply = httpx.post(url, json=asked, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        (decode,) = (pod for pod in running.state()["pods"] if pod["role"] == "decode")
        metrics = f"http://127.0.0.1:{decode['ports']['http']}/metrics"
        moved = re.compile(r"^diptych:kv_transfer_blocks_received_total.* [1-9]", re.MULTILINE)
        wait_until(lambda: moved.search(httpx.get(metrics, timeout=PATIENCE_S).text))
