"""Both halves of two engines over real UCX, in place of vLLM a test that calls them as it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_scheduler import ONE_GROUP, WINDOWS, prompt
from waits import wait_until

from diptych_kv_transfer.connector import start_hinge
from diptych_kv_transfer.parameters import describe_engine
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.messages import Hello
from diptych_vllm.kv_groups import BlockIds, VllmKVGroups
from diptych_vllm.kv_memory import compat_of, shards_of
from diptych_vllm.lending import Progress
from diptych_vllm.ranks import Ranks
from diptych_vllm.scheduler_half import SchedulerHalf
from diptych_vllm.settings import ConnectorSettings
from diptych_vllm.transfers import Results
from diptych_vllm.worker_half import WorkerHalf

NUM_BLOCKS, LAYERS = 12, 3
SHAPE = (NUM_BLOCKS, 2, 4, 16)


class Engine:
    """One engine's connector."""

    def __init__(
        self, name: str, seed: int, groups: VllmKVGroups = ONE_GROUP, **facts: str | int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv = {
            f"layers.{layer}": torch.rand(SHAPE, generator=generator) for layer in range(LAYERS)
        }
        settings = ConnectorSettings.parse({"load_timeout_s": 20})
        compat = compat_of(self.kv, {"model": "m", **facts}, Ranks(heads=2))
        me = Hello(name, "1", compat)
        driver = start_hinge(settings, me, shards_of(self.kv, NUM_BLOCKS), PUBLIC_KEY)
        self.worker = WorkerHalf(driver)
        self.scheduler = SchedulerHalf(References(PUBLIC_KEY), groups, settings.lease_seconds)
        self.described = describe_engine(me, "127.0.0.1", driver.port, settings.lease_seconds)
        self.scheduler.meet(self.described)

    def step(self) -> None:
        self.worker.obey(self.scheduler.take_orders())

    def ended(self) -> Results | None:
        """What the worker reports; None: nothing yet."""
        found = self.worker.collect()
        return found if found != Results() else None

    def lend(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> dict[str, Any]:
        """Compute a prompt, and answer before the worker hears that it is to be granted."""
        self.scheduler.arrived(prompt(request_id, num_tokens, {"do_remote_decode": True}))
        self.step()
        params = self.scheduler.finished(request_id, block_ids, by_length=True)
        assert params is not None
        return params

    def fetch(self, request_id: str, block_ids: BlockIds, num_tokens: int, params: Any) -> None:
        self.scheduler.arrived(prompt(request_id, num_tokens, params))
        self.step()
        self.scheduler.allocated(request_id, block_ids, self.scheduler.num_elsewhere(request_id, 0))
        self.step()


@pytest.fixture
def p() -> Iterator[Engine]:
    engine = Engine("p", 1)
    yield engine
    engine.worker.close()


@pytest.fixture
def d() -> Iterator[Engine]:
    engine = Engine("d", 2)
    yield engine
    engine.worker.close()


def test_each_block_of_each_layer_arrives_in_its_place_and_nothing_else_is_touched(
    p: Engine, d: Engine
) -> None:
    before = {name: tensor.clone() for name, tensor in d.kv.items()}
    params = p.lend("r", [[7, 3, 4]], 10)
    d.fetch("r", [[1, 2, 9]], 10, params)
    p.step()
    assert wait_until(d.ended) == Results(received={"r"})
    assert wait_until(p.ended) == Results(sent={"r"})
    moved = {"blocks": 3, "bytes": 3 * sum(x[0].nbytes for x in d.kv.values())}
    assert d.worker.take_figures() == {
        "loads_completed": 1,
        **{f"{what}_received": number for what, number in moved.items()},
    }
    assert p.worker.take_figures() == {
        "leases_granted": 1,
        "leases_released": 1,
        **{f"{what}_sent": number for what, number in moved.items()},
    }
    assert d.worker.take_figures() == p.worker.take_figures() == {}
    for name, tensor in d.kv.items():
        assert torch.equal(tensor[[1, 2, 9]], p.kv[name][[7, 3, 4]])
        others = [block for block in range(NUM_BLOCKS) if block not in (1, 2, 9)]
        assert torch.equal(tensor[others], before[name][others])


def test_blocks_of_every_group_arrive_in_their_places_and_null_blocks_stay_as_they_were() -> None:
    """A block of any group is a block of each tensor, as the groups share them."""
    p, d = Engine("p", 1, WINDOWS), Engine("d", 2, WINDOWS)
    try:
        before = {name: tensor.clone() for name, tensor in d.kv.items()}
        there, here = [7, 3, 4, 5, 6, 8, 9, 10], [1, 2, 9, 11, 3, 5, 4, 7]
        params = p.lend("r", [there[:3], [0, *there[3:5]], [0, 0, *there[5:]]], 9)
        p.step()
        d.fetch("r", [here[:3], [0, *here[3:5]], [0, 0, *here[5:]]], 10, params)
        assert wait_until(d.ended) == Results(received={"r"})
        assert wait_until(p.ended) == Results(sent={"r"})
        for name, tensor in d.kv.items():
            assert torch.equal(tensor[here], p.kv[name][there])
            others = [block for block in range(NUM_BLOCKS) if block not in here]
            assert torch.equal(tensor[others], before[name][others])
    finally:
        p.worker.close()
        d.worker.close()


def begin_early(p: Engine, d: Engine) -> None:
    """P computes the first 8 of 10 tokens of a prompt, and D gets their blocks meanwhile."""
    lease_id = "a" * 32
    for_others = {"do_remote_decode": True, "lease_id": lease_id}
    p.scheduler.arrived(prompt("r", 10, for_others))
    p.step()
    announced = p.described.to_dict() | {
        "lease_id": lease_id,
        "remote_num_tokens": 10,
        "proof": References(PUBLIC_KEY).proof_of_engine(p.described),
    }
    d.fetch("r", [[1, 2, 9]], 10, announced)
    p.scheduler.step({"r": Progress(4, [[7]])}, set())
    p.step()
    p.scheduler.step({"r": Progress(8, [[7, 3]])}, set())
    p.step()
    wait_until(lambda: torch.equal(d.kv["layers.2"][[1]], p.kv["layers.2"][[7]]), "a block is here")
    assert d.ended() is None


def test_blocks_arrive_while_others_are_computed_and_count_when_all_are_confirmed(
    p: Engine, d: Engine
) -> None:
    begin_early(p, d)
    assert p.scheduler.finished("r", [[7, 3, 4]], by_length=True) is not None
    p.step()
    assert wait_until(d.ended) == Results(received={"r"})
    assert wait_until(p.ended) == Results(sent={"r"})
    for name, tensor in d.kv.items():
        assert torch.equal(tensor[[1, 2, 9]], p.kv[name][[7, 3, 4]])
    assert p.worker.take_figures()["leases_released"] == 1


@pytest.mark.parametrize("loss", ["preempted", "aborted"])
def test_blocks_that_p_has_lost_while_they_were_read_count_for_nothing(
    p: Engine, d: Engine, loss: str
) -> None:
    begin_early(p, d)
    if loss == "preempted":
        p.scheduler.step({}, {"r"})
    else:
        assert p.scheduler.finished("r", [[]], by_length=False) is None
    p.step()
    assert wait_until(d.ended) == Results(received={"r"}, failed={"r"})
    if loss == "preempted":
        params = p.scheduler.finished("r", [[8, 9, 10]], by_length=True)
        p.step()
        d.fetch("again", [[1, 2, 9]], 10, params)
        assert wait_until(d.ended) == Results(received={"again"})
        assert torch.equal(d.kv["layers.0"][[1, 2, 9]], p.kv["layers.0"][[8, 9, 10]])
        assert wait_until(p.ended) == Results(sent={"r"})


def test_a_lease_that_is_given_up_frees_its_blocks_and_fails_who_comes_later(
    p: Engine, d: Engine
) -> None:
    params = p.lend("r", [[7, 3, 4]], 10)
    p.scheduler.reset()
    p.step()
    assert wait_until(p.ended) == Results(sent={"r"})
    d.fetch("r", [[1, 2, 9]], 10, params)
    assert wait_until(d.ended) == Results(received={"r"}, failed={"r"})
    assert d.worker.take_figures() == {"loads_failed": 1}
    assert p.worker.take_figures()["leases_revoked"] == 1


def test_a_request_that_goes_frees_both_engines(p: Engine, d: Engine) -> None:
    params = p.lend("r", [[7, 3, 4]], 10)
    p.step()
    d.scheduler.arrived(prompt("r", 10, params))
    d.step()
    d.scheduler.finished("r", [[]], by_length=False)
    d.step()
    assert wait_until(p.ended) == Results(sent={"r"})


def test_engines_that_keep_kv_differently_exchange_none(
    p: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    other = Engine("o", 3, model="n")
    try:
        params = p.lend("r", [[7, 3, 4]], 10)
        p.step()
        other.fetch("r", [[1, 2, 9]], 10, params)
        assert wait_until(other.ended) == Results(received={"r"}, failed={"r"})
        assert "model: 'm' there, 'n' here" in caplog.text
        assert wait_until(p.ended) == Results(sent={"r"})
    finally:
        other.worker.close()
