"""Copies the KV of vLLM's layers to the host and back where the hinge cannot address it.

It is loaded only where that is needed, because it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from diptych_kernels.block_copy.copies import BlockCopies, Bus
from diptych_protocol import InvalidRequestError
from diptych_vllm.kv_memory import PARAM

if TYPE_CHECKING:
    from torch import Tensor


def copies_of(layers: Mapping[str, Tensor]) -> tuple[dict[str, BlockCopies], Callable[[], None]]:
    """Return the copies of each layer, and a function that makes copies wait for all that the
    calling thread has launched on the device so far.

    All layers are on one device, and share its bus. Raises `InvalidRequestError` for blocks that do
    not follow each other in memory, naming the layer.
    """
    bus = Bus(next(iter(layers.values())).device)
    copies = {}
    for name, tensor in layers.items():
        try:
            copies[name] = BlockCopies(tensor, bus)
        except ValueError as exc:
            raise InvalidRequestError(
                f"the KV of layer {name} cannot be copied: {exc}. Start vLLM with "
                "VLLM_KV_CACHE_LAYOUT=LBHNC",
                param=PARAM,
            ) from exc
    return copies, bus.launched
