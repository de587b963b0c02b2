"""The adapters that a vLLM has loaded for routers.

vLLM takes the id of an adapter for the adapter, whatever name and path come with it, and its own
API gives ids of its own. It finds KV by name and path. Its core dies of files that it cannot load
in a step. So here each load gets an id that nobody else gives, and a name with the digest of the
files, and comes before the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from diptych_frontend.model_files.ordinary import require_ordinary
from diptych_protocol import EngineCoreRequest, InvalidRequestError, LoRARequest
from diptych_vllm.serve.engine_view import ServedEngine
from diptych_vllm.serve.kv_events import BY_DIGEST

FIRST_ID: Final = 1 << 20
"""vLLM's own API counts from 1."""
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(eq=False, slots=True)
class _Loaded:
    asked: LoRARequest
    own: LoRARequest
    """As vLLM knows it."""
    digest: str
    users: int = 0
    """Requests that have not ended."""
    pinned: bool = False
    leaving: bool = False
    """Removed, as soon as nobody uses it."""


class VllmAdapters:
    """Adapters by the ids that clients give them: one id stands for one name and folder."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._in_a_step, self._kept = engine.adapter_places
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()
        """The least recently used first."""
        self._ids = itertools.count(FIRST_ID)
        self._loading = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def using(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreRequest]:
        """Return a request with its adapter as vLLM knows it, which is loaded meanwhile. Raises
        `InvalidRequestError` for an adapter that cannot be used."""
        if request.lora_request is None:
            yield request
            return
        loaded = await self._load(request.lora_request)
        loaded.users += 1
        try:
            yield msgspec.structs.replace(request, lora_request=loaded.own)
        finally:
            loaded.users -= 1
            if loaded.leaving:
                await self._unload(loaded)

    async def add(self, wanted: LoRARequest) -> bool:
        """Load an adapter before its first request. Raises `InvalidRequestError`."""
        await self._load(wanted)
        return True

    async def remove(self, lora_id: int) -> bool:
        """Forget an adapter; False for an unknown one. Its requests go on with it."""
        loaded = self._loaded.pop(lora_id, None)
        if loaded is not None:
            await self._unload(loaded)
        return loaded is not None

    async def pin(self, lora_id: int) -> bool:
        """Keep an adapter loaded; False for an unknown one. Raises `InvalidRequestError` for the
        last place of a step."""
        loaded = self._loaded.get(lora_id)
        if loaded is None:
            return False
        pinned = sum(other.pinned for other in self._loaded.values() if other is not loaded)
        if pinned + 1 >= self._in_a_step:
            raise InvalidRequestError(
                f"at most {self._in_a_step - 1} of {self._in_a_step} adapters can be pinned",
                status=409,
            )
        loaded.pinned = bool(await self._engine.llm.pin_lora(loaded.own.lora_int_id))
        return loaded.pinned

    def listed(self) -> list[int]:
        """Return the ids of the loaded adapters."""
        return sorted(self._loaded)

    def digests(self) -> dict[str, str]:
        """Return name -> digest of the files of the loaded adapters."""
        return {loaded.asked.lora_name: loaded.digest for loaded in self._loaded.values()}

    async def _load(self, wanted: LoRARequest) -> _Loaded:
        lora_id = wanted.lora_int_id
        if lora_id not in self._loaded:  # whoever uses a loaded one never waits for another
            async with self._loading:
                if lora_id not in self._loaded:
                    self._loaded[lora_id] = await self._loaded_anew(wanted)
        loaded = self._loaded[lora_id]
        known = loaded.asked
        if known != wanted:
            raise InvalidRequestError(
                f"adapter {lora_id} is {known.lora_name!r} from {known.lora_path}, not "
                f"{wanted.lora_name!r} from {wanted.lora_path}: take another id",
                param="lora_request",
            )
        self._loaded.move_to_end(lora_id)
        return loaded

    async def _loaded_anew(self, wanted: LoRARequest) -> _Loaded:
        path, stats, begin = wanted.lora_path, self._engine.load.stats, time.monotonic()
        try:
            digest = await asyncio.to_thread(digest_of, Path(path))
            await self._make_room()
            name = f"{wanted.lora_name}{BY_DIGEST}{digest}"
            own = LoRARequest(name, next(self._ids), path)
            await self._engine.add_lora(own)
        except Exception as exc:
            if self._engine.has_died(exc):
                raise
            raise InvalidRequestError(f"adapter {path}: {exc}", param="lora_path") from exc
        stats.adapters_loaded += 1
        stats.seconds_loading_adapters += time.monotonic() - begin
        return _Loaded(wanted, own, digest)

    async def _make_room(self) -> None:
        """Unload what was not used for longest, before vLLM does so and nobody here knows."""
        for lora_id, loaded in list(self._loaded.items()):
            if len(self._loaded) < self._kept:
                return
            if not loaded.users and not loaded.pinned:
                await self.remove(lora_id)

    async def _unload(self, loaded: _Loaded) -> None:
        loaded.leaving = True
        if not loaded.users:
            await self._engine.llm.remove_lora(loaded.own.lora_int_id)


def digest_of(folder: Path) -> str:
    """Return the digest of the files of an adapter. Raises `OSError`, `ValueError`."""
    content = hashlib.blake2b(digest_size=16)
    for name in FILES:
        require_ordinary(folder / name)
        with (folder / name).open("rb") as file:
            hashlib.file_digest(file, lambda: content)
    return content.hexdigest()
