"""Weights that travel inside messages, in pieces that a core accepts."""

from __future__ import annotations

from collections.abc import Iterator

from diptych_protocol import Array, InvalidRequestError, WeightTransferUpdateRequest
from diptych_protocol.arrays import MAX_FRAMES
from diptych_protocol.wire import MAX_MESSAGE_BYTES

MAX_ARRAYS = MAX_FRAMES - 1
MAX_BATCH_BYTES = 4 * MAX_MESSAGE_BYTES
"""Limit on the total size, in bytes, of the arrays in one message; larger messages would only lie
in queues."""


def split_update(request: WeightTransferUpdateRequest) -> Iterator[WeightTransferUpdateRequest]:
    """Messages that together say the same; the request itself if it carries no arrays.

    Raises `InvalidRequestError` for an array that is too large for any message.
    """
    if not request.arrays:
        yield request
        return
    if len(request.names) != len(request.arrays):
        raise InvalidRequestError(
            f"{len(request.names)} names for {len(request.arrays)} arrays", param="names"
        )
    names: list[str] = []
    arrays: list[Array] = []
    size = 0
    for name, array in zip(request.names, request.arrays, strict=True):
        nbytes = memoryview(array.data).nbytes
        if nbytes > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(
                f"{name} has {nbytes} bytes and a message at most {MAX_MESSAGE_BYTES}: "
                "send it through a process group",
                param="arrays",
            )
        if len(arrays) == MAX_ARRAYS or (arrays and size + nbytes > MAX_BATCH_BYTES):
            yield WeightTransferUpdateRequest(names, arrays, request.update_info)
            names, arrays, size = [], [], 0
        names.append(name)
        arrays.append(array)
        size += nbytes
    yield WeightTransferUpdateRequest(names, arrays, request.update_info)
