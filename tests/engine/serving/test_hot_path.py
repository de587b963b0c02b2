"""What a decode step does, counted: calls of functions and of torch's operators.

Counts are the same on every machine and every run, unlike times, so they can have ceilings. They
are taken over as many steps as a block has slots: every sixteenth step takes a new block.
CONTRIBUTING.md says how to raise a ceiling.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from engine_kit.core import (
    CLIENT,
    DUMMY,
    VOCABULARY,
    core_request,
    guess_always,
    make_core,
    step,
)
from model_kit.attention_batch import Batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diptych_engine.control.core import EngineCore
from diptych_kernels.cpu_level import CpuLevel, cpu_level
from diptych_kernels.paged_attention import paged_attention, reference
from diptych_protocol import SpeculativeConfig

pytestmark = pytest.mark.skipif(
    cpu_level() is CpuLevel.NONE, reason="ceilings are those of steps with compiled kernels"
)
BLOCK_SIZE = 16
CEILINGS = {1: (366, 43), 64: (1223, 50)}
"""Batch -> calls of Python and built-in functions in a step, and of torch's operators."""


class _Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.new_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not any(made is given for given in args):
            is_view = made._is_view()
            self.new_bytes += 0 if is_view else made.nbytes
        return made


def _calls_a_step(core: EngineCore) -> float:
    count = 0

    def saw(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    try:
        sys.setprofile(saw)
        for _ in range(BLOCK_SIZE):
            step(core)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count / BLOCK_SIZE


def _operators_a_step(core: EngineCore) -> float:
    operators = _Operators()
    with operators:
        for _ in range(BLOCK_SIZE):
            step(core)
    return operators.count / BLOCK_SIZE


@pytest.fixture(params=sorted(CEILINGS))
def batch(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def core(batch: int) -> Iterator[EngineCore]:
    core = _core(batch)
    yield core
    core.close()


def _core(batch: int, **options: Any) -> EngineCore:
    return make_core(
        num_blocks=64 * 40,
        max_num_seqs=batch,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=64 * 512,
        enough_prompt_tokens=64 * 512,
        **options,
    )


def _decode(core: EngineCore, batch: int, context: int) -> None:
    """Have a batch decode whose requests have so many tokens and go on for long."""
    for index in range(batch):
        prompt = [(index + place) % VOCABULARY for place in range(context)]
        core.add(core_request(f"r{index}", prompt, max_tokens=100, ignore_eos=True), CLIENT)
    for _ in range(4):
        step(core)


def _count(core: EngineCore, batch: int, context: int = 32) -> tuple[float, float]:
    _decode(core, batch, context)
    return _calls_a_step(core), _operators_a_step(core)


def test_a_step_stays_below_its_ceilings(core: EngineCore, batch: int) -> None:
    calls, operators = _count(core, batch)
    most_calls, most_operators = CEILINGS[batch]
    assert calls <= most_calls
    assert operators <= most_operators


def test_a_draft_model_computes_nothing_where_the_batch_is_full(
    core: EngineCore, batch: int
) -> None:
    drafting = _core(batch, speculative_config=SpeculativeConfig(method="draft_model", model=DUMMY))
    guess_always(drafting)
    assert _count(drafting, batch)[1] == _count(core, batch)[1]
    assert drafting.stats().draft_tokens == 0
    drafting.close()


def test_a_step_does_not_grow_with_the_context(core: EngineCore, batch: int) -> None:
    short = _count(core, batch)
    core.abort([f"r{index}" for index in range(batch)])
    step(core)
    assert _count(core, batch, context=480) == short


def test_a_step_does_not_grow_with_the_queue(core: EngineCore, batch: int) -> None:
    _decode(core, batch, 32)
    core.add(core_request("w", [1] * 8, max_tokens=8), CLIENT)
    few = _calls_a_step(core), _operators_a_step(core)
    for index in range(400):
        core.add(core_request(f"w{index}", [1] * 8, max_tokens=8), CLIENT)
    assert (_calls_a_step(core), _operators_a_step(core)) == few


def test_attention_does_not_copy_the_contexts() -> None:
    """All memory that torch takes on the way is less than the contexts themselves."""
    batch = Batch([(512, 1)] * 8, heads=9, kv_heads=3, head_dim=64, block_size=BLOCK_SIZE)

    def made(attend: Callable[..., Tensor]) -> int:
        operators = _Operators()
        with operators:
            attend(batch.queries, batch.kv_layer, batch.metadata)
        return operators.new_bytes

    paged_attention(batch.queries, batch.kv_layer, batch.metadata)  # the kernel is tried first
    contexts = 2 * 8 * 512 * 3 * 64 * batch.kv_layer.element_size()
    assert made(paged_attention) < contexts / 4
    assert made(reference.paged_attention) >= contexts, "else this shows nothing"
