"""The keys that engines of one service may have, while a Secret is exchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych_frontend.core_client.curve import new_keys, read_key_ring, read_keys
from diptych_protocol import CurveKeys, InvalidRequestError


def write(folder: Path, keys: CurveKeys, prefix: str = "") -> None:
    (folder / f"{prefix}curve-public").write_text(f"{keys.public}\n")
    (folder / f"{prefix}curve-secret").write_text(keys.secret)


def test_the_current_pair_comes_first_and_the_previous_one_while_it_is_there(
    tmp_path: Path,
) -> None:
    old, new = new_keys(), new_keys()
    write(tmp_path, old)
    assert read_key_ring(tmp_path) == [old]
    write(tmp_path, new)
    write(tmp_path, old, "previous-")
    assert read_key_ring(tmp_path) == [new, old]
    assert read_keys(tmp_path) == new


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40])
@pytest.mark.parametrize("name", ["curve-public", "curve-secret", "previous-curve-secret"])
def test_what_is_no_key_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, new_keys())
    write(tmp_path, new_keys(), "previous-")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequestError):
        read_key_ring(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="curve-public"):
        read_key_ring(tmp_path)
