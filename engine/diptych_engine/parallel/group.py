"""A group of processes that sum tensors: gloo between CPUs, NCCL between GPUs.

The group is an object of its own, not torch's default one: a process may be in several.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from diptych_protocol import EngineConfig, EngineDeadError, InvalidRequestError

SUM_TIMEOUT_S: Final = 60.0
"""All ranks must reach a sum within this time, so it is longer than half of any layer."""
JOIN_TIMEOUT_S: Final = 600.0
"""The time limit of joining; ranks join when they have loaded the model."""
LOOPBACK: Final = "127.0.0.1"


class SumGroup:
    """One rank's membership. `join` it before the first sum."""

    def __init__(self, rank: int, size: int, store: Path, device: torch.device) -> None:
        """`store` is a file in a directory that only the ranks can reach; it need not exist."""
        self.rank = rank
        self.size = size
        self._store = store
        self._device = device
        self._backend: Any = None
        """A `ProcessGroupGloo` or `ProcessGroupNCCL`; torch's stubs lack half of what they have."""

    def join(self) -> None:
        """Wait for all ranks. Raises `RuntimeError` if one does not come in time."""
        torch_dist: Any = dist
        store = torch_dist.FileStore(str(self._store), self.size)
        store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            kind = torch_dist.ProcessGroupNCCL
            options = kind.Options()
        else:
            kind = torch_dist.ProcessGroupGloo
            options = kind._Options()
            # Left to itself, gloo listens wherever the machine's name leads.
            options._devices = [kind.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=SUM_TIMEOUT_S)
        self._backend = kind(store, self.rank, self.size, options)
        self.sum_(torch.zeros(1, device=self._device))

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks.

        Raises `RuntimeError` when a rank is gone, or does not come in time.
        """
        if self._backend is None:
            raise RuntimeError("the group was not joined")
        self._backend.allreduce([tensor]).wait()

    def leave(self) -> None:
        """Leave the group; the others' next sum fails."""
        self._backend = None


class LockstepGroup(SumGroup):
    """The group of a core whose steps are made together with those of others."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `InvalidRequestError` if the configuration does not say where they meet."""
        if not config.data_parallel_store:
            raise InvalidRequestError(
                "cores in lock-step need a file to find each other in", param="data_parallel_store"
            )
        super().__init__(
            config.data_parallel_rank,
            config.data_parallel_size,
            Path(config.data_parallel_store),
            torch.device("cpu"),
        )

    def join(self) -> None:
        """Wait for the other cores. Raises `EngineDeadError` if one of them does not come."""
        try:
            super().join()
        except RuntimeError as exc:
            raise EngineDeadError(f"the cores in lock-step do not find each other: {exc}") from exc

    def any_unfinished(self, own: bool) -> bool:
        """Whether some core has work, including this one (`own`); all have to ask before each step.

        Raises `EngineDeadError` when one of them is gone.
        """
        flags = torch.tensor([own], dtype=torch.int32)
        try:
            self.sum_(flags)
        except RuntimeError as exc:
            raise EngineDeadError(f"the group in lock-step broke: {exc}") from exc
        return bool(flags.item())
