"""Joins the experts of a whole answer from those of each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_protocol import Array


def joined(parts: Sequence[Array]) -> NDArray[np.int16] | None:
    """Return [tokens, layers, experts per token] of all parts, one after the other; None without
    parts.

    Raises `ValueError` for parts that do not fit each other.
    """
    if not parts:
        return None
    for part in parts:
        if part.dtype != "int16" or len(part.shape) != 3 or part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"routed_experts is {part.dtype} {list(part.shape)}, not int16 "
                f"[tokens, {', '.join(map(str, parts[0].shape[1:]))}]"
            )
    return np.concatenate(
        [np.frombuffer(part.data, np.int16).reshape(part.shape) for part in parts]
    )
