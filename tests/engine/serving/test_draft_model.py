"""A draft model's state goes where the blocks go; it costs nothing where nobody guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_kit.core import (
    CLIENT,
    DUMMY,
    core_request,
    generate,
    guess_always,
    make_core,
    run,
    step,
    tokens,
)
from engine_kit.handoff import LocalRouter, engines, prompt_of, request, save_toy
from model_kit.checkpoints import save_cut

from diptych.known_models import DEFAULT, KNOWN
from diptych_engine.control.core import EngineCore
from diptych_engine.execution.runner import ModelRunner
from diptych_kv_transfer.memory.layout import Layout
from diptych_protocol import EngineConfig, InvalidRequestError, SpeculativeConfig

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 9][: 4 + i] for i in range(4)]


def drafted_by(model: str) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=model, num_speculative_tokens=4)


def runner_of(core: EngineCore) -> ModelRunner:
    assert isinstance(core.runner, ModelRunner)
    return core.runner


def asked(name: str, prompt: list[int], **fields: Any) -> Any:
    return core_request(name, prompt, **{"max_tokens": 40, "ignore_eos": True, **fields})


def assert_right(core: EngineCore) -> None:
    """Each of its guesses was."""
    stats = core.stats()
    assert stats.draft_tokens > 0
    assert stats.draft_tokens_accepted == stats.draft_tokens


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="usual"),
        pytest.param({"num_blocks": 20, "block_size": 4, "max_model_len": 80}, id="preemption"),
        pytest.param({"max_num_batched_tokens": 8}, id="prompts in pieces"),
        pytest.param({"async_scheduling": True}, id="steps ahead"),
    ],
)
def test_what_the_model_itself_drafts_is_always_right(options: dict[str, Any]) -> None:
    """Sampled tokens too: both draw with the same number. So nothing of its state is ever lost."""
    core = make_core(speculative_config=drafted_by(DUMMY), **options)
    guess_always(core)
    for turn in range(2):  # the second finds prompts in the cache
        run(
            core,
            *(
                asked(f"{turn} {i}", prompt * 2, temperature=0.9 * (i % 2), seed=i)
                for i, prompt in enumerate(PROMPTS)
            ),
        )
    assert_right(core)
    if "num_blocks" in options:
        assert core.stats().num_preemptions > 0
    core.close()


def test_a_guess_is_what_the_draft_model_would_say_after_wrong_ones_too(tmp_path: Path) -> None:
    model = save_toy(tmp_path / "model")
    smaller = save_cut(tmp_path / "draft", model, 1)
    core, alone = make_core(model, speculative_config=drafted_by(smaller)), make_core(smaller)
    guess_always(core)
    core.add(asked("a", PROMPTS[0], max_tokens=60), CLIENT)
    while core.has_work:
        [*known] = core.scheduler.running[0].token_ids if core.scheduler.running else []
        plan, pending = core.start_step()
        guesses = [share.guess for share in plan.scheduled if share.guess is not None]
        if guesses:
            assert guesses == generate(alone, known, max_tokens=len(guesses), ignore_eos=True)
        core.finish_step(plan, pending)
    stats = core.stats()
    assert 0 < stats.draft_tokens_accepted < stats.draft_tokens
    for each in (core, alone):
        each.close()


def test_its_state_survives_a_hand_off_and_moves(tmp_path: Path) -> None:
    model = save_toy(tmp_path / "model")
    options: dict[str, Any] = {"num_blocks": 128, "speculative_config": drafted_by(model)}
    with engines(model, p=options, d0=options, d1=options) as made:
        for engine in made:
            guess_always(engine.core)
        router = LocalRouter(None, prefill=made[:1], decode=made[1:], move_after=9)
        wanted = [
            request(f"r{i}", prompt_of(i, 20 + i), ignore_eos=True, max_tokens=40) for i in range(3)
        ]
        router.run(*wanted)
        assert made[0].core.stats().draft_tokens == 0
        for engine in made[1:]:
            assert engine.core.stats().remote_kv_tokens > 0
            assert_right(engine.core)


def test_it_catches_up_with_an_answer_that_nobody_guessed() -> None:
    """More tokens than a step of its own has."""
    core = make_core(speculative_config=drafted_by(DUMMY), max_num_batched_tokens=8, max_num_seqs=2)
    guess_always(core)
    outputs = run(
        core, asked("a", PROMPTS[0], max_tokens=30), asked("b", PROMPTS[1], max_tokens=60)
    )
    assert [len(tokens(each)) for each in outputs.values()] == [30, 60]
    assert_right(core)
    core.close()


def test_requests_catch_up_one_after_the_other() -> None:
    """Where nobody guessed for long: else a step would last as long as all of their answers."""
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 32}
    core = make_core(speculative_config=drafted_by(DUMMY), **options)
    guess_always(core)
    settings, core.scheduler.speculation = core.scheduler.speculation, None
    for name in "abc":
        core.add(asked(name, PROMPTS[0], max_tokens=60), CLIENT)
    for _ in range(30):
        step(core)
    core.scheduler.speculation = settings
    guessed = []
    for _ in range(3):
        plan, pending = core.start_step()
        shares = [share for share in plan.scheduled if share.guess is not None]
        guessed.append(len({share.request.request_id for share in shares}))
        core.finish_step(plan, pending)
    assert guessed == [1, 2, 3]
    assert_right(core)
    core.close()


def test_engines_exchange_kv_only_with_the_same_draft_model(tmp_path: Path) -> None:
    model = save_toy(tmp_path / "model")
    drafts = [model, save_cut(tmp_path / "draft", model, 1)]
    cores = [make_core(model, speculative_config=drafted_by(draft)) for draft in drafts]
    compat = [core.description.compat for core in cores]
    assert {name for name in compat[0] if compat[0][name] != compat[1][name]} == {"draft_model"}
    geometry = {"block_size": 16, "tensor_parallel_size": 1}
    without = {name: value for name, value in compat[0].items() if name != "draft_model"}
    assert Layout.of(without, geometry) is not None
    assert Layout.of(compat[0], geometry) is None, "blocks of another size cannot be repacked"
    for core in cores:
        core.close()


def test_a_block_holds_both_models() -> None:
    smaller = DUMMY.replace("layers=2", "layers=1")
    plain, drafting = (
        runner_of(make_core(kv_cache_bytes=1 << 20, num_blocks=None, speculative_config=each))
        for each in (None, drafted_by(smaller))
    )
    assert drafting.block_bytes == plain.block_bytes * 3 // 2
    assert drafting.num_blocks == plain.num_blocks * 2 // 3 == len(drafting.kv_cache)
    assert drafting.kv_cache[0].nbytes == drafting.block_bytes


def test_its_weights_sleep_too() -> None:
    core = make_core(speculative_config=drafted_by(DUMMY))
    guess_always(core)
    runner, wanted = runner_of(core), run(core, asked("a", PROMPTS[0]))["a"]
    drafter = runner.drafter
    assert drafter is not None
    runner.collective_rpc("_drop_weights")
    assert not any(x.untyped_storage().nbytes() for x in drafter.model.weight_memory)
    runner.collective_rpc("_restore_weights")
    assert tokens(run(core, asked("b", PROMPTS[0]))["b"]) == tokens(wanted)
    assert_right(core)
    core.close()


@pytest.mark.slow
def test_packed_weights_draft() -> None:
    """The demo's model, of levels of 4 bits, drafts for itself."""
    core = make_core(
        KNOWN[DEFAULT].uri, speculative_config=drafted_by(KNOWN[DEFAULT].uri), weight_packing="auto"
    )
    guess_always(core)
    assert runner_of(core).draft_share == pytest.approx(1.0)
    [outputs] = run(core, asked("a", list(range(1000, 1020)), max_tokens=24)).values()
    assert len(tokens(outputs)) == 24
    stats = core.stats()
    # A chunk of a prompt and single tokens round otherwise.
    assert stats.draft_tokens_accepted >= 0.9 * stats.draft_tokens > 0
    core.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"method": "draft_model"}, "and a model, or neither"),
        ({"model": DUMMY}, "and a model, or neither"),
        ({"method": "draft_model", "model": "/no/such"}, "speculative_config.*does not exist"),
        ({"method": "draft_model", "model": DUMMY.replace("=64", "=65")}, "logits of 65 tokens"),
    ],
)
def test_what_cannot_draft_is_refused(fields: dict[str, str], why: str) -> None:
    settings = msgspec.convert(fields, SpeculativeConfig)
    with pytest.raises(InvalidRequestError, match=why) as refused:
        make_core(speculative_config=settings)
    assert refused.value.param == "speculative_config"


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    model = save_toy(tmp_path / "model")
    draft = Path(save_cut(tmp_path / "draft", model, 1)) / "tokenizer.json"
    swapped = json.loads(draft.read_text())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    draft.write_text(json.dumps(swapped))
    with pytest.raises(InvalidRequestError, match=r"other tokens.*same tokenizer"):
        make_core(model, speculative_config=drafted_by(str(draft.parent)))


def test_ranks_that_share_a_model_have_no_draft_model() -> None:
    config = EngineConfig(model=DUMMY, speculative_config=drafted_by(DUMMY), tensor_parallel_size=2)
    with pytest.raises(InvalidRequestError, match="ngram where tensor_parallel_size"):
        config.check()
