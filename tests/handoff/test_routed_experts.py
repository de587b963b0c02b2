"""The experts of an answer that several engines computed: each tells of the tokens it computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit.core import CLIENT, tokens
from engine_kit.handoff import Engine, LocalRouter, drive, engines, prompt_of, request
from model_kit.mixture import experts_of, published_mixture

from diptych_frontend.text.collector import joined
from diptych_protocol import EngineCoreOutput, RequestOutputKind

LONG = {"max_tokens": 12, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
TELLS = {"enable_return_routed_experts": True}


class Pools:
    """A mixture of experts, one engine that prefills it and two that decode it."""

    def __init__(self, folder: Path, made: list[Engine], model: Any) -> None:
        self.path, self._model = str(folder), model
        self.prefill, self.first, self.second = made

    def check(self, token_ids: list[int], told: Any, known_from: int = 0) -> None:
        expected = experts_of(self._model, token_ids[:-1]).numpy()
        expected[:known_from] = -1
        np.testing.assert_array_equal(told, expected)

    def forget(self) -> None:
        for engine in (self.prefill, self.first, self.second):
            engine.forget_prefixes()


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    folder = tmp_path_factory.mktemp("mixture")
    model = published_mixture(folder)
    options: dict[str, Any] = {"prefill": {"max_num_batched_tokens": 16}, "first": {}, "second": {}}
    with engines(str(folder), **{name: each | TELLS for name, each in options.items()}) as made:
        yield Pools(folder, made, model)


@pytest.mark.parametrize("move_after", [None, 5], ids=["to one", "and to another"])
def test_P5_experts_of_an_answer_that_is_handed_off(pools: Pools, move_after: int | None) -> None:
    pools.forget()
    decode = [pools.first] if move_after is None else [pools.first, pools.second]
    router = LocalRouter(None, prefill=[pools.prefill], decode=decode, move_after=move_after)
    before = pools.first.hinge.leases_released
    prompts = [prompt_of(seed, 20 + 3 * seed) for seed in range(3)]
    read = router.run(*(request(f"r{i}", prompt, **LONG) for i, prompt in enumerate(prompts)))
    for prompt, outputs in zip(prompts, read, strict=True):
        [made] = outputs[-1].outputs
        assert len(made.token_ids) == 12
        pools.check(prompt + made.token_ids, made.routed_experts)
    assert (pools.first.hinge.leases_released > before) == (move_after is not None)


def test_P5_experts_of_several_answers_to_one_prompt(pools: Pools) -> None:
    pools.forget()
    router = LocalRouter(None, prefill=[pools.prefill], decode=[pools.first])
    prompt = prompt_of(5, 30)
    [outputs] = router.run(request("n", prompt, n=3, temperature=1.0, seed=4, **LONG))
    assert len(outputs[-1].outputs) == 3
    for made in outputs[-1].outputs:
        pools.check(prompt + made.token_ids, made.routed_experts)


def test_P5_experts_of_a_prefix_that_came_for_another_request_are_not_known(pools: Pools) -> None:
    """The blocks held an earlier prompt, whose experts must not be told for this one."""
    pools.forget()
    small = {"num_blocks": 16, **TELLS}
    with engines(pools.path, small=small) as [decode]:
        alone = LocalRouter(None, decode=[decode])
        alone.run(request("before", prompt_of(8, 60), **LONG))
        prompt = prompt_of(6, 32)
        LocalRouter(None, prefill=[pools.prefill], decode=[decode]).run(
            request("first", prompt, **LONG)
        )
        outputs = drive(decode, request("again", [*prompt, 9, 8, 7], **LONG))
    assert outputs[0].num_cached_tokens == 32
    pools.check([*prompt, 9, 8, 7, *tokens(outputs)], told(outputs), known_from=32)


def told(outputs: list[EngineCoreOutput]) -> Any:
    return joined([o.routed_experts for o in outputs if o.routed_experts is not None])


def test_P5_a_loss_tells_no_experts_twice(pools: Pools) -> None:
    """The next engine goes on after the tokens that were delivered."""
    pools.forget()
    router = LocalRouter(None, decode=[pools.first, pools.second])
    prompt = prompt_of(7, 25)
    collector = router.send(request("lost", prompt, **LONG))
    name, routed = next(iter(router.table.requests.items()))
    router.until(lambda: len(routed.generated) >= 4)
    assert name in collector.request_ids
    router.lose(routed.engine)
    router.until(lambda: collector.is_ready)
    output = collector.take()
    assert output is not None
    [made] = output.outputs
    assert routed.record.num_attempts == 2
    pools.check(prompt + made.token_ids, made.routed_experts)
    assert pools.first.core.take_outputs().get(CLIENT) is None
