"""Packed matrices in a file that engines share: packed once, and never used when in doubt."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from model_kit.gguf import quantised, save_gguf

from diptych_engine.models import CausalLM, build_model, load_weights, packed_file
from diptych_engine.models.packed import PackedMatrix
from diptych_engine.models.packed_file import kind_of_file_system, shared_matrices
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.made_once import whole
from diptych_kernels.packed_product import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="nothing is packed on this processor")
MATRIX = PackedMatrix(torch.arange(2 * 3 * 320, dtype=torch.int32).to(torch.uint8).view(2, 3, 320))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "diptych" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_gguf(tmp_path / "model.gguf")


def loaded(model: str) -> CausalLM:
    source = resolve_model(model)
    own = build_model(source.config, 16, torch.float32, torch.device("cpu"))
    load_weights(own.slots, source, packables=own.packables)
    return own


def assert_as_in_the_file(own: CausalLM, model: str) -> None:
    source = resolve_model(model)
    plain = build_model(source.config, 16, torch.float32, torch.device("cpu"))
    load_weights(plain.slots, source)
    expected = dict(plain.named_parameters())
    for name, tensor in own.named_parameters():
        assert torch.equal(tensor, expected[name]), name


def is_mapped(own: CausalLM) -> bool:
    [packed, *_] = [p.linear.packed for p in own.packables if p.linear.packed]
    return not packed.tiles.untyped_storage().resizable()


def test_the_second_engine_maps_what_the_first_one_has_packed(folder: Path, model: str) -> None:
    first = loaded(model)
    [path] = folder.iterdir()
    made = path.stat()
    second = loaded(model)
    assert [x.stat().st_ino for x in folder.iterdir()] == [made.st_ino]
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    for own in (first, second):
        assert is_mapped(own)
        assert_as_in_the_file(own, model)
    path.unlink()  # whoever has mapped it keeps it
    assert_as_in_the_file(second, model)


def test_a_file_is_of_the_sizes_of_levels_that_are_allowed(folder: Path, model: str) -> None:
    first = loaded(model)
    others = [replace(packable, least_bits=8) for packable in first.packables]
    load_weights(first.slots, resolve_model(model), packables=others)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("place", [0.0, 0.5, 0.98, 1.0])
def test_a_damaged_file_is_made_anew(folder: Path, model: str, place: float) -> None:
    """In the first matrix, another, the index, and its length."""
    loaded(model)
    [path] = folder.iterdir()
    whole = bytearray(path.read_bytes())
    whole[min(int(place * len(whole)), len(whole) - 1)] ^= 1
    path.write_bytes(whole)
    own = loaded(model)
    assert_as_in_the_file(own, model)
    assert is_mapped(own)
    assert path.read_bytes() != whole


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_part_of_a_file_is_made_whole(folder: Path, model: str, kept: float) -> None:
    loaded(model)
    [path] = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert_as_in_the_file(loaded(model), model)
    assert path.read_bytes() == whole


def test_a_file_of_another_name_is_not_taken(folder: Path, model: str) -> None:
    """As somebody might link it there who may write to the folder."""
    path, other = (folder / f"{name}.packed" for name in "ab")
    assert shared_matrices(path, 0, lambda: [("x", MATRIX)])
    other.hardlink_to(path)
    found = shared_matrices(other, 0, lambda: [("y", MATRIX)])
    assert found is not None
    assert list(found) == ["y"]


def test_a_file_that_others_may_have_written_is_made_anew(folder: Path, model: str) -> None:
    loaded(model)
    [path] = folder.iterdir()

    def link() -> None:
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")

    def give_away() -> None:
        os.chown(path, os.geteuid() + 1, -1)

    ways = [lambda: path.chmod(0o620), lambda: path.chmod(0o602), link]
    for spoil in [*ways, give_away] if os.geteuid() == 0 else ways:
        spoil()
        before = path.lstat().st_ino
        own = loaded(model)
        assert path.lstat().st_ino != before
        assert is_mapped(own)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_nothing_is_kept_where_others_may_write(folder: Path, model: str, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    own = loaded(model)
    assert_as_in_the_file(own, model)
    assert not is_mapped(own)
    assert not list(folder.iterdir())


def test_without_a_place_for_files_an_engine_packs_for_itself(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        own = loaded(model)
        assert_as_in_the_file(own, model)
        assert not is_mapped(own)


MOUNTED = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:25 / /cache\\040files rw shared:1 master:2 - nfs4 server:/a/-/b rw,vers=4.2
"""


@pytest.mark.parametrize(("device", "kind"), [((254, 0), "ext4"), ((0, 25), "nfs4"), ((0, 2), "")])
def test_the_kernel_names_the_file_system(device: tuple[int, int], kind: str) -> None:
    assert kind_of_file_system(MOUNTED, os.makedev(*device)) == kind


def test_nothing_is_kept_where_another_machine_may_remove_it(
    folder: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mounted = f"9 1 {os.major(device)}:{os.minor(device)} / / rw - nfs4 server:/ rw"
    (tmp_path / "mountinfo").write_text(mounted)
    monkeypatch.setattr(packed_file, "MOUNTS", tmp_path / "mountinfo")
    own = loaded(model)
    assert_as_in_the_file(own, model)
    assert not is_mapped(own)
    assert not list(folder.iterdir())


def test_a_full_disk_keeps_nothing(folder: Path) -> None:
    def make() -> Iterator[tuple[str, PackedMatrix]]:
        yield "x", MATRIX
        raise OSError(28, "No space left on device")

    assert shared_matrices(folder / "a.packed", 1 << 60, make) is None
    assert shared_matrices(folder / "a.packed", 0, make) is None
    assert not list(folder.iterdir())


def test_of_engines_that_start_at_once_one_packs(folder: Path) -> None:
    packed = []

    def make() -> Iterator[tuple[str, PackedMatrix]]:
        packed.append(1)
        yield "x", MATRIX

    def load() -> None:
        found.append(shared_matrices(folder / "a.packed", 0, make))

    found: list[packed_file.Matrices | None] = []
    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packed) == 1
    assert len(found) == 6
    assert all(own and torch.equal(own["x"].tiles, MATRIX.tiles) for own in found)


def test_only_the_files_that_were_used_last_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "KEPT_FILES", 2)
    for number, name in enumerate("abacd"):
        shared_matrices(folder / name, 0, lambda: [("x", MATRIX)])
        os.utime(folder / name, (number, number))
        kept = {"abacd"[number], *"abacd"[max(0, number - 1) : number]}
        assert {path.name for path in folder.iterdir()} == kept
    monkeypatch.setattr(packed_file, "KEPT_BYTES", 1)
    shared_matrices(folder / "e", 0, lambda: [("x", MATRIX)])
    assert [path.name for path in folder.iterdir()] == ["e"]


def test_what_engines_use_is_kept_beyond_the_limits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two models that exceed them together would be packed at every start."""
    monkeypatch.setattr(packed_file, "KEPT_BYTES", 1)
    used = [shared_matrices(folder / name, 0, lambda: [("x", MATRIX)]) for name in "ab"]
    assert {path.name for path in folder.iterdir()} == {"a", "b"}
    del used[0]
    shared_matrices(folder / "c", 0, lambda: [("x", MATRIX)])
    assert {path.name for path in folder.iterdir()} == {"b", "c"}


KILLED = """
import os, signal, sys
from pathlib import Path
from diptych_kernels.made_once import whole
with whole(Path(sys.argv[1]), 0o600) as file:
    file.write(bytes(10))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_leaves_is_removed_before_space_is_wanted(folder: Path) -> None:
    for name in "aab":
        subprocess.run([sys.executable, "-c", KILLED, str(folder / name)], check=False)
    assert len(list(folder.iterdir())) == 2, "one of each"
    folder.chmod(0o700)
    assert shared_matrices(folder / "c", 1 << 60, list) is None
    assert not list(folder.iterdir())


def test_what_another_engine_writes_is_not_taken_from_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "KEPT_BYTES", 1)
    folder.mkdir(mode=0o700, parents=True)
    with whole(folder / "a", 0o600) as first, whole(folder / "a", 0o600) as second:
        assert shared_matrices(folder / "b", 0, lambda: [("x", MATRIX)])
        first.write(b"1")
        second.write(b"2")
    assert (folder / "a").read_bytes() == b"1", "whoever was last"
    assert {path.name for path in folder.iterdir()} == {"a", "b"}


def test_another_file_of_the_same_name_has_another_packed_one(folder: Path, tmp_path: Path) -> None:
    """Even with the same size and time of its last change, as copies may have."""
    path = tmp_path / "model.gguf"
    save_gguf(path)
    loaded(str(path))
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # of the last tensor
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    own = loaded(str(path))
    assert_as_in_the_file(own, str(path))
    assert len(list(folder.iterdir())) == 2


def test_what_cannot_be_packed_is_read_from_the_model(folder: Path, tmp_path: Path) -> None:
    def kind_of(name: str) -> Kind:
        return Kind.F32 if "v_proj" in name or "down_proj" in name else quantised(name)

    model = save_gguf(tmp_path / "model.gguf", kind_of)
    for _ in range(2):
        own = loaded(model)
        assert is_mapped(own)
        assert sum(p.linear.packed is None for p in own.packables) == 2 * 2
        assert_as_in_the_file(own, model)
