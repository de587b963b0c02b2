"""Our header reader against the `gguf` package's writer and reader, and against damaged files."""

from __future__ import annotations

import contextlib
import itertools
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_frontend.model_files.gguf_header import (
    NO_WEIGHTS,
    GGUFError,
    RawTensor,
    read_floats,
    read_header,
)
from diptych_frontend.model_files.model_source import ModelSource

MATRIX = np.arange(64 * 3, dtype=np.float32).reshape(3, 64)
QUANTIZED = gguf.quants.quantize(MATRIX, gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("text", "naïve 😀")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1 / 3)
    writer.add_bool("yes", True)
    writer.add_array("strings", ["", "a", "ü"])
    writer.add_array("ints", [3, -1, 2])
    writer.add_array("floats", [0.25, 4.0])
    writer.add_tensor("plain", MATRIX)
    writer.add_tensor("half", MATRIX.astype(np.float16))
    writer.add_tensor("quantized", QUANTIZED, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", np.ones(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensor_table_agree_with_the_gguf_package(small_file: Path) -> None:
    header = read_header(small_file)
    reference = gguf.GGUFReader(small_file)
    fields: dict[str, Any] = {
        name: field.contents()
        for name, field in reference.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.metadata == fields
    table = header.tensors()
    assert list(table) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = table[tensor.name]
        assert ours.type == tensor.tensor_type
        assert ours.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)


def test_the_table_leads_to_the_weights(small_file: Path) -> None:
    tensor = read_header(small_file).tensors()["quantized"]
    raw = np.memmap(small_file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    rows = gguf.quants.dequantize(raw.reshape(tensor.shape[0], -1), tensor.type)
    assert rows.shape == tensor.shape
    np.testing.assert_allclose(rows, MATRIX, atol=1.0)


def test_the_real_models_tensors_fill_the_file_without_overlap(model_source: ModelSource) -> None:
    assert model_source.path is not None
    tensors = sorted(model_source.tensors().values(), key=lambda t: t.offset)
    assert len(tensors) == 272
    for before, after in itertools.pairwise(tensors):
        assert 0 <= after.offset - (before.offset + before.nbytes) < 32
    end = tensors[-1].offset + tensors[-1].nbytes
    assert 0 <= model_source.path.stat().st_size - end < 32
    assert model_source.tensors()["token_embd.weight"].shape == (49152, 576)


def with_array(kind: int, count: int) -> bytes:
    """A file whose only value is an array, as far as the array's length."""
    head = b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1) + b"k"
    return head + struct.pack("<IIQ", 9, kind, count)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not start"),
        (b"GGML" + bytes(40), "does not start"),
        (b"GGUF\x63\0\0\0" + bytes(16), "version 99"),
        (b"GGUF\x03\0\0\0", "ends inside"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "more than"),
        (with_array(8, 2**60), "more than"),
        (with_array(0, 2**63), "more than"),
        (with_array(0, 9 << 20) + bytes(9 << 20), "more than"),
        (with_array(9, 1) + b"\x09\0\0\0" * 2000, "unknown array element type 9"),
        (with_array(8, 2) + (2**63).to_bytes(8, "little"), "ends inside"),
    ],
)
def test_a_file_that_is_not_gguf_is_named_as_such(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=says):
        read_header(path)


def test_a_truncated_file_is_noticed_before_its_weights_are_read(
    small_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file.read_bytes()[:-200])
    size = path.stat().st_size
    with pytest.raises(GGUFError, match=rf"tensor quantized .* byte \d+ of {size}: .* truncated"):
        read_header(path).tensors()


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_each_type_is_read_or_refused_by_its_name(
    small_file: Path, kind: gguf.GGMLQuantizationType
) -> None:
    """Before anything is read, with what would work."""
    columns, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    header = replace(read_header(small_file), raw_tensors=[RawTensor("x", kind, (1, columns), 0)])
    if kind.name in NO_WEIGHTS:
        with pytest.raises(GGUFError, match=rf"tensor x has the type {kind.name}, .*Q4_K_M"):
            header.tensors()
    else:
        assert header.tensors()["x"].nbytes == num_bytes
        assert gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind).size == columns


def test_a_type_that_nobody_knows_is_refused_by_its_number(small_file: Path) -> None:
    header = replace(read_header(small_file), raw_tensors=[RawTensor("x", 4711, (1, 32), 0)])
    with pytest.raises(GGUFError, match="tensor x has the type 4711"):
        header.tensors()


def test_tensors_that_overlap_are_named_with_their_bytes(small_file: Path) -> None:
    rows = [RawTensor("a", 0, (8,), 64), RawTensor("b", 0, (8,), 92)]
    header = replace(read_header(small_file), raw_tensors=rows)
    with pytest.raises(GGUFError, match=r"tensor b begins at byte 92, inside a, .* at byte 96"):
        header.tensors()


@pytest.mark.parametrize("offset", [2**63, 2**64, 2**40])
def test_a_vector_beyond_the_file_is_noticed(small_file: Path, offset: int) -> None:
    """As a damaged offset or alignment makes it."""
    with pytest.raises(GGUFError, match="vector ends after the file does"):
        read_floats(small_file, RawTensor("vector", 0, (5,), offset))


@settings(max_examples=200)
@given(data=st.data())
def test_damage_gives_a_clear_error_or_other_values_but_nothing_else(
    small_file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 900))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.integers(4, len(content)))])
    with contextlib.suppress(GGUFError):
        read_header(path).tensors()
