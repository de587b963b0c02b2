"""Finds which prefill a refused request leaves behind, even in a broken body."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from diptych_frontend.confined.json_cost import DearJsonError, check_json_cost
from diptych_protocol import UNREADABLE

MAX_PARAMS_BYTES = 256 << 10
"""Limit, in bytes, of the `kv_transfer_params` that are searched for; they list a prompt's blocks.
Nothing larger is decoded, because decoding runs on the event loop."""
MAX_VALUES = 1 << 14
"""The most JSON values that are decoded: twice the blocks of a prompt of 131,072 tokens."""
_KEY = re.compile(rb'"kv_transfer_params"\s{0,16}:\s{0,16}(?=\{)')
_LONGEST_KEY = 64


def promised_prefill(body: bytes) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` of a body that announces remotely prefilled blocks; None
    without any.

    A body that is a small JSON object is decoded. Any other body (large, truncated or no JSON
    object) is searched for an object of this name.
    """
    if b"do_remote_prefill" not in body:
        return None
    finder = PromiseFinder()
    if len(body) > MAX_PARAMS_BYTES or _is_dear(body):
        finder.feed(body)
        return finder.found()
    try:
        request = msgspec.json.decode(body)
    except UNREADABLE:
        finder.feed(body)
        return finder.found()
    return _promise(request.get("kv_transfer_params") if isinstance(request, dict) else None)


class PromiseFinder:
    """Does the same for a body that arrives in pieces and is too large to be kept."""

    def __init__(self) -> None:
        self._kept = b""
        self._inside = False

    def feed(self, piece: bytes) -> None:
        if self._inside:
            self._kept += piece[: MAX_PARAMS_BYTES - len(self._kept)]
            return
        seen = self._kept + piece
        key = _KEY.search(seen)
        if key is None:
            self._kept = seen[-_LONGEST_KEY:]  # the key may begin there
        else:
            self._inside = True
            self._kept = seen[key.end() : key.end() + MAX_PARAMS_BYTES]

    def found(self) -> dict[str, Any] | None:
        """Return what the pieces so far announce."""
        if not self._inside or _is_dear(self._kept):
            return None
        try:
            value, _ = json.JSONDecoder().raw_decode(self._kept.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
        return _promise(value)


def _is_dear(data: bytes) -> bool:
    try:
        check_json_cost(data, MAX_VALUES)
    except DearJsonError:
        return True
    return False


def _promise(params: Any) -> dict[str, Any] | None:
    if isinstance(params, dict) and params.get("do_remote_prefill") is True:
        return params
    return None
