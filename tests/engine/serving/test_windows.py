"""Engines release what windows have passed, and answer as transformers' own class does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_kit.block_checks import check_blocks
from engine_kit.core import (
    CLIENT,
    DUMMY,
    core_request,
    guess_always,
    make_core,
    run,
    step,
    tokens,
)
from engine_kit.handoff import BLOCK, LocalRouter, drive, engines, request
from model_kit.families import SIZES, published

from diptych_engine.control.core import EngineCore
from diptych_engine.execution.layer_groups import LayerGroups, divided
from diptych_engine.scheduling.kv_groups import NULL_BLOCK
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kv_transfer.memory.layout import KVGroup
from diptych_protocol import EngineCoreOutput, SpeculativeConfig

WINDOWED = ("gemma3_text", "gpt_oss", "mistral window")
"""Windows of 20 tokens; two of three layers, one or two of three, and all have one."""
NUM_TOKENS, ANSWER = 60, 30
GUESSES = SpeculativeConfig(prompt_lookup_min=1, num_speculative_tokens=6)
PROMPTS = [
    torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,), generator=torch.manual_seed(seed)).tolist()
    for seed in range(2)
]


Answer = tuple[list[int], list[float]]
"""Tokens, and their log-probabilities."""


class Family:
    """A random model in a folder, and the likeliest answers of transformers' class."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self._model = str(folder), published(name, folder)

    def answer(self, prompt: list[int]) -> Answer:
        whole, logprobs = list(prompt), []
        with torch.inference_mode():
            for _ in range(ANSWER):
                logits = self._model(torch.tensor([whole])).logits[0, -1]
                whole.append(int(logits.argmax()))
                logprobs.append(float(logits.log_softmax(-1).max()))
        return whole[len(prompt) :], logprobs


@pytest.fixture(scope="module", params=WINDOWED)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(family: Family) -> list[Answer]:
    return [family.answer(prompt) for prompt in PROMPTS]


@pytest.fixture
def core(family: Family) -> Iterator[Callable[..., EngineCore]]:
    made: list[EngineCore] = []

    def make(**options: Any) -> EngineCore:
        made.append(make_core(family.folder, block_size=4, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(core: EngineCore, prompts: list[list[int]]) -> list[Answer]:
    requests = [
        core_request(str(number), prompt, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
        for number, prompt in enumerate(prompts)
    ]
    return [told(outputs) for outputs in run(core, *requests).values()]


def told(outputs: list[EngineCoreOutput]) -> Answer:
    rows = [o.new_logprobs.logprobs for o in outputs if o.new_logprobs is not None]
    return tokens(outputs), [row[0] for of_output in rows for row in of_output]


def same(answers: list[Answer], expected: list[Answer]) -> bool:
    return all(
        tokens == expected_tokens and np.allclose(logprobs, expected_logprobs, atol=2e-3)
        for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
            answers, expected, strict=True
        )
    )


@pytest.mark.one_in(2, "options", "family")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 400}, id="whole"),
        pytest.param({"num_blocks": 400, "max_num_batched_tokens": 13}, id="chunks"),
        pytest.param({"num_blocks": 400, "speculative_config": GUESSES}, id="guesses"),
        pytest.param({"num_blocks": 22, "max_num_batched_tokens": 8}, id="preemption"),
    ],
)
def test_answers_are_those_of_transformers(
    core: Callable[..., EngineCore], expected: list[Answer], options: dict[str, Any]
) -> None:
    engine = core(**options)
    guess_always(engine)
    # What passed blocks hold must not matter, be it other requests' data or no numbers at all.
    engine.runner.kv_cache[: engine.runner.num_blocks] = torch.nan  # type: ignore[attr-defined]
    assert same(ask(engine, PROMPTS), expected)
    assert (engine.stats().draft_tokens > 0) == ("speculative_config" in options)
    preempts = options["num_blocks"] < 100
    assert (engine.stats().num_preemptions > 0) == preempts or engine.scheduler.num_groups == 1
    assert same(ask(engine, PROMPTS[:1]), expected[:1]), "behind its own prefix"
    assert preempts or engine.stats().prefix_cache_hits >= NUM_TOKENS - 4
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    check_blocks(engine.scheduler.pool)


def held_by_group(engine: EngineCore) -> list[int]:
    """How many blocks the running request holds in each group."""
    [request] = engine.scheduler.running
    count = engine.scheduler.num_groups
    columns = [request.block_ids[group::count] for group in range(count)]
    return [len(column) - column.count(NULL_BLOCK) for column in columns]


def test_a_window_holds_as_many_blocks_as_it_sees(core: Callable[..., EngineCore]) -> None:
    engine = core(num_blocks=400, max_num_batched_tokens=16)
    engine.add(core_request("long", PROMPTS[0], max_tokens=ANSWER, ignore_eos=True), CLIENT)
    for _ in range(NUM_TOKENS // 16 + ANSWER - 4):
        step(engine)
    groups, held = engine.scheduler.pool.groups.groups, held_by_group(engine)
    assert any(group.window for group in groups)
    for group, count in zip(groups, held, strict=True):
        assert count <= 7 if group.window else count >= 20
    [request] = engine.scheduler.running
    rows = engine.runner._rows  # type: ignore[attr-defined]
    table = rows.block_tables[rows.row_of["long"], : len(request.block_ids)]
    null = engine.runner.num_blocks  # type: ignore[attr-defined]
    assert NULL_BLOCK in request.block_ids
    for at, block in zip(table.tolist(), request.block_ids, strict=True):
        assert at in (null, block), "attention reads no block that may be another request's"


def test_blocks_that_are_released_too_soon_are_noticed(
    core: Callable[..., EngineCore],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault: half of each window is forgotten."""
    right = KVGroup.kept
    monkeypatch.setattr(
        KVGroup, "kept", lambda self, count: right(self, count + 12 * bool(self.window))
    )
    assert not same(ask(core(num_blocks=400), PROMPTS), expected)


PAIRS: dict[str, dict[str, dict[str, Any]]] = {
    "alike": {"p": {"max_num_batched_tokens": 16}, "d": {}},
    "ranks": {"p": {"tensor_parallel_size": 2}, "d": {}},
}


@pytest.mark.parametrize("pair", ["alike", pytest.param("ranks", marks=pytest.mark.slow)])
def test_what_windows_passed_is_not_handed_over(
    family: Family, expected: list[Answer], pair: str
) -> None:
    room = {"num_blocks": 200, "max_model_len": 120}
    with engines(family.folder, **{n: x | room for n, x in PAIRS[pair].items()}) as (p, d):
        fleet = LocalRouter(None, prefill=[p], decode=[d])
        for number, prompt in enumerate(PROMPTS):
            message = request(str(number), prompt, max_tokens=ANSWER, ignore_eos=True)
            [outputs] = fleet.run(message)
            assert list(outputs[-1].outputs[0].token_ids) == expected[number][0]
        groups = d.core.scheduler.pool.groups
        assert groups.windowed
        assert p.hinge.blocks_sent == len(PROMPTS) * len(groups.kept(NUM_TOKENS))
        assert d.prompt_tokens_computed == 0
        assert len(groups.kept(NUM_TOKENS)) < groups.count * NUM_TOKENS // BLOCK


def test_a_prefix_is_fetched_whole_or_computed(family: Family, expected: list[Answer]) -> None:
    room = {"num_blocks": 200, "max_model_len": 120}
    prompt = PROMPTS[0]
    with engines(family.folder, p=room, d=room) as (holder, taker):
        [seat] = LocalRouter(None, decode=[holder]).fleet.of("decode")
        assert seat.lends is not None
        source = msgspec.structs.replace(seat.lends, remote_num_tokens=NUM_TOKENS)
        ask = request("q", prompt, max_tokens=ANSWER, ignore_eos=True)
        for num_there, fetched in ((NUM_TOKENS // 2, 0), (NUM_TOKENS, NUM_TOKENS - BLOCK)):
            drive(holder, request("there", prompt[:num_there], max_tokens=1))
            before = msgspec.structs.replace(taker.hinge)
            answer = drive(taker, msgspec.structs.replace(ask, prefix_source=source), holder)
            assert tokens(answer) == expected[0][0]
            assert taker.hinge.prefix_tokens_fetched - before.prefix_tokens_fetched == fetched
            taker.forget_prefixes()


LAYERS: dict[str, tuple[dict[str, Any], tuple[int | None, ...], int]] = {
    "gemma 3 1b": ({"num_hidden_layers": 26, "full": (5, 11, 17, 23)}, (None, *[512] * 6), 4),
    "gpt-oss": ({"num_hidden_layers": 24, "full": tuple(range(1, 24, 2))}, (None, 512), 12),
    "all alike": ({"num_hidden_layers": 5, "full": ()}, (512,), 5),
    "one of many": ({"num_hidden_layers": 12, "full": (11,)}, (None,), 12),
    "uneven": ({"num_hidden_layers": 5, "full": (0, 1)}, (None, 512, 512), 2),
    "wasteful": ({"num_hidden_layers": 7, "full": (0, 1, 2)}, (None,), 7),
    "none": ({"num_hidden_layers": 4, "full": (0, 1, 2, 3)}, (None,), 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_in_groups_of_one_size_or_in_one(name: str) -> None:
    changes, windows, size = LAYERS[name]
    source = resolve_model(DUMMY)
    model = msgspec.structs.replace(
        source.config,
        num_hidden_layers=changes["num_hidden_layers"],
        full_layers=changes["full"],
        sliding_window=512,
        max_position_embeddings=4096,
    )
    groups: LayerGroups = divided(model)
    assert (groups.windows, groups.num_layers) == (windows, size)
    assert len(set(groups.places)) == model.num_hidden_layers
    if len(windows) > 1:
        for layer, (group, place) in enumerate(groups.places):
            assert windows[group] == model.window_of(layer)
            assert place < size
