"""Engines with other numbers of ranks than each other, over real UCX: each rank gets its heads."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from vllm_engine import Engine
from vllm_scheduler import prompt
from waits import wait_until

from diptych_kernels.block_copy.copies import Bus
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_vllm.lending import Progress
from diptych_vllm.worker_half import WorkerHalf

THEIRS, OURS = [7, 3, 4], [1, 2, 9]
"""Where ten tokens are, in P and in D."""
PAIRS = [(2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (1, 4), (4, 1)]


def has_sent(worker: WorkerHalf) -> bool:
    return "r" in worker.collect().sent


def cpu_bus() -> Bus:
    return Bus(torch.device("cpu"))


@pytest.mark.parametrize(
    ("there", "here", "heads", "copied"),
    [
        # Each pair once, and each number of heads, in `make test`.
        *(
            pytest.param(*pair, heads, "", marks=[] if heads == 1 << at % 3 else pytest.mark.slow)
            for at, pair in enumerate(PAIRS)
            for heads in (1, 2, 4)
        ),
        *(
            pytest.param(*pair, 2, "pd", marks=[] if at % 2 else pytest.mark.slow)
            for at, pair in enumerate(PAIRS)
        ),
        *((*pair, 2, end) for pair in ((2, 1), (1, 2)) for end in ("p", "d")),
    ],
)
def test_each_rank_gets_its_heads_of_each_block_and_every_rank_is_free_again(
    engines: list[Engine], there: int, here: int, heads: int, copied: str
) -> None:
    """Also where KV goes through copies, at either end."""
    p = Engine("p", 1, there, heads, bus=cpu_bus if "p" in copied else None)
    d = Engine("d", 2, here, heads, bus=cpu_bus if "d" in copied else None)
    engines += [p, d]
    expected = [layer.clone() for layer in d.kv]
    for mine, theirs in zip(expected, p.kv, strict=True):
        mine[OURS] = theirs[THEIRS]
    d.fetch(p.lend(THEIRS), OURS)
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
    d.fetch(announced, OURS)
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
    params = p.lend(THEIRS)
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
    params = p.lend(THEIRS)
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
    params = p.lend(THEIRS)
    p.workers[0].close()
    d.fetch(params, OURS)
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
    d.fetch(p.lend(THEIRS), OURS)
    wait_until(lambda: d.reported("received", "r"))
    assert d.ended["failed"]["r"] == here
    assert "VLLM_KV_CACHE_LAYOUT=LBHNC" in caplog.text
    wait_until(lambda: p.reported("sent", "r"))
    assert "leases_expired" not in p.figures()
