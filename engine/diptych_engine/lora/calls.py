"""The utility calls about an engine core's adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych_engine.lora.table import AdapterTable
from diptych_engine.scheduling.adapter import busy_adapters
from diptych_engine.scheduling.request import Request
from diptych_protocol import LoRARequest


class LoraCalls:
    """The utility calls `add_lora`, `remove_lora`, `list_loras` and `pin_lora`."""

    def __init__(self, table: AdapterTable, running: Callable[[], Sequence[Request]]) -> None:
        """`running` returns the running requests."""
        self._table = table
        self._running = running

    @property
    def calls(self) -> tuple[Callable[..., Any], ...]:
        return self.add_lora, self.remove_lora, self.list_loras, self.pin_lora

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. Raises `InvalidRequestError` if that is not possible."""
        self._table.add(lora_request, busy_adapters(self._running()))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; False if it is not loaded."""
        return self._table.remove(lora_id, busy_adapters(self._running()))

    def list_loras(self) -> list[int]:
        """Return the ids of the loaded adapters."""
        return self._table.listed()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded, even if others need its place; False if it is not loaded."""
        return self._table.pin(lora_id)
