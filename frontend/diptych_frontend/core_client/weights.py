"""The part of AsyncLLM that changes adapters and weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from diptych_frontend.core_client.health import CoreHealth
from diptych_protocol import (
    Array,
    ControlledClient,
    InvalidRequestError,
    LoRARequest,
    WeightTransferUpdateRequest,
)
from diptych_protocol.arrays import MAX_FRAMES
from diptych_protocol.control_calls import FILES_TIMEOUT_S
from diptych_protocol.weights import CONFIGURED_FROM
from diptych_protocol.wire import MAX_MESSAGE_BYTES

MAX_ARRAYS = MAX_FRAMES - 1
MAX_BATCH_BYTES = 4 * MAX_MESSAGE_BYTES
"""Limit on the total size, in bytes, of the arrays in one message. Larger messages would only wait
in queues."""


def split_update(request: WeightTransferUpdateRequest) -> Iterator[WeightTransferUpdateRequest]:
    """Return messages that together have the same content; the request itself if it has no arrays.

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


class CoreWeights(CoreHealth, ControlledClient):
    """A mixin for a client that owns its engine cores."""

    _highest_removed_id = 0
    """No id of a removed adapter is given again: requests, and routers, may still use it."""

    @cached_property
    def _changing_adapters(self) -> asyncio.Lock:
        """Held while an adapter comes or goes by its name."""
        return asyncio.Lock()

    # --- adapters -----------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. After that, API requests may use its name in place of the model's.

        Raises `UtilityError` if its files are invalid or there is no place for it.
        """
        if lora_request.lora_name == self.model_name:
            raise InvalidRequestError(
                f"{lora_request.lora_name!r} is the model's own name", param="lora_name"
            )
        done = await super().add_lora(lora_request)
        self._adapters[lora_request.lora_name] = lora_request
        return done

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; False if it is not loaded. Running requests keep it until they end."""
        for name, adapter in list(self._adapters.items()):
            if adapter.lora_int_id == lora_id:
                del self._adapters[name]
                if lora_id < CONFIGURED_FROM:
                    self._highest_removed_id = max(self._highest_removed_id, lora_id)
        return await super().remove_lora(lora_id)

    async def load_adapter(self, name: str, path: str) -> LoRARequest:
        """Load an adapter under a name, with a new id. Raises as `add_lora`."""
        async with self._changing_adapters:
            known = self._adapters.get(name)
            if known is not None:
                raise InvalidRequestError(
                    f"the adapter {name!r} is known already, from {known.lora_path}; "
                    "unload it first",
                    param="lora_name",
                )
            taken = {adapter.lora_int_id for adapter in self._adapters.values()}
            taken |= await self.list_loras() | {self._highest_removed_id}
            highest = max(number for number in taken if number < CONFIGURED_FROM)
            adapter = LoRARequest(name, highest + 1, path)
            await self.add_lora(adapter)
            return adapter

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter by its name. Raises `InvalidRequestError` for an unknown one."""
        async with self._changing_adapters:
            known = self._adapters.get(name)
            if known is None:
                raise InvalidRequestError(
                    f"there is no adapter {name!r}", param="lora_name", status=404
                )
            await self.remove_lora(known.lora_int_id)

    # --- workers ------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker; return the results in the order of their ranks.

        The worker runs it between two steps, to its end; `timeout` (seconds) is how long the caller
        waits for it.

        Raises:
            UtilityError: the method raised, or does not exist; with the worker's message.
            TimeoutError: it took longer.
        """
        wait_s = FILES_TIMEOUT_S if timeout is None else timeout
        with self.silence_expected():
            self._check_usable()
            await self._connect()
            answers = await self._cores.call_each(
                "collective_rpc", method, list(args), kwargs or {}, timeout_s=wait_s
            )
        return [result for of_core in answers for result in of_core]

    # --- weights ------------------------------------------------------------------------------

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        """Replace some weights. Raises `UtilityError` if they do not fit the model."""
        for part in split_update(request):
            await super().update_weights(part)
