"""Checks prompts that are embeddings instead of tokens."""

from __future__ import annotations

import sys
from typing import Any, Final

from diptych_protocol import Array, InvalidRequestError
from diptych_protocol.wire import MAX_MESSAGE_BYTES

EXPONENTS: Final = {
    "float32": ("uint32", 0x7F80_0000),
    "bfloat16": ("uint16", 0x7F80),
    "float16": ("uint16", 0x7C00),
}
"""The position of the exponent in a number. If all its bits are ones, the number is infinite or
NaN. NumPy has no bfloat16."""


def check_embeds(embeds: Any, hidden_size: int) -> Array:
    """Return embeddings as an Array if they are [tokens, hidden_size] finite numbers: an Array, a
    tensor of torch, or an array of NumPy.

    Raises `InvalidRequestError` for anything else, and for more than one message can carry.
    """
    import numpy as np  # 11 MiB, which most front-ends do not need

    try:
        embeds = _as_array(embeds)
    except (RuntimeError, TypeError, ValueError) as exc:  # a sparse tensor, a type of numbers
        raise _refusal(f"dense numbers: {exc}") from None
    if not isinstance(embeds, Array):
        raise _refusal(f"a torch.Tensor, a numpy.ndarray or an Array, not {type(embeds).__name__}")
    if embeds.dtype not in EXPONENTS:
        raise _refusal(f"of type {', '.join(EXPONENTS)}, not {embeds.dtype}")
    shape = embeds.shape
    if len(shape) != 2 or shape[0] < 1 or shape[1] != hidden_size:
        raise _refusal(f"of shape [tokens, {hidden_size}], not {list(shape)}")
    data = memoryview(embeds.data)
    if data.nbytes > MAX_MESSAGE_BYTES:
        raise _refusal(f"of at most {MAX_MESSAGE_BYTES} bytes, not {data.nbytes}")
    kind, exponent = EXPONENTS[embeds.dtype]
    if ((np.frombuffer(data, kind) & np.dtype(kind).type(exponent)) == exponent).any():
        raise _refusal("finite")
    return embeds


def _as_array(embeds: Any) -> Any:
    """Over the memory of a tensor on the CPU, or of an array, if it is contiguous."""
    import numpy as np

    torch = sys.modules.get("torch")  # whoever has a tensor has loaded it; a front-end need not
    if torch is not None and isinstance(embeds, torch.Tensor):
        flat = embeds.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return Array(str(embeds.dtype).removeprefix("torch."), tuple(embeds.shape), flat.data)
    if isinstance(embeds, np.ndarray):
        flat = np.ascontiguousarray(embeds).reshape(-1).view(np.uint8)
        return Array(embeds.dtype.name, embeds.shape, flat.data)
    return embeds


def _refusal(wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt_embeds must be {wanted}", param="prompt_embeds")
