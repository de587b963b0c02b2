"""Hand-offs between engines that keep their KV in different ways: token for token the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from engine_kit import core as core_kit
from engine_kit.control import Owner
from engine_kit.geometry import Engines, Geometry, totals
from engine_kit.handoff import save_toy
from model_kit.sensitive_model import ANSWER_TOKENS, Question, questions, save_sensitive_model
from service_kit import cores, engine_config, generate, healthy, routing

from diptych_protocol import KVTransferConfig, TokensPrompt
from diptych_router.telling.admin_port import router_report

GEOMETRIES: list[Geometry] = [(16, 1), (32, 1), (16, 2)]
"""Block size, ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sensitive_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(model: str) -> list[Question]:
    """A prompt within a block, one that fills blocks of 16 but not of 32, and two longer ones."""
    short = questions(model, 1, shortest=4, longest=14)
    filling = questions(model, 1, shortest=47, longest=47)
    return [*short, *filling, *questions(model, 2, shortest=60, longest=128)]


@pytest.fixture(scope="module", params=["auto", "always"], ids=["direct", "staged"])
def engines(model: str, request: pytest.FixtureRequest) -> Iterator[Engines]:
    engines = Engines(model, staging=request.param)
    yield engines
    engines.close()


@pytest.mark.one_in(3, "engines", "giver", "taker")
@pytest.mark.parametrize(("giver", "taker"), list(product(GEOMETRIES, repeat=2)))
def test_what_is_handed_over_is_what_was_computed(
    engines: Engines, asked: list[Question], giver: Geometry, taker: Geometry
) -> None:
    source, target = engines.of("giver", giver), engines.of("taker", taker)
    target.core.call("reset_prefix_cache", [])  # or what came from another giver would do
    for question in asked:
        before, sent = totals(target), totals(source).bytes_sent
        said = engines.pass_on(source, target, question.prompt, max_tokens=ANSWER_TOKENS)
        assert said == question.answer
        after, num_blocks = totals(target), -(-len(question.prompt) // taker[0])
        assert after.blocks_received - before.blocks_received == num_blocks
        assert after.bytes_received - before.bytes_received == totals(source).bytes_sent - sent


@pytest.mark.parametrize(
    ("giver", "taker", "cached", "fetched"),
    [
        ((16, 1), (32, 1), 64, "64 of 32"),
        ((32, 1), (16, 1), 48, "48 of 16"),
        ((32, 1), (16, 2), 47, "32 of 16"),
        ((16, 2), (32, 1), 50, "32 of 32"),
    ],
)
def test_what_the_taker_remembers_is_not_fetched_and_stays_as_it_is(
    engines: Engines,
    asked: list[Question],
    giver: Geometry,
    taker: Geometry,
    cached: int,
    fetched: str,
) -> None:
    question = asked[-1]
    decode = engines.of("taker", taker)
    decode.core.call("reset_prefix_cache", [])
    engines.alone(decode, question.prompt[:cached], max_tokens=1)
    first, size = map(int, fetched.split(" of "))
    before = totals(decode).blocks_received
    said = engines.pass_on(
        engines.of("giver", giver), decode, question.prompt, max_tokens=ANSWER_TOKENS
    )
    assert said == question.answer
    num_blocks = -(-len(question.prompt) // size) - first // size
    assert totals(decode).blocks_received - before == num_blocks


@pytest.mark.parametrize(
    ("remembered", "holder", "taker"),
    [
        # Each pair once, and each part of the prompt, in `make test`.
        pytest.param(part, *pair, marks=[] if number == at % 3 else pytest.mark.slow)
        for number, part in enumerate((0, 40, 100))
        for at, pair in enumerate(product(GEOMETRIES, repeat=2))
    ],
)
def test_a_prefix_is_fetched_from_blocks_of_any_geometry(
    engines: Engines, asked: list[Question], holder: Geometry, taker: Geometry, remembered: int
) -> None:
    """What is fetched ends with one of the holder's blocks, perhaps within one of the taker's."""
    question = max(asked, key=lambda asked: len(asked.prompt))
    source, target = engines.of("giver", holder), engines.of("taker", taker)
    for engine in (source, target):
        engine.core.call("reset_prefix_cache", [])
    if remembered:
        engines.alone(source, question.prompt[:remembered], max_tokens=1)
    before, computed = totals(target), target.core.stats().prompt_tokens_computed
    said = engines.fetch_prefix(source, target, question.prompt, max_tokens=ANSWER_TOKENS)
    assert said == question.answer
    known = min(remembered, len(question.prompt) - 1) // holder[0] * holder[0]
    after = totals(target)
    assert after.prefix_tokens_fetched - before.prefix_tokens_fetched == known
    assert after.prefix_fetches_completed - before.prefix_fetches_completed == (known > 0)
    computed = target.core.stats().prompt_tokens_computed - computed
    assert computed == len(question.prompt) - known


@pytest.mark.parametrize(("giver", "taker"), [((16, 2), (32, 1)), ((32, 1), (16, 2))])
def test_blocks_travel_while_prefill_computes(
    engines: Engines, asked: list[Question], giver: Geometry, taker: Geometry
) -> None:
    question, lease_id = max(asked, key=lambda asked: len(asked.prompt)), f"{giver[0]:032x}"
    source, target = engines.of("giver", giver), engines.of("taker", taker)
    for engine in (source, target):
        engine.core.call("reset_prefix_cache", [])
    adopted, sent = totals(target).early_loads_adopted, totals(source).blocks_sent
    name = engines.announce(source, target, question.prompt, lease_id, max_tokens=ANSWER_TOKENS)
    params = {"do_remote_decode": True, "lease_id": lease_id}
    source.add(name, question.prompt, max_tokens=1, extra_args={"kv_transfer_params": params})
    source.turn()  # computes 32 tokens
    engines.until(lambda: totals(source).blocks_sent > sent, source)
    assert not source.ended(name)
    engines.until(lambda: source.ended(name))
    lent = source.outputs[name][-1].kv_transfer_params
    target.add(
        name, question.prompt, max_tokens=ANSWER_TOKENS, extra_args={"kv_transfer_params": lent}
    )
    engines.until(lambda: target.ended(name))
    assert target.tokens(name) == question.answer
    assert totals(target).early_loads_adopted == adopted + 1
    engines.until(lambda: source.all_blocks_free and target.all_blocks_free)


@pytest.mark.parametrize(("giver", "taker"), [((16, 2), (32, 1)), ((32, 1), (16, 2))])
def test_a_request_moves_in_the_middle_of_its_answer(
    engines: Engines, asked: list[Question], giver: Geometry, taker: Geometry
) -> None:
    question = asked[2]
    said = engines.move(
        engines.of("giver", giver), engines.of("taker", taker), question.prompt, ANSWER_TOKENS
    )
    assert said == question.answer


def test_many_at_once_share_little_room(model: str, asked: list[Question]) -> None:
    """They wait for each other, and all come through."""
    engines = Engines(model, staging_bytes=1)
    try:
        giver, taker = engines.of("giver", (32, 1)), engines.of("taker", (16, 1))
        lent = [engines.lend(giver, question.prompt) for question in asked]
        names = [
            engines.begin_to_fetch(taker, question.prompt, params, max_tokens=ANSWER_TOKENS)
            for question, params in zip(asked, lent, strict=True)
        ]
        engines.until(lambda: all(taker.ended(name) for name in names))
        assert [taker.tokens(name) for name in names] == [q.answer for q in asked]
        engines.until(lambda: giver.all_blocks_free and taker.all_blocks_free)
    finally:
        engines.close()


def test_an_engine_that_does_not_fit_is_refused_field_by_field() -> None:
    pair = Engines("dummy://?vocab_size=64&hidden_size=64&num_attention_heads=4")
    other = "dummy://?vocab_size=64&hidden_size=32&num_attention_heads=4&num_hidden_layers=3"
    hinge = KVTransferConfig()
    try:
        giver = pair.of("giver", (16, 1))
        taker = pair.adopt(Owner(model=other, kv_transfer=hinge, dtype="bfloat16", block_size=32))
        name = pair.fetch(taker, list(range(40)), pair.lend(giver, list(range(40))))
        error = taker.outputs[name][-1].error or ""
        for said in (
            "dtype: 'float32' there, 'bfloat16' here",
            "head_dim: 16 there, 8 here",
            "num_layers: 2 there, 3 here",
        ):
            assert said in error
        assert "block_size" not in error, "that may differ"
        pair.until(lambda: giver.all_blocks_free and taker.all_blocks_free)
    finally:
        pair.close()


@pytest.mark.slow
async def test_a_router_pairs_what_differs_in_geometry_only(tmp_path: Path, keys_dir: Path) -> None:
    """Real processes: prefill on two ranks, decode on one, in blocks of another size."""
    toy = save_toy(tmp_path / "toy")
    prompt = [1 + index * index % 63 for index in range(75)]
    expected = await asyncio.to_thread(alone, toy, prompt)
    small = {"num_blocks": 64, "max_num_seqs": 8}
    with cores(
        keys_dir,
        engine_config("p", toy, tensor_parallel_size=2, **small),
        engine_config("d", toy, block_size=32, **small),
    ) as (prefill, decode):
        async with routing(toy, keys_dir, [prefill.address], [decode.address]) as client:
            await healthy(client)
            output = await generate(client, TokensPrompt(prompt_token_ids=prompt), ignore_eos=True)
            assert list(output.outputs[0].token_ids) == expected
            assert output.metrics["prefill"] == "p"
            (canary,) = router_report(client).canaries
            assert (canary.ok, canary.computed_by_decode) == (True, 0)


def alone(model: str, prompt: list[int]) -> list[int]:
    """What one engine says that does everything itself."""
    return core_kit.generate(core_kit.make_core(model), prompt, max_tokens=16, ignore_eos=True)
