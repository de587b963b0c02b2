"""Arrays on the wire: nothing is copied, and nothing malformed gets through."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_protocol import (
    Array,
    EngineCoreRequest,
    PoolingParams,
    UtilityCall,
    WeightTransferUpdateRequest,
    wire,
)
from diptych_protocol.arrays import ITEM_BYTES


def request(embeddings: Array | None) -> EngineCoreRequest:
    pooling = PoolingParams()
    return EngineCoreRequest("r", [0], None, None, pooling, None, 0.0, None, None, None, embeddings)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=300))
def test_numbers_survive(numbers: list[float]) -> None:
    sent = Array("float32", (len(numbers),), array("f", numbers).tobytes())
    received = wire.request_decoder.decode(wire.encoder.encode(request(sent))).prompt_embeds
    assert received == sent
    assert received is not None
    assert received.tolist() == numbers


def test_contract_M03_a_large_array_is_not_copied() -> None:
    memory = bytearray(4096)
    sent = Array("uint8", (64, 64), memory)
    _, frame = wire.encoder.encode(request(sent))
    memory[7] = 9
    assert memoryview(frame)[7] == 9, "the frame is the array's own memory"
    received = wire.request_decoder.decode(wire.encoder.encode(request(sent))).prompt_embeds
    memory[8] = 5
    assert received is not None
    assert received.tolist()[0][7:9] == [9, 5], "and so is what the receiver has"


def test_a_shape_groups_the_numbers() -> None:
    numbers = Array("int64", (2, 1, 2), array("q", [1, 2, 3, 4]).tobytes())
    assert numbers.tolist() == [[[1, 2]], [[3, 4]]]
    assert Array("int32", (), array("i", [7]).tobytes()).tolist() == 7


def test_parts_of_open_type_are_converted_with_their_arrays() -> None:
    arrays = [Array("uint8", (3,), b"abc"), Array("uint8", (512,), bytes(512))]
    call = UtilityCall(0, 1, "update", [WeightTransferUpdateRequest(["a", "b"], arrays)])
    received = wire.utility_decoder.decode(wire.encoder.encode(call))
    update = wire.utility_decoder.convert(received.args[0], WeightTransferUpdateRequest)
    assert update.arrays == arrays


INLINE = msgspec.msgpack.Ext(3, bytes(4))


@each(
    ("malformed", "complaint"),
    [
        (["float32", [2], INLINE], "4 bytes are no float32 array"),
        (["float32", [-1], INLINE], "shape"),
        (["float32", [1] * 9, INLINE], "shape"),
        (["complex64", [1], INLINE], "complex64"),
        (["float32", [1.5], INLINE], "integers"),
        (["float32", [True], INLINE], "integers"),
        (["float32", [1], 0], "frame"),
        (["float32", [1], 2], "frame"),
        (["float32", [1], -1], "frame"),
        (["float32", [1], "x"], "frame"),
        (["float32", [1], msgspec.msgpack.Ext(9, b"")], "extension 9"),
        ([], "frame"),
        (7, "frame"),
    ],
)
def test_what_is_malformed_is_refused(malformed: Any, complaint: str) -> None:
    fields = [*msgspec.to_builtins(request(None))]
    fields[10] = malformed
    frames = [msgspec.msgpack.encode(fields), b"abc"]
    with pytest.raises(msgspec.DecodeError, match=complaint):
        wire.request_decoder.decode(frames)


def test_a_message_has_a_bounded_number_of_frames() -> None:
    frame, *_ = wire.encoder.encode(request(None))
    with pytest.raises(msgspec.ValidationError, match="65 frames"):
        wire.request_decoder.decode([frame] + [b""] * 64)


@each("dtype", sorted(ITEM_BYTES.keys() - {"bfloat16"}))
def test_numpy_reads_the_bytes_where_they_are(dtype: str) -> None:
    wanted = np.array([[0, 1, 0], [1, 0, 1]], dtype)
    found = np.asarray(Array(dtype, wanted.shape, wanted.tobytes()))
    assert found.dtype == wanted.dtype
    assert found.tolist() == wanted.tolist()
    assert not found.flags.writeable


def test_numpy_has_no_bfloat16() -> None:
    with pytest.raises(ValueError, match="convert it to float32 first"):
        np.asarray(Array("bfloat16", (1,), b"ab"))
