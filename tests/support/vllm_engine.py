"""A whole engine's connector without vLLM: the scheduler half, and over real UCX a worker half for
each rank, with KV in tensors of the shape that vLLM's CPU backend has.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from free_ports import first_of_free_ports
from torch import Tensor
from vllm_scheduler import BLOCK, ONE_GROUP, prompt

from diptych_kernels.block_copy.copies import BlockCopies, Bus
from diptych_kv_transfer.connector import start_hinge
from diptych_kv_transfer.parameters import describe_engine
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.messages import Hello
from diptych_vllm.kv_memory import compat_of, shards_of
from diptych_vllm.ranks import Ranks, epoch_of_rank
from diptych_vllm.scheduler_half import SchedulerHalf
from diptych_vllm.settings import ConnectorSettings
from diptych_vllm.worker_half import WorkerHalf

NUM_BLOCKS, LAYERS = 12, 3


class Engine:
    """One engine's connector, with a worker for each rank."""

    def __init__(
        self,
        name: str,
        seed: int,
        num_ranks: int = 1,
        heads: int = 2,
        *,
        heads_first: bool = True,
        bus: Callable[[], Bus] | None = None,
        copies: type[BlockCopies] = BlockCopies,
    ) -> None:
        """bus: makes the bus of each rank, if KV is to go through copies."""
        generator = torch.Generator().manual_seed(seed)
        self.ranks = [Ranks(heads, num_ranks, rank, heads_first) for rank in range(num_ranks)]
        self.kv = [
            torch.rand((NUM_BLOCKS, heads, BLOCK, 8), generator=generator) for _ in range(LAYERS)
        ]
        """Each layer, with all heads."""
        self.local = [[self.heads_of(ranks, layer) for layer in self.kv] for ranks in self.ranks]
        """What each rank has of each layer."""
        self.buses = [] if bus is None else [bus() for _ in self.ranks]
        self._copies = copies
        settings = ConnectorSettings.parse(
            {"load_timeout_s": 20, "listen_port": first_of_free_ports(num_ranks)}
        )
        self.workers = [self.worker(name, settings, ranks) for ranks in self.ranks]
        self.scheduler = SchedulerHalf(References(PUBLIC_KEY), ONE_GROUP, settings.lease_seconds)
        engine = describe_engine(
            Hello(name, "1", {}), "127.0.0.1", settings.listen_port, settings.lease_seconds
        )
        self.described = msgspec.structs.replace(engine, tp_size=num_ranks)
        self.scheduler.meet(self.described)
        self.ended: dict[str, Counter[str]] = {
            what: Counter() for what in ("sent", "received", "failed")
        }
        """How many ranks have reported each request."""

    def heads_of(self, ranks: Ranks, layer: Tensor) -> Tensor:
        first = ranks.first_head
        return layer[:, first : first + ranks.local_heads].contiguous()

    def worker(self, name: str, settings: ConnectorSettings, ranks: Ranks) -> WorkerHalf:
        kv = {f"layers.{i}": layer for i, layer in enumerate(self.local[ranks.rank])}
        epoch = epoch_of_rank("1", ranks.rank, ranks.num_ranks)
        me = Hello(name, epoch, compat_of(kv, {"model": "m"}, ranks))
        settings = settings.of_rank(ranks.rank)
        if not self.buses:
            hinge = start_hinge(settings, me, shards_of(kv, NUM_BLOCKS), PUBLIC_KEY)
            return WorkerHalf(hinge, ranks)
        bus = self.buses[ranks.rank]
        copies = {layer: self._copies(tensor, bus) for layer, tensor in kv.items()}
        hinge = start_hinge(settings, me, shards_of(kv, NUM_BLOCKS, copies), PUBLIC_KEY)
        return WorkerHalf(hinge, ranks, bus.launched)

    def step(self) -> None:
        orders = self.scheduler.take_orders()
        for worker in self.workers:
            worker.obey(orders)

    def reported(self, what: str, request_id: str) -> bool:
        """Whether every rank has reported a request."""
        for worker in self.workers:
            results = worker.collect()
            self.ended["sent"].update(results.sent)
            self.ended["received"].update(results.received)
            self.ended["failed"].update(results.failed)
        return self.ended[what][request_id] == len(self.workers)

    def lend(self, block_ids: list[int], request_id: str = "r") -> dict[str, Any]:
        """Lend the KV of a prompt of ten tokens."""
        self.scheduler.arrived(prompt(request_id, 10, {"do_remote_decode": True}))
        self.step()
        params = self.scheduler.finished(request_id, [block_ids], by_length=True)
        assert params is not None
        self.step()
        return params

    def fetch(self, params: Any, block_ids: list[int], request_id: str = "r") -> None:
        self.scheduler.arrived(prompt(request_id, 10, params))
        self.step()
        num_tokens = self.scheduler.num_elsewhere(request_id, 0)
        self.scheduler.allocated(request_id, [block_ids], num_tokens)
        self.step()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def figures(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for worker in self.workers:
            found.update(worker.take_figures())
        return found
