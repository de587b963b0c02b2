"""Which tokens are guessed and how many, and that a scheduler with guesses generates the same."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each
from engine_kit.toy_engine import ToyRunner, make_request, make_scheduler, run, step
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.scheduling.guesses import Guesser, look_up, pay, worthwhile
from diptych_frontend.fair_share import OUTPUT_WEIGHT
from diptych_protocol import EngineConfig, InvalidRequestError, SpeculativeConfig

EAGER = SpeculativeConfig(prompt_lookup_min=1, num_speculative_tokens=5)


@each(
    ("tokens", "shortest", "longest", "found"),
    [
        pytest.param([1, 2, 3, 4, 5, 1, 2], 2, 4, [3, 4, 5], id="it stood before"),
        pytest.param([1, 2, 3, 4, 5, 1, 2], 3, 4, [], id="too little of it did"),
        pytest.param([7, 2, 5, 8, 7, 2, 6, 9, 7, 2], 1, 4, [6, 9, 7], id="the last place"),
        pytest.param([4, 7, 2, 5, 8, 7, 2, 6, 4, 7, 2], 1, 4, [5, 8, 7], id="more of it did there"),
        pytest.param([4, 7, 2, 5, 8, 7, 2, 6, 4, 7, 2], 1, 2, [6, 4, 7], id="all that is compared"),
        pytest.param([3, 1, 2, 1, 2], 2, 8, [1, 2, 1], id="a period goes on"),
        pytest.param([1], 1, 8, [], id="one token"),
        pytest.param([1, 2, 3], 1, 8, [], id="all are new"),
    ],
)  # fmt: skip
def test_what_followed_the_last_tokens_is_guessed(
    tokens: list[int], shortest: int, longest: int, found: list[int]
) -> None:
    assert look_up(np.array(tokens, np.int32), shortest, longest, 3).tolist() == found


@given(
    st.floats(0, 1), st.integers(1, 70), st.sampled_from([0.0, 3.0, 64.0]), st.integers(0, 20)
)  # fmt: skip
def test_as_many_are_guessed_as_get_the_most_tokens_from_a_second(
    chance: float, rows: int, spare: float, most: int
) -> None:
    def rate(count: int) -> float:
        tokens = rows + sum(chance**i for i in range(1, count + 1))
        return tokens / (spare + rows + count)

    count = worthwhile(chance, rows, spare, most)
    assert rate(count) == pytest.approx(max(map(rate, range(most + 1))), rel=1e-9)


@given(
    st.floats(0, 20), st.integers(1, 40), st.integers(1, 70), st.sampled_from([3.0, 64.0]),
    st.sampled_from([0.0, 32.0]),
)  # fmt: skip
def test_guesses_pay_if_they_gain_more_than_the_wait_for_tokens_takes(
    gain: float, guesses: int, rows: int, spare: float, lost: float
) -> None:
    with_them, without = (rows + gain) / (spare + rows + guesses + lost), rows / (spare + rows)
    if abs(with_them - without) > 1e-9:
        assert pay(gain, guesses, rows, spare, lost) == (with_them > without)


def test_a_request_guesses_once_its_last_token_would_have_been_guessed() -> None:
    """Until then a guess costs no row; one that was wrong ends them until others would be right."""
    guesser, counts = Guesser(), []
    for tokens in ([7, 8, 9, 1], [7, 8, 9, 1, 7], [7, 8, 9, 1, 7, 8], [7, 8, 9, 1, 7, 8, 9]):
        guesser.check(tokens, EAGER)
        counts.append(worthwhile(guesser.chance(len(tokens)), 1, 3.0, 16))
    assert counts == [0, 0, 2, 3]
    for known in (7, 8):
        guesser.learn(known, right=False)
    assert worthwhile(guesser.chance(9), 4, 3.0, 16) == 0


def test_guesses_grow_while_they_are_right_and_end_when_the_batch_is_full() -> None:
    guesser = Guesser()
    counts = []
    for known in range(10, 40):
        guesser.learn(known, right=True)
        counts.append(worthwhile(guesser.chance(known), 1, 3.0, 16))
    assert counts == sorted(counts)
    assert counts[0] <= 2
    assert counts[-1] >= 8
    assert worthwhile(guesser.chance(40), 200, 3.0, 16) == 0


def looping(tokens: list[int]) -> int:
    """Depends on every token, and yet repeats itself."""
    return (tokens[-1] + 2 * tokens[-2] + (sum(tokens[:-8]) % 5 == 0)) % 4


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(looping(tokens))
    return tokens


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=16), st.integers(1, 24)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100)
@given(prompts, st.integers(17, 30), st.integers(1, 8), st.integers(8, 24))
def test_any_batch_generates_what_each_request_would_alone_without_guesses(
    work: list[tuple[list[int], int]], num_blocks: int, seqs: int, budget: int
) -> None:
    """With too few blocks as well: no guess is found in a cached block, or computed from one."""
    runner = ToyRunner(num_rows=seqs, model=looping)
    scheduler = make_scheduler(
        num_blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, speculation=EAGER,
        spare_rows=64.0,
    )  # fmt: skip
    for turn in range(2):
        answers = []
        for name, (prompt, count) in enumerate(work):
            begin = prompt if turn == 0 else expected(prompt, count)
            request = make_request(f"{turn} {name}", begin, count)
            answers.append((request, expected(begin, count)))
            scheduler.add(request)
        run(scheduler, runner)
        for request, answer in answers:
            assert request.token_ids == answer
        assert scheduler.pool.num_free == num_blocks
    stats = scheduler.stats
    assert stats.draft_tokens_accepted == sum(stats.accepted_at)
    assert stats.draft_tokens_accepted <= stats.draft_tokens
    assert stats.tokens_generated == 2 * sum(count for _, count in work)


def test_several_tokens_come_in_one_output() -> None:
    runner = ToyRunner(model=lambda _: 1)
    scheduler = make_scheduler(16, speculation=EAGER, spare_rows=64.0)
    scheduler.add(make_request("a", [1, 1, 1], 7))
    step(scheduler, runner)
    plan = scheduler.schedule()
    assert [(share.start, share.guess) for share in plan.scheduled] == [
        (3, None), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1),
    ]  # fmt: skip
    [made] = scheduler.update(plan, runner.execute(plan))
    assert made.output.new_token_ids == [1] * 6
    assert scheduler.snapshot().accepted_at == [1] * 5


def test_an_answer_ends_within_its_guesses() -> None:
    runner = ToyRunner(model=lambda _: 1)
    scheduler = make_scheduler(16, speculation=EAGER, spare_rows=64.0)
    request = make_request("a", [1, 1, 1], 9)
    request.params.stop_token_ids = [1]
    request.params.min_tokens = 4
    scheduler.add(request)
    run(scheduler, runner)
    assert request.num_output_tokens == 4
    assert scheduler.stats.draft_tokens_accepted == 2


def test_a_full_batch_has_no_guesses() -> None:
    runner = ToyRunner(num_rows=2, model=lambda _: 1)
    scheduler = make_scheduler(16, max_num_seqs=2, speculation=EAGER, spare_rows=64.0)
    for name in "ab":
        scheduler.add(make_request(name, [1, 1, 1], 6))
    run(scheduler, runner)
    assert scheduler.stats.draft_tokens == 0


def test_guesses_take_no_block_that_another_request_needs() -> None:
    runner = ToyRunner(model=lambda _: 1)
    scheduler = make_scheduler(4, speculation=EAGER, spare_rows=64.0)
    for name in "ab":
        scheduler.add(make_request(name, [1, 1, 1], 5))
    run(scheduler, runner)
    assert scheduler.stats.draft_tokens > 0
    assert scheduler.stats.num_preemptions == 0


def test_steps_run_ahead_but_where_a_guess_may_follow() -> None:
    """Running ahead leaves no token to look for, so a request without guesses never waits."""
    runner = ToyRunner(model=lambda tokens: len(tokens))
    scheduler = make_scheduler(32, speculation=EAGER, spare_rows=64.0, lost_rows=32.0)
    scheduler.add(make_request("a", [1, 2, 3], 60))
    looked, plan = [], None
    while scheduler.has_work:
        plan = plan or scheduler.schedule()
        ahead = scheduler.plan_ahead(plan)
        if ahead is None:
            looked.append(scheduler.running[0].num_tokens)
        for made in scheduler.update(plan, runner.execute(plan)):
            if made.request.finish_reason is not None:
                scheduler.finish(made.request, made.request.finish_reason)
        plan = ahead
        if ahead is not None and not scheduler.running:
            break
    assert len(looked) <= 3
    assert scheduler.stats.tokens_generated == 60


@pytest.mark.parametrize(("others", "guessed"), [(0, True), (10, False)])
def test_a_step_runs_ahead_where_the_guesses_of_one_of_many_do_not_pay(
    others: int, *, guessed: bool
) -> None:
    """All others would wait for its tokens."""
    runner = ToyRunner(num_rows=16, model=lambda tokens: 300 if tokens[0] == 300 else len(tokens))
    scheduler = make_scheduler(
        300, max_num_seqs=16, max_num_batched_tokens=64, speculation=EAGER, spare_rows=64.0,
        lost_rows=32.0,
    )  # fmt: skip
    for name, first in enumerate([300, *range(others)]):
        scheduler.add(make_request(str(name), [first, 301, first], 64))
    ahead, plan, num_ahead, num_steps = None, None, 0, 0
    while scheduler.has_work and (ahead is None or scheduler.running):
        plan = ahead or scheduler.schedule()
        ahead = scheduler.plan_ahead(plan)
        num_ahead, num_steps = num_ahead + (ahead is not None), num_steps + 1
        for made in scheduler.update(plan, runner.execute(plan)):
            if made.request.finish_reason is not None:
                scheduler.finish(made.request, made.request.finish_reason)
    assert (scheduler.stats.draft_tokens_accepted > 40) == guessed
    assert (num_ahead > 0.9 * num_steps) != guessed


def test_prompts_have_their_tokens_of_a_step_before_guesses() -> None:
    """An answer whose guesses are right would keep every prompt waiting until its end."""
    done = []
    for speculation in (None, EAGER):
        runner = ToyRunner(model=lambda _: 1)
        scheduler = make_scheduler(200, speculation=speculation, spare_rows=64.0)
        scheduler.add(make_request("repeats", [1, 1, 1], 100))
        for _ in range(3):
            step(scheduler, runner)
        scheduler.add(make_request("waits", list(range(20)), 3))
        num_steps = 0
        while "waits" in scheduler.requests:
            step(scheduler, runner)
            num_steps += 1
        done.append(num_steps)
        assert "repeats" in scheduler.requests
    assert done[1] <= done[0]


def test_a_tenant_is_charged_for_guesses_right_and_wrong() -> None:
    """They take as much of a step as other tokens."""
    scheduler = make_scheduler(40, speculation=EAGER, spare_rows=64.0)
    request = make_request("a", [0, 1, 0, 1, 1, 0], 24)
    scheduler.add(request)
    runner, told = ToyRunner(model=looping), 0
    while request.finish_reason is None:
        plan = scheduler.schedule()
        made = scheduler.update(plan, runner.execute(plan))
        told += sum(each.output.num_wrong_guesses for each in made)
    wrong = scheduler.stats.draft_tokens - scheduler.stats.draft_tokens_accepted
    assert wrong > 0
    assert request.account.served == 6 + OUTPUT_WEIGHT * (24 + wrong)
    assert told == wrong, "routers charge the same"


def test_the_shortest_is_at_most_the_longest() -> None:
    config = SpeculativeConfig(prompt_lookup_min=5, prompt_lookup_max=4)
    with pytest.raises(InvalidRequestError, match="prompt_lookup_min"):
        EngineConfig("m", speculative_config=config).check()
