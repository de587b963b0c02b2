"""KV that was computed with other weights is never used: an engine that was started anew has its
model's source, beside others that have a trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_kit.core import tokens
from engine_kit.handoff import (
    Engine,
    LocalRouter,
    drive,
    engines,
    prompt_of,
    request,
    save_toy,
)
from engine_kit.pooling import runner_of

from diptych_protocol import (
    Array,
    DiptychError,
    KVTransferParams,
    WeightTransferUpdateRequest,
)

PROMPT = prompt_of(3, 38)
ANSWER: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """A prefill engine, a decode engine, and one that serves as the measure."""
    model = save_toy(tmp_path_factory.mktemp("toy") / "model")
    with engines(model, p={}, d={}, alone={}) as made:
        yield made


def call(engine: Engine, method: str, *args: Any) -> None:
    answer = engine.core.call(method, list(args))
    while isinstance(answer, Future) and not answer.done():
        engine.turn()


def train(engine: Engine, factor: float = 1.5) -> None:
    """Give an engine weights that its model's source does not have."""
    own = dict(runner_of(engine.core).model.named_parameters())
    new = {name: (tensor * factor).contiguous() for name, tensor in own.items()}
    arrays = [Array("float32", tuple(t.shape), t.numpy().tobytes()) for t in new.values()]
    call(engine, "pause_generation", "wait")
    call(engine, "start_weight_update", False)
    call(engine, "update_weights", WeightTransferUpdateRequest(list(new), arrays))
    call(engine, "finish_weight_update")
    call(engine, "resume_generation")


def read_source(engine: Engine) -> None:
    """Give an engine what a core that is started anew has."""
    call(engine, "pause_generation", "wait")
    call(engine, "reload_weights")
    call(engine, "resume_generation")


def answer(engine: Engine, prompt: list[int] = PROMPT, **fields: Any) -> list[int]:
    engine.forget_prefixes()
    return tokens(drive(engine, request(f"of {engine.name}", prompt, **{**ANSWER, **fields})))


def routed(p: Engine, d: Engine) -> list[int]:
    for engine in (p, d):
        engine.forget_prefixes()
    router = LocalRouter(None, prefill=[p], decode=[d])
    try:
        [outputs] = router.run(request("q", PROMPT, **ANSWER))
    finally:
        router.settle()
    return outputs[-1].outputs[0].token_ids


def test_an_engine_with_other_weights_hands_nothing_over(pools: list[Engine]) -> None:
    p, d, alone = pools
    of_source = answer(alone)
    train(p)
    before = d.hinge.blocks_received
    with pytest.raises(DiptychError, match="of other weights"):
        routed(p, d)
    assert d.hinge.blocks_received == before
    train(d)
    train(alone)
    trained = answer(alone)
    assert trained != of_source
    assert routed(p, d) == trained
    assert d.hinge.blocks_received > before, "the same weights, by the same updates"
    read_source(d)
    read_source(p)
    assert routed(p, d) == of_source


def test_an_engine_with_other_weights_lends_no_prefix(pools: list[Engine]) -> None:
    holder, taker, _ = pools
    expected = answer(taker)
    taker.forget_prefixes()
    train(holder)
    answer(holder)
    [seat] = LocalRouter(None, decode=[holder]).fleet.of("decode")
    assert seat.lends is not None
    source: KVTransferParams = msgspec.structs.replace(seat.lends, remote_num_tokens=len(PROMPT))
    message = msgspec.structs.replace(request("q", PROMPT, **ANSWER), prefix_source=source)
    assert tokens(drive(taker, message, holder)) == expected
    assert (taker.hinge.prefix_fetches, taker.hinge.prefix_fetches_completed) == (1, 0)


def test_an_engine_that_read_other_files_of_the_same_place_shares_no_kv(tmp_path: Path) -> None:
    """A trainer, or a download, has put new files in the place of the old ones."""
    model, other = save_toy(tmp_path / "model"), save_toy(tmp_path / "other", seed=2)
    with engines(model, p={}) as [p]:
        of_old = answer(p)
        Path(other, "model.safetensors").replace(Path(model, "model.safetensors"))
        with engines(model, d={}) as [d]:
            of_new = answer(d)
            assert (answer(p), of_new != of_old) == (of_old, True)
            with pytest.raises(DiptychError, match="of other weights"):
                routed(p, d)
            read_source(p)
            assert routed(p, d) == of_new
            for engine in (p, d):
                call(engine, "sleep", 2)
                call(engine, "wake_up")
            assert routed(p, d) == of_new


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("weight_packing", {"weight_packing": "q8"}),
        ("weight_packing", {"weight_packing": "q4"}),
        ("activations", {"activations": "q8"}),
        ("computed_in", {"dtype": "bfloat16"}),
    ],
)
def test_an_engine_that_was_told_to_compute_otherwise_shares_no_kv(
    name: str, told: dict[str, Any], tmp_path: Path
) -> None:
    """Its KV has the same type, shape and place, and other values."""
    model, same = save_toy(tmp_path / "model"), {"kv_cache_dtype": "bfloat16"}
    with engines(model, p=same, d=same | told, alone=same | told) as [p, d, alone]:
        said = [engine.core.description for engine in (p, d)]
        assert {x for x in said[1].compat if said[0].compat.get(x) != said[1].compat[x]} == {name}
        assert (routed(p, d) != [], d.hinge.blocks_received) == (True, 0)
        assert (routed(alone, d), d.hinge.blocks_received > 0) == (answer(alone), True)
