"""A device that is none: torch's, so that the engine's path for GPUs can run where there is none.

Its tensors keep their values from the host as a GPU's do. NumPy gets nothing of them, their address
is nobody's, operators refuse tensors of the host beside them, and a copy to the host that does not
wait is made when somebody waits for it: until then there is rubbish in its place. Everything else
is computed on the CPU; Triton's kernels run in its interpreter. What is launched can be recorded
and launched again, as CUDA graphs are: with nothing of the host in it, and in a pool that is gone
with its last graph.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import GridExecutor

if torch.cuda.is_available():
    pytest.skip("there is a device: Triton's kernels run on it", allow_module_level=True)
NAME = "foreign"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
ATEN = torch.ops.aten
COPIES = {ATEN._to_copy.default, ATEN.copy_.default}
"""Operators whose tensors may be on two devices."""
READS = {ATEN._local_scalar_dense, ATEN.item}
MOVES = {ATEN._to_copy, ATEN.to}
"""In inference mode the second of each is seen, and else the first, which it is made of."""


class Device:
    """What it was asked for."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        """Operators that made the host wait for a value."""
        self.launches = 0
        """Operators and kernels so far."""
        self.recording = threading.local()
        self._copies: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def launch(self, operation: Callable[[], Any]) -> Any:
        """Do something that the device does, and again whenever a graph that is being recorded
        is launched."""
        self.launches += 1
        result = operation()
        if (graph := self.graph) is not None:
            graph.launches.append((operation, result))
        return result

    @property
    def graph(self) -> Graph | None:
        """The one that this thread records."""
        return getattr(self.recording, "graph", None)

    def later(self, copy: Callable[[], object]) -> None:
        with self._lock:
            self._copies.append(copy)

    def synchronize(self) -> None:
        """Make the copies that nobody has waited for yet."""
        with self._lock:
            copies, self._copies = self._copies, []
        with torch.inference_mode():  # it may be called from outside
            for copy in copies:
                copy()


device = Device()


class ForeignTensor(Tensor):
    """A tensor of that device."""

    inner: Tensor  # type: ignore[assignment]
    """Its values."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> ForeignTensor:
        with torch.inference_mode(False):  # a view of a tensor from outside is none of inference
            made: ForeignTensor = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
                dtype=inner.dtype, device=DEVICE,
            )  # fmt: skip
        made.inner = inner
        return made

    is_cuda = True
    """What takes the kernels for GPUs, and the engine's copies beside them."""

    def data_ptr(self) -> int:
        """An address that no process can have: whatever touches it on the host is killed."""
        return 1 << 60

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """For Triton's interpreter, which copies it there and back."""
        return self.inner.untyped_storage()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ForeignTensor{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_mixtures(func, args, kwargs)
        if device.graph is not None:
            _refuse_the_host(func, args, kwargs)
        to = kwargs.get("device")
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        if func is ATEN.copy_.default and not isinstance(args[0], cls):
            return _to_host(args, kwargs)
        if func.overloadpacket in READS or _goes_to_host(func, to):
            device.waits.append(str(func))
            device.synchronize()
        result = device.launch(partial(func, *_inner(args), **_inner(kwargs)))
        if to is not None and torch.device(to).type != NAME:
            return result
        if func._schema.is_mutable:
            return kwargs["out"] if "out" in kwargs else args[0]
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, result)


def _inner(values: Any) -> Any:
    return tree_map(lambda x: x.inner if isinstance(x, ForeignTensor) else x, values)


def _refuse_mixtures(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """As CUDA does; like it, this takes scalars from the host."""
    if func in COPIES:
        return
    for tensor in tree_flatten((args, kwargs))[0]:
        if isinstance(tensor, Tensor) and not isinstance(tensor, ForeignTensor) and tensor.dim():
            raise RuntimeError(f"{func}: a tensor of the host among a device's")


def _refuse_the_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A graph repeats addresses: what it copies from the host must not be of a moment."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()]
    if func.overloadpacket in READS or not all(isinstance(x, ForeignTensor) for x in tensors):
        raise RuntimeError(f"{func}: the host is asked while a graph is recorded")


def _goes_to_host(func: Any, to: Any) -> bool:
    return func.overloadpacket in MOVES and to is not None and torch.device(to).type == "cpu"


def _to_host(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Without waiting, the values that there are now come later."""
    target: Tensor = args[0]
    source: Tensor = args[1].inner
    if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
        device.waits.append("copy_")
        device.synchronize()
        return target.copy_(source)
    values = source.clone()
    device.later(lambda: target.copy_(values))
    target.view(torch.uint8).fill_(0xA5)
    return target


def _empty(
    size: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    return ForeignTensor(torch.empty(size, dtype=dtype))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return ForeignTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """What torch's own indexing takes to bring numbers to the device."""
    _inner(target).copy_(_inner(source))
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")


class Stream:
    """Everything is in one order here; what matters is who waits."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.awaited: list[int] = []
        """Each time that it was told to wait: for how many launches."""

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(device.launches)

    def wait_event(self, event: Event) -> None:
        self.awaited.append(event.launches)

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        device.synchronize()


class Event:
    """After how many launches it was recorded."""

    launches = 0

    def record(self, stream: Stream) -> None:
        self.launches = device.launches


class Graph:
    """What was launched while it was recorded, and what came of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Callable[[], Any], Any]] = []

    def replay(self) -> None:
        """Do it again, each result at the place where it was."""
        for operation, result in self.launches:
            again = operation()
            for place, value in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                # One of no size was given its own by a later launch, which writes to it.
                if isinstance(place, Tensor) and value.numel() and place is not value:
                    place.copy_(value)


class Pools:
    """The memory of graphs. Torch refuses a pool again whose graphs are all gone."""

    def __init__(self) -> None:
        self._names = itertools.count()
        self._graphs: dict[int, weakref.WeakSet[Graph]] = {}

    def handle(self) -> int:
        """A pool for graphs to come."""
        return next(self._names)

    @contextmanager
    def record(self, graph: Graph, pool: int, capture_error_mode: str = "global") -> Iterator[None]:
        """As `torch.cuda.graph`."""
        known = self._graphs.get(pool)
        if known is not None and not known:
            raise RuntimeError(f"pool {pool} is gone with its last graph")
        self._graphs.setdefault(pool, weakref.WeakSet()).add(graph)
        device.recording.graph = graph
        try:
            yield
        finally:
            device.recording.graph = None


@contextmanager
def _current(stream: Stream) -> Iterator[None]:
    yield


def install(patch: pytest.MonkeyPatch) -> None:
    """Have engines made there, and let them find streams and pinned memory, as CUDA has them."""
    empty, empty_like = torch.empty, torch.empty_like
    main = Stream()

    def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    patch.setattr(torch, "empty", unpinned(empty))
    patch.setattr(torch, "empty_like", unpinned(empty_like))
    patch.setattr(Tensor, "pin_memory", lambda self: self)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "stream", _current)
    patch.setattr(torch.cuda, "current_stream", lambda _=None: main)
    patch.setattr(torch.cuda, "default_stream", lambda _=None: main)
    patch.setattr(torch.cuda, "Event", Event)
    pools = Pools()
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", pools.record)
    patch.setattr(torch.cuda, "graph_pool_handle", pools.handle)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    run_kernel = GridExecutor.__call__
    patch.setattr(
        GridExecutor,
        "__call__",
        lambda self, *args, **kwargs: device.launch(partial(run_kernel, self, *args, **kwargs)),
    )
    place(patch, DEVICE)


def place(patch: pytest.MonkeyPatch, chosen: torch.device) -> None:
    """Have engines made there from now on."""
    patch.setattr("diptych_engine.execution.runner.choose_device", lambda config, rank=0: chosen)
