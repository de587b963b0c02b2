"""Answers with guessed tokens are those without, token for token, whatever a request asks for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit.block_checks import check_blocks
from engine_kit.core import CLIENT, DUMMY, core_request, guess_always, make_core, run, tokens
from engine_kit.handoff import LocalRouter, engines, prompt_of, request, save_toy
from model_kit.checkpoints import save_adapter, save_cut
from numpy.typing import NDArray

from diptych_engine.control.core import EngineCore
from diptych_engine.execution.sampler import Sampler
from diptych_engine.scheduling import step_results
from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.prefix_cache import PrefixCache
from diptych_engine.scheduling.request import (
    Request,
    RequestStatus,
    ScheduledRequest,
    StepPlan,
)
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    EngineCoreOutput,
    InvalidRequestError,
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    SpeculativeConfig,
    StructuredOutputsParams,
)

EAGER = SpeculativeConfig(prompt_lookup_min=1, num_speculative_tokens=6)
PROMPT = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6]


SMALLER = DUMMY.replace("layers=2", "layers=1&num_attention_heads=2&num_key_value_heads=1")
"""A draft model whose layers have other shapes."""
METHODS = "ngram", "draft_model"


def drafted_by(model: str, count: int = 6) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=model, num_speculative_tokens=count)


def pair(
    model: str = DUMMY, guesses: SpeculativeConfig = EAGER, **options: Any
) -> tuple[EngineCore, EngineCore]:
    """The same engine without and with guesses, as many as it can."""
    plain, guessing = make_core(model, **options), make_core(
        model, speculative_config=guesses, **options
    )  # fmt: skip
    guess_always(guessing)
    return plain, guessing


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module", params=METHODS)
def guesses(request: pytest.FixtureRequest, toy: str) -> SpeculativeConfig:
    """Guesses for the toy: looked up, or what its first layer says."""
    if request.param == "ngram":
        return EAGER
    return drafted_by(save_cut(Path(toy).parent / "draft", toy, 1))


@pytest.fixture(scope="module")
def cores(toy: str, guesses: SpeculativeConfig) -> Iterator[tuple[EngineCore, EngineCore]]:
    made = pair(toy, guesses, num_blocks=200, block_size=4, max_model_len=96, max_num_seqs=32)
    yield made
    for core in made:
        core.close()


def told(outputs: list[EngineCoreOutput]) -> tuple[Any, ...]:
    """All that the client of a request gets, however it was cut."""
    last = outputs[-1]
    rows = [o.new_logprobs for o in outputs if o.new_logprobs is not None]
    return (
        tokens(outputs),
        [row for each in rows for row in each.logprob_token_ids],
        [[round(value, 3) + 0.0 for value in row] for each in rows for row in each.logprobs],
        [rank for each in rows for rank in each.sampled_token_ranks],
        last.finish_reason, last.stop_reason, last.error,
    )  # fmt: skip


def asked(name: str, prompt: list[int], **fields: Any) -> Any:
    return core_request(name, prompt, **{"max_tokens": 70, "eos_token_id": 0, **fields})


JSON = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": ["b", "cd"]}}}}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.4, "top_k": 4, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    "log-probabilities": {"logprobs": 2},
    "penalties": {"presence_penalty": 0.2, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    "a bias": {"logit_bias": {7: 3.0, 8: 3.0}, "temperature": 0.5, "seed": 5},
    "bad words": {"bad_words_token_ids": [[5, 6], [9]]},
    "tokens that end it": {"stop_token_ids": list(range(20, 40)), "min_tokens": 9},
    "an end that is ignored": {"ignore_eos": True, "max_tokens": 33},
    "few tokens": {"max_tokens": 3},
    "a grammar": {"structured_outputs": StructuredOutputsParams(json=json.dumps(JSON))},
    "a grammar, sampled": {
        "structured_outputs": StructuredOutputsParams(regex="((ab|ba)c){3,20}"),
        "temperature": 1.0, "seed": 6, "logprobs": 1,
    },
    "a grammar that allows too much": {
        "structured_outputs": StructuredOutputsParams(regex="(abc)*"), "ignore_eos": True,
    },
}  # fmt: skip


@pytest.mark.one_in(2, "option", "guesses")
@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_answer_is_the_same(
    cores: tuple[EngineCore, EngineCore], option: str, beside: int
) -> None:
    """Alone, and beside others whose prompts and guesses are in the same steps."""
    made = []
    for core in cores:
        others = [
            asked(f"o{i}", prompt_of(i, 20 + i), temperature=0.3 * i, seed=i) for i in range(beside)
        ]
        outputs = run(core, asked("r", PROMPT, **OPTIONS[option]), *others)
        made.append({name: told(each) for name, each in outputs.items()})
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
        check_blocks(core.scheduler.pool)
    assert made[1] == made[0]


def test_an_answer_with_its_end_among_its_guesses_asks_no_function_beyond(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "engine_kit.logits_processors:repeat_once"
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 0]
    for core in pair(logits_processors=[name]):
        outputs = run(core, asked("r", prompt, logits_processors=[name]))["r"]
        assert tokens(outputs) == prompt
        assert outputs[-1].error is None
    assert core.stats().draft_tokens_accepted > 0
    assert not caplog.records


def test_guesses_were_right_and_wrong(cores: tuple[EngineCore, EngineCore]) -> None:
    """Else the tests above would show nothing."""
    stats = [core.stats() for core in cores]
    assert stats[0].draft_tokens == 0
    run(cores[1], asked("r", PROMPT, ignore_eos=True), asked("s", PROMPT, temperature=1.0))
    now = cores[1].stats()
    assert 0 < now.draft_tokens_accepted < now.draft_tokens
    assert sum(now.accepted_at) == now.draft_tokens_accepted
    assert len(now.accepted_at) > 1


@pytest.mark.one_in(2, "options")
@pytest.mark.parametrize("guesses", [EAGER, drafted_by(SMALLER)], ids=METHODS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 20, "block_size": 4, "max_model_len": 80}, id="preemption"),
        pytest.param({"async_scheduling": True}, id="steps ahead"),
        pytest.param({"max_num_batched_tokens": 8}, id="prompts in pieces"),
        pytest.param({"enable_prefix_caching": False}, id="no cache"),
        pytest.param({"weight_packing": "auto", "max_num_seqs": 20}, id="many"),
    ],
)
def test_answers_are_the_same_in_an_engine_with(
    options: dict[str, Any], guesses: SpeculativeConfig
) -> None:
    made = []
    for core in pair(DUMMY, guesses, **options):
        requests = [
            asked(f"r{i}", (PROMPT * 2)[i : 12 + 2 * i], temperature=0.6 * (i % 2), seed=i)
            for i in range(5)
        ]
        made.append({name: tokens(each) for name, each in run(core, *requests).items()})
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    assert core.stats().draft_tokens_accepted > 0
    assert made[1] == made[0]
    if options.get("num_blocks"):
        assert core.stats().num_preemptions > 0


def test_answers_with_adapters_are_the_same(
    toy: str, guesses: SpeculativeConfig, tmp_path: Path
) -> None:
    adapters = [LoRARequest(f"a{i}", i, save_adapter(tmp_path / f"a{i}", i)) for i in (1, 2)]
    made = []
    for core in pair(toy, guesses, max_loras=2):
        requests = [
            asked(f"r{i}", PROMPT, lora_request=adapter, ignore_eos=True)
            for i, adapter in enumerate([*adapters, None])
        ]
        made.append({name: tokens(each) for name, each in run(core, *requests).items()})
    assert core.stats().draft_tokens_accepted > 0
    assert made[1] == made[0]


def test_an_aborted_request_leaves_nothing_behind(cores: tuple[EngineCore, EngineCore]) -> None:
    core = cores[1]
    core.add(asked("gone", PROMPT, ignore_eos=True), CLIENT)
    while not (under_way := core.start_step())[0].guesses:
        core.finish_step(*under_way)
    core.take_outputs()
    core.abort(["gone"])
    core.finish_step(*under_way)
    assert [output.finished for output in core.take_outputs()[CLIENT]] == [True]
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks


@pytest.mark.one_in(2, "move_after")
@pytest.mark.parametrize("move_after", [None, 7, 20])
def test_answers_are_the_same_across_a_hand_off_a_move_and_n_answers(
    toy: str, guesses: SpeculativeConfig, move_after: int | None
) -> None:
    """The second decode engine goes on with guesses from the tokens that it was given."""
    options: dict[str, Any] = {"num_blocks": 128, "speculative_config": guesses}
    wanted = [
        request("a", PROMPT, ignore_eos=True, max_tokens=50),
        request("n", PROMPT[1:], ignore_eos=True, max_tokens=30, n=3, temperature=0.8, seed=2),
    ]
    with engines(toy, alone={}, p=options, d0=options, d1=options) as made:
        for engine in made[1:]:
            guess_always(engine.core)
        router = LocalRouter(None, prefill=made[1:2], decode=made[2:], move_after=move_after)
        answers = [
            [{a.index: a.token_ids for o in outputs for a in o.outputs} for outputs in each]
            for each in (LocalRouter(None, decode=made[:1]).run(*wanted), router.run(*wanted))
        ]
        assert answers[1] == answers[0]
        assert sum(e.core.stats().draft_tokens_accepted for e in made[2:]) > 0
        assert move_after is None or made[3].core.stats().draft_tokens > 0


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_stop_string_ends_an_answer_between_its_guesses(
    toy: str, guesses: SpeculativeConfig, kind: RequestOutputKind
) -> None:
    """Its consumer gets the same text, tokens and log-probabilities from outputs of several."""
    tokenizer = load_tokenizer(resolve_model(toy))
    guessing = {"num_blocks": 128, "speculative_config": guesses}
    with engines(toy, alone={"num_blocks": 128}, guessing=guessing) as made:
        guess_always(made[1].core)
        routers = [LocalRouter(tokenizer, decode=[engine]) for engine in made]
        whole = request("w", PROMPT, ignore_eos=True, max_tokens=60)
        text = routers[0].run(whole)[0][-1].outputs[0].text
        for place in (20, 31, 42):
            ended = request(
                "e", PROMPT, ignore_eos=True, max_tokens=60, stop=[text[place - 3 : place + 2]],
                logprobs=1, output_kind=kind,
            )  # fmt: skip
            answers = []
            for router in routers:
                parts = [a for output in router.run(ended)[0] for a in output.outputs]
                if kind is RequestOutputKind.CUMULATIVE:
                    parts = parts[-1:]
                answers.append(
                    (
                        "".join(part.text for part in parts),
                        [token for part in parts for token in part.token_ids],
                        [sorted(row) for part in parts for row in part.logprobs or ()],
                        (parts[-1].finish_reason, parts[-1].stop_reason),
                    )
                )
            assert answers[1] == answers[0]
            assert len(answers[1][1]) == len(answers[1][2])
        assert made[1].core.stats().draft_tokens_accepted > 0


def test_the_setting_is_given_as_vllm_takes_it() -> None:
    given: Any = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    made = EngineArgs(model="m", speculative_config=given).create_engine_config()
    assert made.speculative_config == SpeculativeConfig(
        num_speculative_tokens=5, prompt_lookup_max=4
    )
    other: Any = given | {"method": "eagle"}
    with pytest.raises(InvalidRequestError, match=r"speculative_config.*eagle"):
        EngineArgs(model="m", speculative_config=other).create_engine_config()


# --- the distribution of sampled tokens -----------------------------------------------------------

CHAIN = torch.tensor([[1.0, 0.2, -0.5], [0.0, 2.0, 0.3], [-1.0, 0.5, 1.5]])
"""Logits of each token after each: a model that looks at one token."""
DRAFT = torch.tensor([[0.5, 0.6, 0.0], [0.5, 0.5, 0.5], [0.0, 1.0, 0.0]])
"""Those of another, which drafts."""
GUESS, START, COUNT = 1, 0, 1000


def twos(monkeypatch: pytest.MonkeyPatch, *, drafted: bool, planted: bool) -> float:
    """Return chi-squared of the first two tokens of many answers, the first one guessed, against
    their exact probabilities: 8 degrees of freedom.

    drafted: by a model, with the same random number; else always the same guess.
    planted: every guess is taken to be right.
    """
    if planted:
        monkeypatch.setattr(step_results, "_was_right", lambda *_: True)
    sampler = Sampler(1, 3, torch.device("cpu"))
    prefixes = PrefixCache(BlockPool(1), 16, enabled=False)
    counts = Counter[tuple[int, ...]]()
    for seed in range(COUNT):
        one = Request(
            request_id="r", client=b"", params=SamplingParams(), token_ids=[START],
            num_prompt_tokens=1, eos_token_id=None, max_total_tokens=9, seed=seed,
        )  # fmt: skip
        one.status = RequestStatus.RUNNING
        sampler.admit(0, one)
        places: NDArray[np.int64] = np.array([1, 2])
        draft = sampler.draft(DRAFT[[START]].clone(), [0], places[:1])
        guess = int(draft.item()) if drafted else GUESS
        shares = [
            ScheduledRequest(one, 0, 1, samples=True),
            ScheduledRequest(one, 1, 1, samples=True, guess=guess),
        ]
        logits = CHAIN[[START, guess]].clone()
        result = sampler.sample_guessed(logits, [0, 0], [one, one], places, [None, guess])()
        plan = StepPlan(shares, 2, [], guesses=True)
        step_results.apply_results(plan, result, prefixes, SchedulerStats())
        while len(one.token_ids) < 3:
            row = CHAIN[one.token_ids[-1:]].clone()
            end = np.array([len(one.token_ids)])
            one.token_ids += sampler.sample(row, [0], [one], end, keep=False)().token_ids
        counts[tuple(one.token_ids[1:3])] += 1
    chances = CHAIN.double().softmax(-1).numpy()
    return float(
        sum(
            (counts[a, b] - expected) ** 2 / expected
            for a in range(3)
            for b in range(3)
            if (expected := COUNT * chances[START, a] * chances[a, b])
        )
    )


@pytest.mark.parametrize("drafted", [False, True])
def test_sampled_tokens_keep_their_distribution(
    monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    found = twos(monkeypatch, drafted=drafted, planted=False)
    assert found < 26.1, "one of a thousand samples is above"


@pytest.mark.parametrize("drafted", [False, True])
def test_the_distribution_would_show_a_wrong_acceptance(
    monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    assert twos(monkeypatch, drafted=drafted, planted=True) > 100
