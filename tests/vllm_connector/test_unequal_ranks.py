"""Engines with other numbers of ranks than each other, over real UCX: each rank gets its heads."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from free_ports import first_of_free_ports
from torch import Tensor
from vllm_scheduler import ONE_GROUP, prompt
from waits import wait_until

from diptych_kv_transfer.connector import start_hinge
from diptych_kv_transfer.parameters import describe_engine
from diptych_kv_transfer.signing.keys import PUBLIC_KEY
from diptych_kv_transfer.signing.references import References
from diptych_kv_transfer.tables.messages import Hello
from diptych_vllm.kv_memory import compat_of, shards_of
from diptych_vllm.lending import Progress
from diptych_vllm.ranks import Ranks, epoch_of_rank
from diptych_vllm.scheduler_half import SchedulerHalf
from diptych_vllm.settings import ConnectorSettings
from diptych_vllm.worker_half import WorkerHalf

NUM_BLOCKS, BLOCK, LAYERS = 12, 4, 3
THEIRS, OURS = [7, 3, 4], [1, 2, 9]
"""Where ten tokens are, in P and in D."""
PAIRS = [(2, 1), (1, 2), (4, 2), (2, 4), (1, 4), (4, 1)]


class Engine:
    """One engine's connector, with a worker for each rank."""

    def __init__(
        self, name: str, seed: int, num_ranks: int, heads: int, *, heads_first: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ranks = [Ranks(heads, num_ranks, rank, heads_first) for rank in range(num_ranks)]
        self.kv = [
            torch.rand((NUM_BLOCKS, heads, BLOCK, 8), generator=generator) for _ in range(LAYERS)
        ]
        """Each layer, with all heads."""
        self.local = [[self.heads_of(ranks, layer) for layer in self.kv] for ranks in self.ranks]
        """What each rank has of each layer."""
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
        shards = shards_of(kv, NUM_BLOCKS)
        return WorkerHalf(start_hinge(settings.of_rank(ranks.rank), me, shards, PUBLIC_KEY), ranks)

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

    def lend(self) -> dict[str, Any]:
        self.scheduler.arrived(prompt("r", 10, {"do_remote_decode": True}))
        self.step()
        params = self.scheduler.finished("r", [THEIRS], by_length=True)
        assert params is not None
        self.step()
        return params

    def fetch(self, params: Any) -> None:
        self.scheduler.arrived(prompt("r", 10, params))
        self.step()
        self.scheduler.allocated("r", [OURS], self.scheduler.num_elsewhere("r", 0))
        self.step()

    def figures(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for worker in self.workers:
            found.update(worker.take_figures())
        return found


def has_sent(worker: WorkerHalf) -> bool:
    return "r" in worker.collect().sent


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Those that a test has started."""
    started: list[Engine] = []
    yield started
    for engine in started:
        for worker in engine.workers:
            worker.close()


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_each_rank_gets_its_heads_of_each_block_and_every_rank_is_free_again(
    engines: list[Engine], there: int, here: int, heads: int
) -> None:
    p, d = Engine("p", 1, there, heads), Engine("d", 2, here, heads)
    engines += [p, d]
    expected = [layer.clone() for layer in d.kv]
    for mine, theirs in zip(expected, p.kv, strict=True):
        mine[OURS] = theirs[THEIRS]
    d.fetch(p.lend())
    wait_until(lambda: d.reported("received", "r"))
    wait_until(lambda: p.reported("sent", "r"))
    assert d.ended["failed"] == Counter()
    for ranks, local in zip(d.ranks, d.local, strict=True):
        for layer, whole in zip(local, expected, strict=True):
            assert torch.equal(layer, d.heads_of(ranks, whole))
    received, sent = d.figures(), p.figures()
    assert received["bytes_received"] == sent["bytes_sent"]
    assert received["bytes_received"] == sum(
        3 * layer[0].nbytes for local in d.local for layer in local
    )
    assert sent["leases_expired"] == sent["stale_reads_refused"] == received["loads_failed"] == 0
    assert sent["leases_granted"] == sent["leases_released"] + sent["leases_revoked"]
    assert received["loads_completed"] == sent["leases_released"]


@pytest.mark.parametrize(("there", "here", "heads"), [(2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1)])
def test_ranks_that_fetch_before_the_prompt_is_computed_get_all_and_leave_nothing(
    engines: list[Engine], there: int, here: int, heads: int
) -> None:
    """With one head, a rank of P has nothing that the only rank of D lacks."""
    p, d = Engine("p", 1, there, heads), Engine("d", 2, here, heads)
    engines += [p, d]
    expected = [layer.clone() for layer in d.kv]
    for mine, theirs in zip(expected, p.kv, strict=True):
        mine[OURS] = theirs[THEIRS]
    announced = p.described.to_dict() | {
        "lease_id": "a" * 32,
        "remote_num_tokens": 10,
        "proof": References(PUBLIC_KEY).proof_of_engine(p.described),
    }
    d.fetch(announced)
    p.scheduler.arrived(prompt("r", 10, {"do_remote_decode": True, "lease_id": "a" * 32}))
    p.step()
    for num_tokens in (4, 8):
        p.scheduler.step({"r": Progress(num_tokens, [THEIRS])}, set())
        p.step()
    assert p.scheduler.finished("r", [THEIRS], by_length=True) is not None
    p.step()
    wait_until(lambda: d.reported("received", "r"))
    wait_until(lambda: p.reported("sent", "r"))
    assert d.ended["failed"] == Counter()
    for ranks, local in zip(d.ranks, d.local, strict=True):
        for layer, whole in zip(local, expected, strict=True):
            assert torch.equal(layer, d.heads_of(ranks, whole))
    assert p.figures()["leases_expired"] == 0


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
def test_a_request_that_goes_frees_every_rank(engines: list[Engine], there: int, here: int) -> None:
    p, d = Engine("p", 1, there, 2), Engine("d", 2, here, 2)
    engines += [p, d]
    params = p.lend()
    d.scheduler.arrived(prompt("r", 10, params))
    d.step()
    d.scheduler.finished("r", [], by_length=False)
    d.step()
    wait_until(lambda: p.reported("sent", "r"))
    assert "leases_expired" not in p.figures()


@pytest.mark.parametrize("who", ["p", "d"])
@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
def test_a_lease_that_is_given_back_unread_frees_every_rank(
    engines: list[Engine], there: int, here: int, who: str
) -> None:
    p, d = Engine("p", 1, there, 2), Engine("d", 2, here, 2)
    engines += [p, d]
    params = p.lend()
    rejecting = p if who == "p" else d
    arrival = prompt("rejected", 1, params)
    rejecting.scheduler.arrived(dataclasses.replace(arrival, rejected=True))
    rejecting.step()
    wait_until(lambda: p.reported("sent", "r"))
    assert "leases_expired" not in p.figures()


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
def test_a_rank_that_is_lost_fails_the_request_at_every_rank_and_frees_the_others(
    engines: list[Engine], there: int, here: int
) -> None:
    p, d = Engine("p", 1, there, 2), Engine("d", 2, here, 2)
    engines += [p, d]
    params = p.lend()
    p.workers[0].close()
    d.fetch(params)
    wait_until(lambda: d.reported("received", "r"))
    assert d.ended["failed"]["r"] >= 1
    for worker in p.workers[1:]:
        wait_until(partial(has_sent, worker))
        assert "leases_expired" not in worker.take_figures()


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
def test_where_heads_do_not_come_first_the_request_fails_by_name_and_frees_every_rank(
    engines: list[Engine], there: int, here: int, caplog: pytest.LogCaptureFixture
) -> None:
    p = Engine("p", 1, there, 2, heads_first=False)
    d = Engine("d", 2, here, 2, heads_first=False)
    engines += [p, d]
    d.fetch(p.lend())
    wait_until(lambda: d.reported("received", "r"))
    assert d.ended["failed"]["r"] == here
    assert "VLLM_KV_CACHE_LAYOUT=LBHNC" in caplog.text
    wait_until(lambda: p.reported("sent", "r"))
    assert "leases_expired" not in p.figures()
