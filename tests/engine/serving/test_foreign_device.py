"""The engine's path for GPUs, on a device whose memory the host cannot read: a core answers there
as it does on the CPU, the host waits for nothing but results, and KV crosses the hinge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import foreign_device
from engine_kit.control import Owner
from engine_kit.core import core_request as request
from engine_kit.core import generate, make_core, run, tokens
from engine_kit.foreign_device import DEVICE, ForeignTensor, place
from engine_kit.geometry import Engines, totals
from model_kit.gguf import save_gguf
from model_kit.mixture import answer_of, experts_of, published_mixture
from model_kit.sensitive_model import Question, questions, save_sensitive_model

from diptych_frontend.text.collector import joined
from diptych_kernels.block_copy import triton as block_copy
from diptych_kernels.block_copy.copies import BlockCopies
from diptych_kernels.cpu_level import CpuLevel, forced
from diptych_kernels.packed_product import triton as packed_product
from diptych_kernels.sampling import triton as sampling
from diptych_protocol import KVTransferConfig

HINGE = KVTransferConfig()
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 1}
"""An engine records a decode of each number of rows when it starts, which takes most of its time
in the interpreter. One test has several rows."""
CHUNK, ANSWER_TOKENS = 16, 3
"""Prompts are computed in chunks; of all but the last nobody waits for a result."""
BOTH_WAYS = pytest.mark.parametrize(
    "ahead",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["step by step", "steps ahead"],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # The interpreter runs attention's programs for each head.
    return save_sensitive_model(tmp_path_factory.mktemp("model"), heads=1)


@pytest.fixture(scope="module")
def asked(model: str) -> list[Question]:
    return questions(model, 2, shortest=20, longest=24)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Engines that are made are there, until it is undone."""
    with monkeypatch.context() as patch:
        foreign_device.install(patch)
        yield patch
        assert not foreign_device.device.waits, "the host waited for the device"
    foreign_device.device.waits.clear()


def test_its_values_are_not_the_hosts() -> None:
    there = torch.arange(4.0).to(DEVICE)
    assert isinstance(there, ForeignTensor)
    for look in (there.numpy, partial(np.asarray, there)):
        with pytest.raises(RuntimeError):
            look()
    with pytest.raises(RuntimeError, match="a tensor of the host"):
        there + torch.ones(4)
    assert not foreign_device.device.waits
    assert there.sum().item() == 6
    assert there.tolist() == [0, 1, 2, 3]
    assert len(foreign_device.device.waits) == 2
    foreign_device.device.waits.clear()


def test_a_copy_that_nobody_waits_for_is_not_there() -> None:
    there, here = torch.arange(4.0).to(DEVICE), torch.zeros(4)
    here.copy_(there, non_blocking=True)
    there.zero_()
    assert here.tolist() != [0, 1, 2, 3]
    foreign_device.device.synchronize()
    assert here.tolist() == [0, 1, 2, 3]
    assert not foreign_device.device.waits


@pytest.mark.filterwarnings(
    "ignore:divide by zero"
)  # of the log of a uniform 0, in the interpreter
@BOTH_WAYS
def test_a_core_answers_there_as_on_the_cpu(
    model: str, asked: list[Question], foreign: pytest.MonkeyPatch, ahead: bool
) -> None:
    greedy = [
        request(f"g{i}", each.prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for i, each in enumerate(asked)
    ]
    drawn = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 5, "max_tokens": 3}
    options = {**OPTIONS, "max_num_seqs": 3, "max_num_batched_tokens": CHUNK}
    core = make_core(model, async_scheduling=ahead, **options)
    assert core.runner.kv_cache.device == DEVICE  # type: ignore[attr-defined]
    try:
        foreign_device.device.waits.clear()
        made = run(core, *greedy, request("drawn", asked[0].prompt, **drawn))
    finally:
        core.close()
    assert [tokens(made[f"g{i}"]) for i in range(len(asked))] == [
        each.answer[:ANSWER_TOKENS] for each in asked
    ]
    assert len(tokens(made["drawn"])) == 3


@pytest.mark.filterwarnings("ignore:divide by zero")
@BOTH_WAYS
@pytest.mark.parametrize("tells", [False, True], ids=["recorded", "tells its choices"])
def test_a_mixture_of_experts_answers_there_too(
    tmp_path: Path, foreign: pytest.MonkeyPatch, ahead: bool, tells: bool
) -> None:
    """The host waits for no expert. Choices, if asked for, come with the tokens."""
    model = published_mixture(tmp_path, mlp_only_layers=[1])
    prompt = [(7 * place) % 64 for place in range(20)]
    core = make_core(
        str(tmp_path), async_scheduling=ahead, enable_return_routed_experts=tells, **OPTIONS
    )
    try:
        foreign_device.device.waits.clear()
        [outputs] = run(core, request("r", prompt, max_tokens=3, ignore_eos=True)).values()
    finally:
        core.close()
    assert not foreign_device.device.waits
    assert tokens(outputs) == answer_of(model, prompt, 3)
    told = joined([o.routed_experts for o in outputs if o.routed_experts is not None])
    expected = experts_of(model, (prompt + tokens(outputs))[:-1]) if tells else None
    assert (told is None) == (expected is None)
    if told is not None and expected is not None:
        assert told.tolist() == expected.tolist()


def test_a_copy_waits_for_the_step_that_wrote_its_blocks_and_for_none_after_it(
    model: str, foreign: pytest.MonkeyPatch
) -> None:
    """A prefill engine computes all the time."""
    streams: list[foreign_device.Stream] = []

    class Known(foreign_device.Stream):
        def __init__(self, of: torch.device) -> None:
            super().__init__(of)
            streams.append(self)

    foreign.setattr(torch.cuda, "Stream", Known)
    core = make_core(model, kv_transfer=HINGE, max_num_batched_tokens=CHUNK, **OPTIONS)
    try:
        [bus_stream] = streams
        assert isinstance(core.mark_launched, MethodType)
        bus: Any = core.mark_launched.__self__
        copies = BlockCopies(core.runner.kv_memory()[0], bus)  # type: ignore[attr-defined]
        room = copies.host_room(copies.block_bytes)
        core.add(request("r", [*range(60)] * 2, max_tokens=1), b"client")
        core.finish_step(*core.start_step())
        first = foreign_device.device.launches
        under_way = core.start_step()
        both = foreign_device.device.launches
        copies.gather([0], room)
        assert bus_stream.awaited.pop() <= first < both
        copies.scatter(room, [9])
        assert bus_stream.awaited.pop() >= both, "a step may still write there for nobody"
        core.finish_step(*under_way)
        copies.gather([0], room)
        assert first < bus_stream.awaited.pop() <= both
    finally:
        core.close()


def test_serving_goes_on_with_what_was_recorded_until_it_has_moved(
    model: str, asked: list[Question], foreign: pytest.MonkeyPatch
) -> None:
    """Sleep takes weights and KV away; other calls of workers leave them where they are."""
    recorded = Counter[int]()
    record = foreign_device.Pools.record

    def counted(pools: foreign_device.Pools, graph: Any, pool: int, **options: Any) -> Any:
        recorded[pool] += 1
        return record(pools, graph, pool, **options)

    foreign.setattr(torch.cuda, "graph", partial(counted, foreign_device.Pools()))
    core = make_core(model, **OPTIONS)
    try:
        [question, *_] = asked
        assert list(recorded.values()) == [1], "warm-up has recorded a decode"
        core.runner.collective_rpc("rank")
        core.runner.collective_rpc("_reload_weights")
        assert generate(core, question.prompt, max_tokens=2) == question.answer[:2]
        assert list(recorded.values()) == [1]
        for call in ("_put_weights_aside", "_drop_kv_cache", "_restore_weights"):
            core.runner.collective_rpc(call)
        core.runner.collective_rpc("_restore_kv_cache")
        core.call("reset_prefix_cache", [])
        assert generate(core, question.prompt, max_tokens=2) == question.answer[:2]
        assert list(recorded.values()) == [1, 1]
        foreign_device.device.waits.clear()  # weights that were put aside
    finally:
        core.close()


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("packing", [pytest.param("q4", marks=pytest.mark.slow), "auto"])
def test_packed_matrices_are_multiplied_there(
    tmp_path: Path, foreign: pytest.MonkeyPatch, packing: str
) -> None:
    """Rounded, or as a GGUF file has them: the answer is that of plain matrices of the same values,
    which have no memory there; also after sleep."""
    gguf = tmp_path / "model.gguf"
    path = save_gguf(gguf) if packing == "auto" else save_sensitive_model(tmp_path)
    prompt = [(5 * i) % 60 for i in range(20)]
    foreign.setattr(packed_product, "FEW_ROWS", 16)  # the prompt has many
    place(foreign, torch.device("cpu"))
    with forced(CpuLevel.NONE):
        plain = make_core(path, weight_packing=packing, kv_cache_dtype="float32", **OPTIONS)
        expected = generate(plain, prompt, max_tokens=ANSWER_TOKENS)
        plain.close()
    place(foreign, DEVICE)
    core = make_core(path, weight_packing=packing, **OPTIONS)
    try:
        runner: Any = core.runner
        linears = [packable.linear for packable in runner.model.packables]
        assert all(linear.packed for linear in linears)
        assert not any(linear.weight.untyped_storage().nbytes() for linear in linears)
        foreign_device.device.waits.clear()
        assert generate(core, prompt, max_tokens=ANSWER_TOKENS) == expected
        assert not foreign_device.device.waits
        for call in ("_put_weights_aside", "_restore_weights"):
            runner.collective_rpc(call)
        assert generate(core, prompt, max_tokens=2) == expected[:2]
    finally:
        core.close()
    foreign_device.device.waits.clear()  # weights that were put aside


def test_either_kernel_that_draws_is_called_before_anybody_asks(
    model: str, foreign: pytest.MonkeyPatch
) -> None:
    """The first request with a filter would wait until it is compiled."""
    drawn = Counter[bool]()
    sample = sampling.sample

    def counted(*args: Any) -> torch.Tensor:
        drawn[args[3] is not None] += 1
        return sample(*args)

    foreign.setattr(sampling, "sample", counted)
    make_core(model, **OPTIONS).close()
    assert set(drawn) == {False, True}


@pytest.mark.parametrize(
    ("giver", "taker"),
    [
        pytest.param("foreign", "foreign", marks=pytest.mark.slow),
        ("foreign", "cpu"),
        ("cpu", "foreign"),
    ],
    ids=lambda place: place,
)
def test_kv_crosses_from_and_to_it(
    model: str, asked: list[Question], foreign: pytest.MonkeyPatch, giver: str, taker: str
) -> None:
    """Gathered and scattered by the kernel for GPUs, and complete on the host when it is sent."""
    copied = Counter[str]()
    for name in ("gather_blocks", "scatter_blocks"):
        foreign.setattr(block_copy, name, counting(copied, name, getattr(block_copy, name)))
    both = Engines(model)
    try:
        made = []
        for role, where in (("giver", giver), ("taker", taker)):
            place(foreign, torch.device(where))
            made.append(
                both.adopt(Owner(model=model, engine_id=role, kv_transfer=HINGE, **OPTIONS))
            )
        prefill, decode = made
        copied.clear()
        foreign_device.device.waits.clear()
        question = asked[0]
        said = both.pass_on(prefill, decode, question.prompt, max_tokens=ANSWER_TOKENS)
        assert said == question.answer[:ANSWER_TOKENS]
        assert bool(copied["gather_blocks"]) == (giver == "foreign")
        assert bool(copied["scatter_blocks"]) == (taker == "foreign")
        both.until(lambda: not totals(prefill).staging_bytes + totals(decode).staging_bytes)
    finally:
        both.close()


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_kv_of_8_bit_floats_crosses_as_it_is(
    model: str, asked: list[Question], foreign: pytest.MonkeyPatch
) -> None:
    """The answer is that of one engine with such a cache, whose blocks have a quarter of float32's
    bytes."""
    both = Engines(model)
    try:
        prefill, decode = (
            both.adopt(
                Owner(
                    model=model, engine_id=role, kv_transfer=HINGE, kv_cache_dtype="fp8", **OPTIONS
                )
            )
            for role in ("giver", "taker")
        )
        runner: Any = decode.core.runner
        assert runner.kv_cache.dtype is torch.float8_e4m3fn
        assert runner.kv_cache[0].nbytes == runner.block_bytes == runner.kv_cache[0].numel()
        prompt = asked[0].prompt
        alone = both.alone(prefill, prompt, max_tokens=ANSWER_TOKENS)
        assert both.pass_on(prefill, decode, prompt, max_tokens=ANSWER_TOKENS) == alone
    finally:
        both.close()


def counting(counts: Counter[str], name: str, function: Callable[..., None]) -> Callable[..., None]:
    """The same function; its calls are counted."""

    def call(*args: Any) -> None:
        counts[name] += 1
        function(*args)

    return call
