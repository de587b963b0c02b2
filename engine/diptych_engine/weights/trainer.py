"""A process group in which a trainer sends tensors to the workers of engines, over gloo.

The trainer is rank 0 and listens; the workers have the ranks from 1 on. Every tensor is broadcast
whole behind its name and form, and each worker takes its share. In the trainer, and at the same
time at the engine:

    sender = WeightSender("10.0.0.7", num_workers=2)
    sender.join()                     init_weight_transfer_engine(sender.address())
                                      start_weight_update()
    sender.send(tensors)              update_weights(describe(tensors))
                                      finish_weight_update()
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, distributed

from diptych_protocol import (
    DiptychError,
    InvalidRequestError,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from diptych_protocol.arrays import ITEM_BYTES, MAX_DIMENSIONS

dist: Any = distributed
"""torch's stubs lack half of its functions."""

TIMEOUT_S: Final = 60.0
MAX_TIMEOUT_S: Final = 3600.0
MAX_TENSOR_BYTES: Final = 1 << 36
LABEL_BYTES: Final = 1024


class TrainerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`WeightTransferInitRequest.init_info`: the trainer's address, and the members
    of the group."""

    master_address: str
    master_port: int
    world_size: int
    """The trainer and all workers of all engines."""
    rank_offset: int = 1
    """Rank of this engine's first worker."""
    timeout_s: float = TIMEOUT_S
    """How long the others may take to join, or to send the next tensor."""

    def check(self) -> None:
        """Raise `InvalidRequestError` unless the numbers make sense."""
        for ok, wanted in (
            (0 < self.master_port < 1 << 16, "master_port must be a port"),
            (0 < self.rank_offset < self.world_size, "rank_offset must be in 1..world_size - 1"),
            (self.world_size < 1 << 31, "world_size must be below 2**31"),
            (0 < self.timeout_s <= MAX_TIMEOUT_S, f"timeout_s must be in 0..{MAX_TIMEOUT_S:g}"),
        ):
            if not ok:
                raise InvalidRequestError(wanted, param="init_info")


class TensorHeaders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`WeightTransferUpdateRequest.update_info`: the tensors that the group is about to carry, one
    per name."""

    dtypes: list[str]
    """Keys of `ITEM_BYTES`."""
    shapes: list[list[int]]

    def check(self, num_names: int) -> None:
        """Raise `InvalidRequestError` unless these are headers of this many tensors."""
        if not len(self.dtypes) == len(self.shapes) == num_names:
            raise InvalidRequestError(
                f"{num_names} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes",
                param="update_info",
            )
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            size = ITEM_BYTES.get(dtype, 0)
            for length in shape:
                size *= max(0, length)
            if not 0 < size <= MAX_TENSOR_BYTES or len(shape) > MAX_DIMENSIONS:
                raise InvalidRequestError(f"no {dtype} tensor of {shape}", param="update_info")


class WeightGroup:
    """One member of the group."""

    def __init__(self, store: Any, rank: int, size: int, host: str, timeout_s: float) -> None:
        """Wait for all members; `host` is the address at which they reach this one.

        Raises `DiptychError` if one does not come in time.
        """
        kind = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = kind(dist.PrefixStore("weights", store), rank, size, options)
        except RuntimeError as exc:
            raise DiptychError(f"the trainer's group did not come together: {_said(exc)}") from exc
        self._store = store  # it ends with its last reference

    @classmethod
    def join(cls, address: TrainerAddress, rank: int) -> WeightGroup:
        """Join a trainer's group. Raises `DiptychError` if the trainer is not there."""
        timeout = timedelta(seconds=address.timeout_s)
        try:
            host = _own_address(address.master_address, address.master_port)
            store = dist.TCPStore(
                address.master_address,
                address.master_port,
                address.world_size,
                is_master=False,
                timeout=timeout,
                wait_for_workers=False,
            )
        except (OSError, RuntimeError, UnicodeError) as exc:
            raise DiptychError(
                f"no trainer at {address.master_address}:{address.master_port}: {_said(exc)}"
            ) from exc
        return cls(store, rank, address.world_size, host, address.timeout_s)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor (the trainer), or overwrite it with the one that is sent.

        Raises `DiptychError` if the others are gone or too slow; the group is of no use then.
        """
        try:
            self._group.broadcast([tensor], _from_trainer()).wait()
        except RuntimeError as exc:
            raise DiptychError(f"a tensor did not arrive: {_said(exc)}") from exc

    def leave(self) -> None:
        """End the connections, so that nobody waits for this member."""
        self._group = self._store = None

    def send(self, name: str, tensor: Tensor) -> None:
        """Send a tensor behind its label. Raises as `broadcast`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.broadcast(_label(name, dtype, tensor.shape))
        self.broadcast(tensor.detach().cpu().contiguous())

    def receive(self, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
        """Receive the next tensor into this host's memory. Raises as `broadcast`, and if it is not
        the one that was announced: gloo would leave a part of it as it is, or end the process."""
        announced = _label(name, dtype, shape)
        self.broadcast(label := torch.empty_like(announced))
        if not torch.equal(label, announced):
            sent, wanted = (
                x.numpy().tobytes().decode(errors="replace").strip() for x in (label, announced)
            )
            raise DiptychError(f"the trainer sends {sent}, where {wanted} was announced")
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        self.broadcast(tensor)
        return tensor


class WeightSender:
    """The trainer's end."""

    def __init__(
        self, host: str, port: int = 0, *, num_workers: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Listen at an address that the engines can reach; port 0 takes a free one."""
        self._store = dist.TCPStore(
            host,
            port,
            num_workers + 1,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        self._address = TrainerAddress(host, self._store.port, num_workers + 1, timeout_s=timeout_s)
        self._group: WeightGroup | None = None

    def address(self, rank_offset: int = 1) -> WeightTransferInitRequest:
        """Return the address for an engine whose first worker has this rank."""
        own = msgspec.structs.replace(self._address, rank_offset=rank_offset)
        return WeightTransferInitRequest(msgspec.structs.asdict(own))

    def join(self) -> None:
        """Wait until all workers have joined. Raises `DiptychError` if they do not."""
        own = self._address
        host = own.master_address
        self._group = WeightGroup(self._store, 0, own.world_size, host, own.timeout_s)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors in the order in which `describe` names them. Raises `DiptychError`."""
        if self._group is None:
            raise DiptychError("join the group first")
        for name, tensor in tensors.items():
            self._group.send(name, tensor)


_WHERE: Final = re.compile(r"^\[[^\]]*\] *")


def _said(exc: Exception) -> str:
    """What torch says of a failure, without the lines of its sources."""
    return _WHERE.sub("", str(exc).partition("\n")[0])


def describe(tensors: Mapping[str, Tensor]) -> WeightTransferUpdateRequest:
    """Return headers that announce tensors for the group to carry."""
    headers = TensorHeaders(
        [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        [list(tensor.shape) for tensor in tensors.values()],
    )
    return WeightTransferUpdateRequest(list(tensors), update_info=msgspec.structs.asdict(headers))


def _label(name: str, dtype: str, shape: Sequence[int]) -> Tensor:
    """What the group carries before a tensor; always of the same length."""
    text = f"{name} {dtype} {list(shape)}".encode()[:LABEL_BYTES].ljust(LABEL_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _from_trainer() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
