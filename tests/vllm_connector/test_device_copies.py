"""KV on a device goes through copies, after what the device was told to do before.

A copy that fails costs one request. The device of these tests is the host, which does things late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm_engine import Engine
from vllm_scheduler import prompt
from waits import wait_until

from diptych_kernels.block_copy.copies import BlockCopies, Bus
from diptych_protocol import InvalidRequestError
from diptych_vllm.device_copies import copies_of
from diptych_vllm.kv_memory import needs_copies, shards_of

THEIRS, OURS = [7, 3, 4], [1, 2, 9]


class LateDevice(Bus):
    """Does what it was told to do only when somebody waits for it, and no more than that."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._told: list[Callable[[], Any]] = []
        self._done = self._awaited = 0

    def launch(self, operation: Callable[[], Any]) -> None:
        """A step of vLLM launches something."""
        self._told.append(operation)

    def launched(self) -> None:
        self._awaited = len(self._told)

    @contextmanager
    def in_turn(self, *, to_host: bool) -> Iterator[None]:
        self.work(self._awaited)
        with super().in_turn(to_host=to_host):
            yield

    def work(self, until: int) -> None:
        """Do what was told first, up to this operation."""
        for operation in self._told[self._done : until]:
            operation()
        self._done = max(self._done, until)

    def work_off(self) -> None:
        self.work(len(self._told))


class Failing(BlockCopies):
    """Fails as a test says."""

    fails = ""

    def gather(
        self, block_ids: Sequence[int], room: NDArray[np.uint8], index: int = 0, count: int = 1
    ) -> None:
        if self.fails == "gather":
            raise RuntimeError("the device fails")
        super().gather(block_ids, room, index, count)

    def scatter(
        self, room: NDArray[np.uint8], block_ids: Sequence[int], index: int = 0, count: int = 1
    ) -> None:
        if self.fails == "scatter":
            raise RuntimeError("the device fails")
        super().scatter(room, block_ids, index, count)


def device_of(engine: Engine) -> LateDevice:
    [bus] = engine.buses
    assert isinstance(bus, LateDevice)
    return bus


def test_blocks_are_lent_only_when_the_steps_that_compute_them_are_done(
    engines: list[Engine],
) -> None:
    p, d = Engine("p", 1, bus=LateDevice), Engine("d", 2)
    engines += [p, d]
    [layers] = p.local
    computed = [torch.rand_like(layer[THEIRS]) for layer in layers]
    p.scheduler.arrived(prompt("r", 10, {"do_remote_decode": True}))
    p.step()
    for layer, kv in zip(layers, computed, strict=True):
        device_of(p).launch(partial(layer.__setitem__, THEIRS, kv))
    params = p.scheduler.finished("r", [THEIRS], by_length=True)
    p.step()
    for layer in layers:
        device_of(p).launch(layer.zero_)
    d.fetch(params, OURS)
    wait_until(lambda: d.reported("received", "r"))
    wait_until(lambda: p.reported("sent", "r"))
    assert not d.ended["failed"]
    for layer, kv in zip(d.local[0], computed, strict=True):
        assert torch.equal(layer[OURS], kv)


def test_blocks_are_filled_only_when_the_steps_that_may_write_to_them_are_done(
    engines: list[Engine],
) -> None:
    p, d = Engine("p", 1), Engine("d", 2, bus=LateDevice)
    engines += [p, d]
    expected = [layer[THEIRS].clone() for layer in p.local[0]]
    d.scheduler.arrived(prompt("r", 10, p.lend(THEIRS)))
    d.step()
    for layer in d.local[0]:
        device_of(d).launch(layer.zero_)
    d.scheduler.allocated("r", [OURS], d.scheduler.num_elsewhere("r", 0))
    d.step()
    wait_until(lambda: d.reported("received", "r"))
    for layer, kv in zip(d.local[0], expected, strict=True):
        assert torch.equal(layer[OURS], kv), "it is there when it is reported"
    device_of(d).work_off()
    for layer, kv in zip(d.local[0], expected, strict=True):
        assert torch.equal(layer[OURS], kv), "nothing that was launched before comes after it"


@pytest.mark.parametrize("fails", ["gather", "scatter"])
def test_a_copy_that_fails_costs_one_request_and_frees_its_blocks(
    engines: list[Engine], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = (
        Engine(name, seed, bus=LateDevice, copies=Failing) for name, seed in (("p", 1), ("d", 2))
    )
    engines += [p, d]
    expected = [layer[THEIRS].clone() for layer in p.local[0]]
    with monkeypatch.context() as patch:
        patch.setattr(Failing, "fails", fails)
        d.fetch(p.lend(THEIRS), OURS)
        wait_until(lambda: d.reported("received", "r"))
        wait_until(lambda: p.reported("sent", "r"))
    assert d.ended["failed"] == {"r": 1}
    d.fetch(p.lend(THEIRS, "s"), OURS, "s")
    wait_until(lambda: d.reported("received", "s"))
    wait_until(lambda: p.reported("sent", "s"))
    assert d.ended["failed"] == {"r": 1}
    for layer, kv in zip(d.local[0], expected, strict=True):
        assert torch.equal(layer[OURS], kv)


def layers_of(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}


def test_the_host_s_kv_goes_through_copies_only_if_the_settings_say_so() -> None:
    layers = layers_of(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8))
    assert [needs_copies(layers, staging) for staging in ("auto", "always")] == [False, True]


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ({}, "no KV"),
        (layers_of(torch.zeros(3, 2, device="meta")), r"layer layers\.0 is on meta"),
        (
            layers_of(torch.zeros(3, 2), torch.zeros(3, 2, device="meta")),
            r"layer layers\.1 is on meta",
        ),
    ],
    ids=["no layers", "a device of another kind", "two devices"],
)
def test_memory_that_cannot_be_reached_is_refused_by_the_layer(
    layers: dict[str, torch.Tensor], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        needs_copies(layers, "auto")


def test_blocks_that_do_not_follow_each_other_are_refused_with_the_layout_that_would_do() -> None:
    memory = torch.zeros(3, 2, 2, 4, 8)
    with pytest.raises(InvalidRequestError, match=r"layers\.0 .*VLLM_KV_CACHE_LAYOUT=LBHNC"):
        copies_of(layers_of(memory[:, 0], memory[:, 1]))


def test_tokens_may_come_before_heads_in_what_is_copied() -> None:
    layers = layers_of(torch.rand(3, 4, 2, 8).transpose(1, 2))
    copies, launched = copies_of(layers)
    launched()
    [shard] = shards_of(layers, 3, copies)
    assert shard.copies is copies["layers.0"]
    assert shard.block_bytes == 4 * 2 * 8 * 4
