"""Guesses cost next to nothing where they are wrong or steps take other times than estimated."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from engine_kit.toy_engine import make_request, make_scheduler

from diptych_engine.scheduling.guesses import KNOWN_AFTER, KNOWN_FOR, TO_DRAFT, Stakes
from diptych_engine.scheduling.request import StepPlan, StepResult
from diptych_protocol import FinishReason, SpeculativeConfig

TOKENS = 240
Text = tuple[list[int], list[int]]
"""A prompt, and what is answered."""


def words(source: random.Random, count: int) -> list[int]:
    return [source.randrange(300, 9000) for _ in range(count)]


def edit(source: random.Random) -> Text:
    """The prompt again, with other words here and there."""
    prompt = words(source, TOKENS)
    copy = [*prompt]
    copy[20::30] = words(source, len(copy[20::30]))
    return prompt + prompt[:3], copy[3:]


def chat(source: random.Random) -> Text:
    """New words, and phrases that occurred before."""
    phrases = [words(source, 8) for _ in range(40)]
    answer: list[int] = []
    while len(answer) < TOKENS:
        answer += source.choice(phrases) if source.random() < 0.4 else words(source, 12)
    return [word for phrase in source.choices(phrases, k=20) for word in phrase], answer


def few_words(source: random.Random, count: int) -> list[int]:
    return [source.randrange(300, 306) for _ in range(count)]


def wrong(source: random.Random) -> Text:
    """What was said last stood before, and nearly always went on in another way."""
    return few_words(source, 400), few_words(source, TOKENS)


def seductive(source: random.Random) -> Text:
    """As that, but from time to time the guesses are right until they are many."""
    prompt = few_words(source, 400)
    answer: list[int] = []
    while len(answer) < TOKENS:
        answer += prompt[50:62] + few_words(source, 25)
    return prompt, answer


@dataclass(frozen=True)
class Machine:
    """How long steps take."""

    step: float
    row: float
    host: float = 0.0
    """For a step that is not launched ahead; for others, at least."""
    spare_rows: float = 3.0
    """What the engine takes for granted."""
    lost_rows: float = 0.0
    slowness: float = 1.0
    """How many times as long steps take at times, a fifth of it."""
    draft: float = 0.0
    """How long a step of a draft model takes, as a share of the model's."""
    draft_share: float = 0.0
    """What the engine takes it for."""
    right: float = 0.0
    """How many of its guesses are right."""

    def seconds(self, plan: StepPlan, now: float) -> float:
        device = self.step + self.row * plan.num_tokens
        guesses = Counter(x.request.request_id for x in plan.scheduled if x.guess is not None)
        for depth in range(max(guesses.values(), default=0)):
            drafting = sum(count > depth for count in guesses.values())
            device += self.draft * (self.step + self.row * drafting)
        taken = max(device, self.host) if plan.ahead else device + self.host
        return taken * (self.slowness if now // (30 * self.step) % 5 == 4 else 1.0)


MACHINES = {
    "a processor as estimated": Machine(3.0, 1.0),
    "a processor with dear rows": Machine(1.0, 1.0),
    "a processor with cheap rows": Machine(12.0, 1.0),
    "a GPU as estimated": Machine(0.6, 0.01, 0.3, 64.0, 32.0),
    "a GPU with a slow host": Machine(0.6, 0.002, 0.6, 64.0, 32.0),
}
DRAFTS = {
    "good ones": (Machine(3.0, 1.0, draft=0.15, draft_share=0.15, right=0.85), 1.3),
    "good ones, dearer than estimated": (
        Machine(3.0, 1.0, draft=0.3, draft_share=0.15, right=0.85), 1.0,
    ),
    "good ones on a GPU": (
        Machine(0.6, 0.01, 0.3, 64.0, 32.0, draft=0.1, draft_share=0.1, right=0.85), 1.3,
    ),
    "bad ones": (Machine(3.0, 1.0, draft=0.15, draft_share=0.15, right=0.1), 0.97),
    "bad ones, dearer than estimated": (
        Machine(3.0, 1.0, draft=0.6, draft_share=0.15, right=0.3), 0.97,
    ),
    "bad ones on a GPU": (
        Machine(0.6, 0.01, 0.3, 64.0, 32.0, draft=0.5, draft_share=0.1, right=0.2), 0.97,
    ),
    "a draft model as large as the model": (
        Machine(3.0, 1.0, draft=1.0, draft_share=1.0, right=1.0), 0.97,
    ),
}  # fmt: skip
"""Machines with a draft model, and how many times as many tokens from a second it gets at least."""


def seconds(
    machine: Machine, text: Callable[[random.Random], Text], streams: int, stakes: Stakes | None,
    speculation: SpeculativeConfig | None,
) -> float:  # fmt: skip
    """How long a token of requests takes, as long as all of them are there; prompts are not
    counted."""
    scheduler = make_scheduler(
        2000, max_num_seqs=64, max_num_batched_tokens=8192, speculation=speculation,
        stakes=stakes, spare_rows=machine.spare_rows, lost_rows=machine.lost_rows,
        draft_share=machine.draft_share,
    )  # fmt: skip
    chances = random.Random(0)
    total, tokens = 0.0, 0
    for turn in range(2):
        texts = {f"{turn} {i}": text(random.Random(100 * turn + i)) for i in range(streams)}
        for name, (prompt, _) in texts.items():
            scheduler.add(make_request(name, prompt, TOKENS - 3))
        ahead: StepPlan | None = None
        while scheduler.waiting or len(scheduler.running) == streams:
            plan = ahead or scheduler.schedule()
            ahead = scheduler.plan_ahead(plan) if machine.host else None
            sampled = []
            for share in plan.scheduled:
                prompt, answer = texts[share.request.request_id]
                if share.guess == TO_DRAFT:
                    right = chances.random() < machine.right
                    share.guess = (answer + [0] * 64)[share.start - len(prompt)] if right else 0
                sampled.append((answer + [0] * 64)[share.start + share.num_tokens - len(prompt)])
            taken = None
            if plan.num_tokens == len(plan.scheduled):
                taken = machine.seconds(plan, total)
                total += taken
            for made in scheduler.update(plan, StepResult(sampled, None, None), taken):
                tokens += len(made.output.new_token_ids) if taken else 0
                if made.request.finish_reason is not None:
                    scheduler.finish(made.request, made.request.finish_reason)
            ahead = ahead if len(scheduler.running) == streams else None
        for request in [*scheduler.running]:
            scheduler.finish(request, FinishReason.ABORT)
    return total / tokens


def speedup(
    machine: Machine, text: Callable[[random.Random], Text], streams: int, *, bounded: bool = True
) -> float:
    stakes = Stakes(machine.spare_rows, machine.lost_rows, machine.draft_share)
    without = seconds(machine, text, streams, None, None)
    guesses = SpeculativeConfig(method="draft_model" if machine.draft else "ngram")
    return without / seconds(machine, text, streams, stakes if bounded else None, guesses)


@pytest.mark.one_in(3, "machine")
@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_no_text_is_slower_for_its_guesses(machine: str, streams: int) -> None:
    found = {t.__name__: speedup(MACHINES[machine], t, streams) for t in (chat, wrong, seductive)}
    assert min(found.values()) >= 0.97, found


@pytest.mark.parametrize(
    ("machine", "least"), [*zip(MACHINES, (1.6, 1.2, 1.6, 1.6, 1.5), strict=True)]
)
def test_an_edit_is_faster(machine: str, least: float) -> None:
    assert speedup(MACHINES[machine], edit, 1) >= least


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_gain_what_they_can_and_lose_next_to_nothing(draft: str, streams: int) -> None:
    machine, least = DRAFTS[draft]
    assert speedup(machine, chat, streams) >= (least if streams == 1 else 0.97)


def test_estimates_alone_would_lose_more() -> None:
    slow = MACHINES["a GPU with a slow host"]
    assert speedup(slow, seductive, 8, bounded=False) < 0.95


def test_disturbances_leave_an_edit_most_of_its_gain() -> None:
    """Others use the machine too: for a while each step takes three times as long."""
    busy = Machine(3.0, 1.0, slowness=3.0)
    assert speedup(busy, edit, 1) >= 0.8 * speedup(Machine(3.0, 1.0), edit, 1)


def test_nothing_is_wagered_before_the_usual_time_of_a_step_is_known() -> None:
    stakes = Stakes(3.0, 0.0)
    for _ in range(KNOWN_AFTER):
        assert stakes.most(1) == 0
        stakes.took(1, 0, 1, 0.01, wager=False)
    assert stakes.most(1) == 4, "as many as a step takes time for"
    assert stakes.most(2) == 0, "that is another size"


def test_the_usual_time_is_measured_again_after_many_wagers() -> None:
    stakes = Stakes(3.0, 0.0)
    for _ in range(KNOWN_AFTER):
        stakes.took(1, 0, 1, 0.01, wager=False)
    for _ in range(KNOWN_FOR):
        assert stakes.most(1) > 0
        stakes.took(1, 2, 3, 0.012, wager=True)
    assert stakes.most(1) == 0
    stakes.took(1, 0, 1, 0.01, wager=False)
    assert stakes.most(1) > 4, "they won"


def test_a_disturbed_step_costs_guesses_no_more_than_a_slow_one() -> None:
    lost = []
    for seconds in (0.018, 9.0):
        stakes = Stakes(3.0, 0.0)
        for _ in range(KNOWN_AFTER):
            stakes.took(1, 0, 1, 0.008, wager=False)
        stakes.took(1, 2, 1, seconds, wager=True)
        lost.append(stakes.most(1))
    assert lost == [0, 0]
