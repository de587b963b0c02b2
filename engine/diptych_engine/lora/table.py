"""Knows which adapters are loaded, and the calls about them. It is in the core, which knows who
uses them.

There are `max_loras` places. A request names its adapter. The files are checked when it arrives,
and loaded when it is scheduled, in place of the least recently used adapter. The scheduler makes
sure that running requests and pinned adapters never need more places than there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

from diptych_engine.scheduling.adapter import Adapter, busy_adapters
from diptych_engine.scheduling.request import Request, ScheduledRequest
from diptych_protocol import DiptychError, InvalidRequestError, LoRARequest

WorkerCall = Callable[[str, tuple[Any, ...]], list[Any]]
"""Runs a worker's method (name, arguments) on every rank."""

MAX_NAME_LENGTH = 256
MAX_ID = 2**31 - 1


class AdapterTable:
    """The adapters of one engine core."""

    def __init__(
        self, max_loras: int, call_workers: WorkerCall, running: Callable[[], Sequence[Request]]
    ) -> None:
        """`running` returns the running requests."""
        self.max_loras = max_loras
        self._running = running
        self.pinned: set[int] = set()
        """Ids of adapters that keep their places."""
        self.num_loads = 0
        self.seconds_loading = 0.0
        """Sum over these loads, the unloading of others for them included."""
        self._call_workers = call_workers
        self._loaded: OrderedDict[int, Adapter] = OrderedDict()
        """By id, the least recently used first."""
        self._leaving: set[int] = set()
        """Removed while requests were using them: loaded, but no longer listed."""
        self._known: WeakValueDictionary[int, Adapter] = WeakValueDictionary()
        """Those that are loaded or that some request will use."""

    @property
    def in_use(self) -> bool:
        """Whether any request may have an adapter."""
        return len(self._known) > 0

    def digests(self) -> dict[str, str]:
        """Return name -> digest of the content of the loaded adapters."""
        return {adapter.name: adapter.digest for adapter in self._loaded.values()}

    def lacks(self, shares: Iterable[ScheduledRequest]) -> bool:
        """Whether any adapter of a step is not loaded yet."""
        wanted = (share.request.adapter for share in shares)
        return any(x is not None and x.lora_int_id not in self._loaded for x in wanted)

    def resolve(self, request: LoRARequest | None) -> Adapter | None:
        """Return the adapter that a request names, with checked files, but not necessarily loaded.

        Raises `InvalidRequestError` if it cannot be used.
        """
        if request is None:
            return None
        known = self._known.get(request.lora_int_id)
        if known is not None:
            if (known.name, known.path) != (request.lora_name, request.lora_path):
                raise _refusal(
                    f"adapter {request.lora_int_id} is {known.name!r} from {known.path}, "
                    f"not {request.lora_name!r} from {request.lora_path}: take another id"
                )
            return known
        self._check(request)
        digest: str = self._call_workers("_inspect_lora", (request.lora_path,))[0]
        adapter = Adapter(request.lora_int_id, request.lora_name, request.lora_path, digest)
        self._known[adapter.lora_int_id] = adapter
        return adapter

    def _check(self, request: LoRARequest) -> None:
        if self.max_loras == 0:
            raise _refusal("this engine takes no adapters (max_loras is 0)")
        if not 0 < request.lora_int_id <= MAX_ID:
            raise _refusal(f"lora_int_id must be in 1..{MAX_ID}, not {request.lora_int_id}")
        fits = 0 < len(request.lora_name) <= MAX_NAME_LENGTH and request.lora_name.isprintable()
        if not fits or not request.lora_path:
            wanted = f"a path and a name of 1..{MAX_NAME_LENGTH} printable characters"
            raise _refusal(f"an adapter needs {wanted}")

    def use(self, shares: Iterable[ScheduledRequest]) -> list[tuple[Request, str]]:
        """Load the adapters of a step, whose requests are running by now, that are not loaded yet.
        Returns the requests whose adapters cannot be loaded, and why."""
        busy = busy_adapters(self._running())
        failed: list[tuple[Request, str]] = []
        for share in shares:
            adapter = share.request.adapter
            if adapter is not None:
                try:
                    self._load(adapter, busy)
                except DiptychError as exc:
                    failed.append((share.request, str(exc)))
        return failed

    def _load(self, adapter: Adapter, busy: set[int]) -> None:
        lora_int_id = adapter.lora_int_id
        if lora_int_id not in self._loaded:
            begin = perf_counter()
            while len(self._loaded) >= self.max_loras:
                self._unload(self._least_recent(busy))
            try:
                self._call_workers("_load_lora", (lora_int_id, adapter.path, adapter.digest))
            except Exception:
                self._call_workers("_unload_lora", (lora_int_id,))  # some rank may have it
                raise
            self._loaded[lora_int_id] = adapter
            self.num_loads += 1
            self.seconds_loading += perf_counter() - begin
        self._loaded.move_to_end(lora_int_id)

    def _least_recent(self, busy: set[int]) -> int:
        for lora_int_id in self._loaded:
            if lora_int_id not in busy and lora_int_id not in self.pinned:
                return lora_int_id
        raise InvalidRequestError(
            f"all {self.max_loras} places for adapters (max_loras) are pinned or in use; "
            "remove one first",
            status=409,
        )

    def _unload(self, lora_int_id: int) -> None:
        self._call_workers("_unload_lora", (lora_int_id,))
        del self._loaded[lora_int_id]
        self._leaving.discard(lora_int_id)

    # --- utility calls ------------------------------------------------------------------------

    @property
    def calls(self) -> tuple[Callable[..., Any], ...]:
        """The functions that a client may name in a utility call."""
        return self.add_lora, self.remove_lora, self.list_loras, self.pin_lora

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before its first request. Raises `InvalidRequestError`."""
        busy = busy_adapters(self._running())
        for gone in self._leaving - busy:
            self._unload(gone)
        adapter = self.resolve(lora_request)
        if adapter is not None:
            self._load(adapter, busy)
            self._leaving.discard(adapter.lora_int_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; False if it is not loaded.

        Running requests keep it until they end; then it is unloaded as soon as its place is needed.
        """
        if lora_id not in self.list_loras():
            return False
        self.pinned.discard(lora_id)
        if lora_id in busy_adapters(self._running()):
            self._leaving.add(lora_id)
            self._loaded.move_to_end(lora_id, last=False)
        else:
            self._unload(lora_id)
        return True

    def list_loras(self) -> list[int]:
        """Return the ids of the loaded adapters."""
        return [lora_int_id for lora_int_id in self._loaded if lora_int_id not in self._leaving]

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded whatever others need; False if it is not loaded.

        Raises `InvalidRequestError` for the last place: other adapters could never run again.
        """
        if lora_id not in self.list_loras():
            return False
        if len(self.pinned | {lora_id}) >= self.max_loras:
            raise InvalidRequestError(
                f"at most {self.max_loras - 1} of {self.max_loras} adapters can be pinned",
                status=409,
            )
        self.pinned.add(lora_id)
        return True


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="lora_request")
