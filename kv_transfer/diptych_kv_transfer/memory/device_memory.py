"""What the hinge needs of KV memory that this process cannot address, such as a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class DeviceMemory(Protocol):
    """One rank's KV memory. Its blocks reach the host only as copies.

    The hinge's thread calls it. Each copy waits for what the engine has had the device do before,
    and has been made when the call returns.
    """

    @property
    def block_bytes(self) -> int:
        """The size of one block."""

    def host_room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory of the host that copies reach quickly, and UCX too; nobody else's until it is
        garbage."""

    def gather(self, block_ids: Sequence[int], room: NDArray[np.uint8]) -> None:
        """room[i] = block block_ids[i]; room is [blocks, block_bytes], contiguous."""

    def scatter(self, room: NDArray[np.uint8], block_ids: Sequence[int]) -> None:
        """Block block_ids[i] = room[i], as in `gather`; no id comes twice."""
