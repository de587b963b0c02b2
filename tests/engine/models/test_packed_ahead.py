"""The node's cache of a service's pods: what an init container packs, engines map and cannot write;
and nobody without the service's keys makes a file that they would take."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from model_kit.gguf import save_gguf
from waits import PATIENCE_S

from diptych_engine.execution.runner import ModelRunner
from diptych_engine.models.packed import PackedMatrix
from diptych_engine.models.packed_file import places_for, shared_matrices
from diptych_engine.serving.pack_ahead import pack
from diptych_frontend.core_client.curve import new_keys
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.made_once import NODE_FOLDER
from diptych_kernels.packed_product import is_available
from diptych_protocol import EngineConfig

pytestmark = pytest.mark.skipif(not is_available(), reason="nothing is packed on this processor")
MATRIX = PackedMatrix(torch.arange(2 * 3 * 320, dtype=torch.int32).to(torch.uint8).view(2, 3, 320))
PACK = """
import sys
from diptych_engine.serving.pack_ahead import main
main()
print("torch" in sys.modules)
"""
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && echo mounted && exec cat'


class Node:
    """A node's cache, a service's keys, and a model."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.keys = folder / "models" / ".packed", folder / "keys"
        self.cache.parent.mkdir()
        self.new_keys()
        (folder / "model").mkdir()
        self.model = Path(save_gguf(folder / "model" / "model.gguf"))
        self.config = EngineConfig(model=str(self.model), num_blocks=8)

    def new_keys(self) -> None:
        self.keys.mkdir(exist_ok=True)
        for name, text in msgspec.structs.asdict(new_keys()).items():
            (self.keys / f"curve-{name}").write_text(text)

    @property
    def packed(self) -> list[Path]:
        return list(self.cache.glob("*.packed"))

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Show the cache as pods that serve see it."""
        command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY)
        with subprocess.Popen(
            [*command, str(self.cache.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            if holder.stdout.readline() != b"mounted\n":
                pytest.skip("needs user namespaces")
            seen = Path(f"/proc/{holder.pid}/root{self.cache}")
            with pytest.raises(OSError, match="Read-only"):
                (seen.parent / "x").touch()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(NODE_FOLDER, str(seen))
                yield
            holder.stdin.close()

    def engine(self) -> ModelRunner:
        return ModelRunner(self.config, resolve_model(str(self.model)))


def mappings(file: Path) -> int:
    """How often this process has mapped a file."""
    inode = str(file.stat().st_ino)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == inode for line in lines)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path)
    monkeypatch.setenv(NODE_FOLDER, str(node.cache))
    monkeypatch.setenv("DIPTYCH_KEYS_DIR", str(node.keys))
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))  # the pod's
    return node


def test_engines_map_what_was_packed_ahead_of_them(node: Node) -> None:
    pack(node.config, node.model, node.cache)
    gc.collect()  # what has packed it has mapped it too
    [file] = node.packed
    made = file.stat()
    with node.read_only():
        engines = [node.engine() for _ in range(2)]
    assert mappings(file) == len(engines)
    assert node.packed == [file]
    assert (file.stat().st_ino, made.st_mode & 0o777) == (made.st_ino, 0o600)
    assert not os.listdir(os.environ["XDG_CACHE_HOME"])


def test_that_nothing_is_left_to_pack_is_seen_without_torch(node: Node, tmp_path: Path) -> None:
    pack(node.config, node.model, node.cache)
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(node.config))
    done = subprocess.run(
        [sys.executable, "-c", PACK, "--config", tmp_path / "engine.json", node.model],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("is_damaged", [False, True])
def test_engines_that_find_nothing_good_pack_for_themselves(node: Node, is_damaged: bool) -> None:
    if is_damaged:
        pack(node.config, node.model, node.cache)
        [file] = node.packed
        os.truncate(file, file.stat().st_size - 100)
    with node.read_only():
        engine = node.engine()
    [own] = Path(os.environ["XDG_CACHE_HOME"]).rglob("*.packed")
    assert mappings(own) == 1, engine


def test_a_file_that_was_cut_off_is_packed_again(node: Node) -> None:
    pack(node.config, node.model, node.cache)
    [file] = node.packed
    os.truncate(file, file.stat().st_size - 100)
    pack(node.config, node.model, node.cache)
    gc.collect()
    with node.read_only():
        engine = node.engine()
    assert mappings(file) == 1, engine


def test_without_a_service_s_keys_nobody_makes_a_file_that_its_engines_take(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path, key), own = places_for([node.model], "recipe")
    assert (path.parent, own.key) == (node.cache, b"")
    assert shared_matrices(path, 0, lambda: [("forged", MATRIX)], b"another's")
    assert shared_matrices(path, 0, lambda: [("forged", MATRIX)])
    found = shared_matrices(path, 0, lambda: [("ours", MATRIX)], key)
    assert found is not None
    assert list(found) == ["ours"]
    node.new_keys()
    (of_another, other_key), _ = places_for([node.model], "recipe")
    assert (of_another != path, other_key != key) == (True, True)


def test_what_says_that_files_are_there_goes_when_others_may_have_gone(node: Node) -> None:
    node.cache.mkdir(mode=0o700)
    (node.cache / "of_others.done").touch()
    assert shared_matrices(node.cache / "a.packed", 0, lambda: [("x", MATRIX)])
    assert [path.name for path in node.cache.iterdir()] == ["a.packed"]
