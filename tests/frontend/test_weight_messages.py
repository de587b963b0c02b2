"""Weights inside messages are cut into pieces that a core accepts."""

from __future__ import annotations

import pytest

from diptych_frontend.core_client.weights import split_update
from diptych_protocol import Array, InvalidRequestError, WeightTransferUpdateRequest
from diptych_protocol.wire import MAX_MESSAGE_BYTES


def test_contract_C26_large_updates_travel_in_several_messages() -> None:
    def zeros(count: int, size: int) -> WeightTransferUpdateRequest:
        array = Array("uint8", (size,), bytes(size))
        return WeightTransferUpdateRequest([f"t{i}" for i in range(count)], [array] * count)

    large = zeros(20, MAX_MESSAGE_BYTES // 3)
    parts = list(split_update(large))
    assert [name for part in parts for name in part.names] == large.names
    assert [len(part.arrays) for part in parts] == [12, 8]
    assert [len(part.arrays) for part in split_update(zeros(130, 100))] == [63, 63, 4]
    with pytest.raises(InvalidRequestError, match="process group"):
        list(split_update(zeros(1, MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(InvalidRequestError, match="names for"):
        list(split_update(WeightTransferUpdateRequest(["t"], large.arrays)))
