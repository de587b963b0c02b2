"""Who is trusted: trials, their partners and their back-off, and what a canary must bring."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diptych_protocol import EngineCoreOutput, FinishReason, LogprobsLists
from diptych_router.engines.engine_table import Role
from diptych_router.engines.health_book import back_off_s
from diptych_router.requests.pools.trials import (
    Candidate,
    Trial,
    TrialBook,
    complaint,
    prompt_length,
    unlike,
)

FINISHED = FinishReason.LENGTH


def prefill(epoch: str, fingerprint: str = "x") -> Candidate:
    return Candidate(epoch, "prefill", fingerprint, 0)


def decode(epoch: str, fingerprint: str = "x") -> Candidate:
    return Candidate(epoch, "decode", fingerprint, 0)


def test_one_trial_proves_both_new_engines() -> None:
    book = TrialBook()
    engines = [prefill("p"), decode("d")]
    assert book.due(engines, 0) == [Trial("p", "d")]
    assert book.due(engines, 0) == [], "it is under way"
    book.ended(Trial("p", "d"), ok=True, now=1)
    assert book.verified("p")
    assert book.verified("d")
    assert book.due(engines, 100) == []


def test_a_new_engine_is_tried_with_a_verified_partner_and_only_once() -> None:
    book = TrialBook()
    book.ended(Trial("p", "d1"), ok=True, now=0)
    trials = book.due([prefill("p"), decode("d1"), decode("d2")], 0)
    assert trials == [Trial("p", "d2")]
    book.ended(trials[0], ok=False, now=0)
    assert book.verified("p"), "a partner that was proven stays so"
    assert not book.verified("d2")


@pytest.mark.parametrize(
    "engines",
    [[prefill("p")], [decode("d1"), decode("d2")], [prefill("p", "x"), decode("d", "y")]],
    ids=["alone", "one pool", "another revision"],
)
def test_without_a_fitting_partner_there_is_no_trial(engines: list[Candidate]) -> None:
    assert TrialBook().due(engines, 0) == []


def test_after_a_failure_another_partner_is_tried_and_the_wait_grows() -> None:
    book = TrialBook()
    engines = [prefill("p1"), prefill("p2"), decode("d")]
    (first,) = book.due(engines, 0)
    book.ended(first, ok=False, now=0)
    (second,) = book.due([e for e in engines if e.epoch != "p2"] + [engines[1]], 0)
    assert second == Trial("p2", "d"), "the other one is new, so it need not wait"
    book.ended(second, ok=False, now=0)
    assert book.due(engines, 0.1) == []
    assert len(book.due(engines, 1)) == 1


def test_a_restarted_engine_is_a_new_one() -> None:
    book = TrialBook()
    book.ended(Trial("p", "d"), ok=True, now=0)
    book.keep({"p": "", "d again": ""}, 0)
    assert not book.verified("d")
    assert book.due([prefill("p"), decode("d again")], 0) == [Trial("p", "d again")]


def test_the_back_off_grows_to_a_limit() -> None:
    waits = [back_off_s(n, 0.5, 30.0) for n in range(1, 40)]
    assert waits == sorted(waits)
    assert (waits[0], waits[1], waits[-1]) == (0.5, 1.0, 30.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "decode"]), st.sampled_from("xy"), st.booleans()),
        max_size=7,
    ),
    st.integers(1, 3),
)
@example(  # two broken engines kept a sound one busy for ever
    [
        ("prefill", "x", True),
        ("decode", "x", False),
        ("decode", "x", False),
        ("prefill", "x", True),
        ("decode", "x", True),
    ],
    1,
)
def test_whoever_can_be_proven_is_proven_in_the_end_and_nobody_else(
    specs: list[tuple[Role, str, bool]], duration: int
) -> None:
    """Engines are sound or broken; a trial takes some ticks, and works if both are sound."""
    engines = [Candidate(str(i), role, kind, 0) for i, (role, kind, _) in enumerate(specs)]
    sound = {str(i) for i, (_, _, ok) in enumerate(specs) if ok}
    by_epoch = {e.epoch: e for e in engines}
    book = TrialBook()
    under_way: list[tuple[Trial, int]] = []
    for now in range(200):
        for trial, ends in [x for x in under_way if x[1] <= now]:
            book.ended(trial, ok={trial.prefill, trial.decode} <= sound, now=now)
            under_way.remove((trial, ends))
        for trial in book.due(engines, now):
            pair = by_epoch[trial.prefill], by_epoch[trial.decode]
            assert [e.role for e in pair] == ["prefill", "decode"]
            assert pair[0].fingerprint == pair[1].fingerprint
            assert not all(book.verified(e.epoch) for e in pair), "nothing is left to prove"
            under_way.append((trial, now + duration))
        unproven = [e for t, _ in under_way for e in (t.prefill, t.decode) if not book.verified(e)]
        assert len(unproven) == len(set(unproven)), "one trial at a time"
    expected = {
        e.epoch
        for e in engines
        for f in engines
        if {e.epoch, f.epoch} <= sound and e.role != f.role and e.fingerprint == f.fingerprint
    }
    assert {e.epoch for e in engines if book.verified(e.epoch)} == expected


@pytest.mark.parametrize(
    ("block_size", "limit", "expected"), [(16, 8192, 33), (128, 8192, 257), (64, 100, 96)]
)
def test_a_canary_fills_two_blocks_and_begins_a_third_if_there_is_room(
    block_size: int, limit: int, expected: int
) -> None:
    assert prompt_length(block_size, limit) == expected


def answer(received: int, tokens: list[int]) -> list[EngineCoreOutput]:
    return [EngineCoreOutput("c", tokens, finish_reason=FINISHED, num_received_tokens=received)]


@pytest.mark.parametrize(
    ("outputs", "received", "words"),
    [
        (answer(33, [1]), 3, ""),
        (answer(33, [1]), 8, ""),
        (answer(0, [1]), 3, "computed 33 of 33"),
        (answer(32, [1]), 3, "computed 1 of 33"),
        (answer(33, [1]), 2, "only 2 of 3 blocks"),
        (answer(33, []), 3, "no token"),
        ([], 3, "computed 33"),
    ],
    ids=["good", "others' blocks too", "recomputed", "a token", "lost", "mute", "silent"],
)
def test_what_is_wrong_with_an_answer(
    outputs: list[EngineCoreOutput], received: int, words: str
) -> None:
    found = complaint(outputs, 33, 3, received)
    assert words in found
    assert bool(found) == bool(words)


def alone(*tokens: int, near: int | None = None) -> list[EngineCoreOutput]:
    """What decode answers by itself; it finds `near` about as likely as each of its own tokens."""
    outputs = []
    for token in tokens:
        ids, values = [token, 99], [-1.0, -4.0]
        if near is not None:
            ids, values = [*ids, near], [*values, -1.05]
        outputs.append(EngineCoreOutput("c", [token], LogprobsLists([ids], [values], [1])))
    return outputs


@pytest.mark.parametrize(
    ("tokens", "own", "words"),
    [
        ([1, 2, 3, 4], alone(1, 2, 3, 4), ""),
        ([1, 2, 3, 4], alone(1, 7, 8, 9, near=2), ""),
        ([1, 2, 3, 4], alone(1, 7, 8, 9), "token 2 is 2, and decode alone answers 7"),
        ([1, 99, 3, 4], alone(1, 7, 8, 9), "token 2 is 99"),
        ([], alone(1, 2, 3, 4), "decode made 0 tokens"),
        ([1, 2, 3, 4], alone(1), "alone 1, of 4"),
    ],
    ids=["equal", "a near tie", "another", "an unlikely one", "mute", "mute alone"],
)
def test_an_answer_is_compared_with_what_decode_answers_alone(
    tokens: list[int], own: list[EngineCoreOutput], words: str
) -> None:
    found = unlike(tokens, own)
    assert words in found
    assert bool(found) == bool(words)
