"""Where a request costs the fewest seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_pools import SIZE, Fleet, chain, idle, request

from diptych_protocol.wire import PrefixChanges
from diptych_router.choosing.policy import Decision, Priced, RequestView
from diptych_router.engines.block_holders import Keys
from diptych_router.engines.engine_table import EngineRow
from diptych_router.engines.known_prefixes import BlockNaming

TERMS = {"wait_s", "compute_s", "delay_s", "transfer_s", "steps_s", "streams_s"}


def engines(decision: Decision | None) -> tuple[str | None, str]:
    assert decision is not None
    return decision.prefill, decision.decode


def test_every_term_is_named_and_none_is_negative() -> None:
    fleet = Fleet(3, 3)
    decision = fleet.table.choose(request(20), 0.0)
    assert decision is not None
    assert set(decision.terms) == TERMS
    assert min(decision.terms.values()) >= 0
    assert decision.to_compute == 20 * SIZE + 1


def test_a_prompt_goes_where_it_is_remembered() -> None:
    fleet = Fleet(5, 5)
    fleet.remembers("p3", chain(0, 50))
    fleet.remembers("d1", chain(0, 50))
    assert fleet.go(request(50, output=1.0)) == ("p3", "d1")
    assert fleet.go(request(50))[0] == "p3"


def test_no_engine_is_to_begin_with_what_another_has_still_to_compute_for_it() -> None:
    """An agent's second question comes while the prompt of the first one is computed."""
    fleet = Fleet(1, 1, "auto")
    assert fleet.go(replace(request(50), disaggregate="always")) == ("p0", "d0")
    assert _alone(fleet).engines.lacking.tolist() == [50 * SIZE + 1]
    fleet.remembers("d0", chain(0, 50))
    assert _alone(fleet).engines.lacking.tolist() == [1]


def _alone(fleet: Fleet) -> Priced:
    decision = fleet.table.choose(request(50), 0.0)
    assert decision is not None
    return next(priced for priced in decision.weighed if priced.duty == "both")


def test_an_answer_goes_on_where_its_kv_was_kept() -> None:
    """Though pairs are always wanted: the prefill engine would compute what was generated."""
    fleet = Fleet(1, 1)
    fleet.remembers("p0", chain(0, 40))
    view = replace(request(50, output=20.0), goes_on=True)
    assert engines(fleet.table.choose(view, 0.0)) == ("p0", "d0")
    fleet.remembers("d0", chain(0, 50))
    for other in (replace(view, goes_on=False), replace(view, disaggregate="always")):
        assert engines(fleet.table.choose(other, 0.0)) == ("p0", "d0")
    more = replace(view, prompt_tokens=51 * SIZE)  # of which the last block is not all computed
    assert [fleet.go(more) for _ in range(16)] == [(None, "d0")] * 16  # no stream waits for another


def test_unless_too_much_waits_there() -> None:
    fleet = Fleet(2, 1)
    fleet.remembers("p1", chain(0, 50))
    fleet.rows["p1"].report(idle(queued_prompt_tokens=50 * SIZE), 0, 0.0)
    assert fleet.go(request(50))[0] == "p1"
    fleet.rows["p1"].report(idle(queued_prompt_tokens=500 * SIZE), 0, 0.0)
    assert fleet.go(request(50))[0] == "p0"


def test_a_queue_that_was_reported_long_ago_has_been_computed_since() -> None:
    fleet = Fleet(2, 1)
    fleet.remembers("p1", chain(0, 50))
    fleet.rows["p1"].report(idle(queued_prompt_tokens=500 * SIZE), 0, 0.0)
    assert fleet.go(request(50), now=0.0)[0] == "p0"
    assert fleet.go(request(50), now=60.0)[0] == "p1"


def test_a_burst_with_a_new_beginning_stays_together() -> None:
    """Before any engine says that it remembers it, when engines compute half of the time."""
    fleet = Fleet(8, 8)
    fleet.table.tables["prefill"].computed(40.0, 0.0)
    homes = Counter(fleet.go(request(200, start=7))[0] for _ in range(4))
    assert len(homes) == 1


def test_equals_share_prompts_and_all_routers_agree_who_gets_which() -> None:
    fleets = [Fleet(20, 20, seed=seed) for seed in range(4)]
    pairs = set()
    for number in range(1, 60):
        view = request(10, start=1000 * number)
        for fleet in fleets:
            fleet.remembers("p0", chain(0, 1))
        chosen = {engines(fleet.table.choose(view, 0.0)) for fleet in fleets}
        assert len(chosen) == 1
        pairs |= chosen
    assert len({first for first, _ in pairs}) > 15
    assert len({second for _, second in pairs}) > 15


def test_prompts_that_go_on_after_a_common_beginning_are_shared_too() -> None:
    """As with a system prompt that everybody has: not the first block decides."""
    fleet = Fleet(20, 1)
    for number in range(20):
        fleet.remembers(f"p{number}", chain(0, 5))
    chosen = set()
    for number in range(1, 60):
        own = np.concatenate((chain(0, 5), chain(1000 * number, 5)))

        def keys(_: BlockNaming, own: Keys = own) -> Keys:
            return own

        view = RequestView(10 * SIZE + 1, 100.0, keys=keys)
        chosen.add(engines(fleet.table.choose(view, 0.0))[0])
    assert len(chosen) > 15


def test_without_names_of_blocks_equals_are_drawn() -> None:
    view = RequestView(100, 100.0)
    drawn = {engines(Fleet(20, 20, seed=seed).table.choose(view, 0.0)) for seed in range(20)}
    assert len(drawn) > 10


def test_reports_that_stay_the_same_do_not_gather_requests_at_one_engine() -> None:
    """Four routers know that one engine is idle; between two reports each places ten there."""
    given: Counter[str] = Counter()
    for seed in range(4):
        fleet = Fleet(10, 1, seed=seed)
        for number in range(1, 10):
            fleet.rows[f"p{number}"].report(idle(queued_prompt_tokens=2000), 0, 0.0)
        for number in range(10):
            view = request(60, start=10_000 * (10 * seed + number + 1))
            given[str(fleet.go(view)[0])] += 1
    assert max(given.values()) <= 16
    assert len(given) == 10


def busy_holder(seconds: float, lends: float = 1.0) -> Fleet:
    """`p0` remembers a long prefix, and has a queue of so many seconds."""
    fleet = Fleet(3, 1)
    for row in fleet.rows.values():
        row["lends"] = lends
    fleet.remembers("p0", chain(0, 500))
    fleet.rows["p0"]["free_at"] = seconds
    return fleet


def test_another_engine_fetches_a_prefix_whose_holder_is_busy() -> None:
    fleet = busy_holder(1.0)
    decision = fleet.table.choose(request(501), 0.0)
    assert decision is not None
    assert decision.prefill in ("p1", "p2")
    assert (decision.fetch, decision.fetch_tokens) == ("p0", 500 * SIZE)
    assert decision.to_compute == 501 * SIZE + 1 - 500 * SIZE
    assert decision.terms["fetch_s"] > 0


def test_a_holder_that_is_idle_computes_the_rest_itself() -> None:
    decision = busy_holder(0.0).table.choose(request(501), 0.0)
    assert decision is not None
    assert (decision.prefill, decision.fetch, decision.fetch_tokens) == ("p0", None, 0)


def test_nothing_is_fetched_only_because_it_costs_nearly_the_same() -> None:
    fleet = busy_holder(0.0)
    for row in fleet.rows.values():
        row["trip_s"] = row["trip_token_s"] = 1e-9
    for now in range(20):
        decision = fleet.table.choose(request(501), float(now))
        assert decision is not None
        assert (decision.prefill, decision.fetch) == ("p0", None)


DISK_S: Final = 0.01
"""What each read from disk takes, beside its tokens."""


def with_a_disk(token_s: float) -> Fleet:
    """`p1` has a prompt on disk, of which it has told how long a token takes."""
    fleet, blocks = Fleet(3, 1), 0
    for number in range(1, 40):
        blocks += 100 * (number % 3)
        seconds = number * DISK_S + blocks * SIZE * token_s
        told = idle(disk_reads=number, disk_blocks_read=blocks, seconds_reading_disk=seconds)
        fleet.rows["p1"].report(told, 0, 0.0)
    fleet.remembers("p1", chain(0, 500), chain(100, 400))
    return fleet


def test_a_prefix_on_disk_is_worth_what_computing_takes_longer_than_reading() -> None:
    fleet = with_a_disk(1e-5)
    p1 = fleet.rows["p1"]
    assert p1["read_token_s"] == pytest.approx(1e-5, rel=0.3)
    decision = fleet.table.choose(request(500), 0.0)
    assert decision is not None
    assert (decision.prefill, decision.to_compute) == ("p1", 1)
    read_s = p1["read_s"] + 400 * SIZE * p1["read_token_s"]
    assert decision.terms["read_s"] == pytest.approx(read_s)
    assert not decision.leaves_disk
    p1["told_steps"] = 1.0
    expected = fleet.table.first_token(request(500), decision)
    assert expected is not None
    assert expected.compute_s == pytest.approx(read_s + decision.terms["compute_s"])
    gain = 500 * SIZE * p1["prompt_token_s"] - read_s
    for busy, chosen in ((0.8, True), (1.2, False)):
        p1["free_at"] = busy * gain
        assert (engines(fleet.table.choose(request(500), 0.0))[0] == "p1") == chosen


def test_memory_is_worth_more_than_a_disk() -> None:
    fleet = with_a_disk(1e-5)
    fleet.remembers("p2", chain(0, 500))
    decision = fleet.table.choose(request(500), 0.0)
    assert decision is not None
    assert decision.prefill == "p2"
    assert decision.terms["read_s"] == 0
    assert not decision.leaves_disk


def test_a_disk_that_is_slower_than_computing_counts_as_nothing() -> None:
    fleet = with_a_disk(1e-2)
    fleet.remembers("p2", chain(0, 200))
    decision = fleet.table.choose(request(500), 0.0)
    assert decision is not None
    assert decision.prefill == "p2", "which has more in memory"
    fleet.rows["p0"]["usable"] = fleet.rows["p2"]["usable"] = 0.0
    decision = fleet.table.choose(request(500), 0.0)
    assert decision is not None
    assert (decision.prefill, decision.to_compute) == ("p1", 400 * SIZE + 1)
    assert decision.terms["read_s"] == 0
    assert decision.leaves_disk, "and the engine does not read it"


def test_what_an_engine_has_on_disk_only_no_other_can_fetch() -> None:
    fleet = busy_holder(1.0)
    fleet.table.known.take("p0", PrefixChanges(2, to_disk=chain(100, 400).tobytes()), 10_000)
    decision = fleet.table.choose(request(500), 0.0)
    assert decision is not None
    assert (decision.fetch, decision.fetch_tokens) == ("p0", 100 * SIZE)
    fleet.table.known.take("p0", PrefixChanges(3, to_disk=chain(0, 100).tobytes()), 10_000)
    decision = fleet.table.choose(request(500), 0.0)
    assert decision is not None
    assert decision.fetch is None


def test_a_hand_off_brings_what_the_decode_engine_has_on_disk() -> None:
    """It reads nothing: the sender has all."""
    fleet = Fleet(1, 2)
    fleet.remembers("d1", chain(0, 50), chain(20, 30))
    decision = fleet.table.choose(request(50), 0.0)
    assert decision is not None
    decode = next(priced for priced in decision.weighed if priced.duty == "decode")
    lacking = [51 * SIZE - 15, 31 * SIZE - 15]
    assert decode.engines.lacking.tolist() == lacking


def none_lends() -> Fleet:
    return busy_holder(1.0, lends=0.0)


def of_another_revision() -> Fleet:
    fleet = busy_holder(1.0)
    fleet.table.is_up(fleet.rows["p0"], "other")
    snapshot = PrefixChanges(0, chain(0, 500).tobytes(), whole=True)
    fleet.table.known.take("p0", snapshot, 10_000)
    return fleet


def only_expected() -> Fleet:
    """The engine computes it at this moment."""
    fleet = busy_holder(1.0)
    fleet.table.known.take("p0", PrefixChanges(2, removed=chain(0, 500).tobytes()), 10_000)
    fleet.table.known.expect("p0", chain(0, 500))
    return fleet


def silent() -> Fleet:
    fleet = busy_holder(1.0)
    fleet.rows["p0"]["silent"] = 1.0
    return fleet


@pytest.mark.parametrize("fleet", [none_lends, of_another_revision, only_expected, silent])
def test_what_cannot_be_fetched_is_computed(fleet: Callable[[], Fleet]) -> None:
    decision = fleet().table.choose(request(501), 0.0)
    assert decision is not None
    assert (decision.fetch, decision.fetch_tokens) == (None, 0)


def test_a_prefix_that_is_faster_to_compute_is_not_fetched() -> None:
    fleet = busy_holder(1.0)
    for row in fleet.rows.values():
        row["prompt_token_s"] = row["trip_token_s"] / 2
    decision = fleet.table.choose(request(501), 0.0)
    assert decision is not None
    assert decision.fetch is None


@pytest.mark.parametrize("slow", ["p0", "d0"])
def test_a_slow_engine_is_learned_to_be_slow(slow: str) -> None:
    fleet = Fleet(2, 2)
    for key, row in fleet.rows.items():
        part = 10.0 if key == slow else 1.0
        steps, prompts, rows, seconds = 0, 0, 0, 0.0
        for count in range(1, 20):
            steps, prompts, rows = steps + 10, prompts + 1000 * (count % 3), rows + 10 * count
            seconds += part * (10 * 0.005 + 1000 * (count % 3) * 3e-5 + 10 * count * 1e-4)
            totals = idle(
                steps=steps, prompt_tokens_computed=prompts,
                tokens_generated=rows, seconds_stepping=seconds,
            )  # fmt: skip
            row.report(totals, 0, float(count))
    chosen = Counter(
        key for at in range(20) for key in fleet.go(request(60, start=10_000 * at), now=20.0)
    )
    assert chosen[slow] < 5


def test_prompts_alone_teach_how_fast_a_pool_computes_prompts() -> None:
    """A decode pool with fewer cores is not taken for as fast as a prefill pool."""
    fleet = Fleet(1, 2)
    for key, token_s in (("p0", 1e-4), ("d0", 5e-4)):
        for count in range(1, 20):
            seconds = count * (10 * 0.005 + 1000 * token_s)
            totals = idle(
                steps=10 * count, prompt_tokens_computed=1000 * count, seconds_stepping=seconds
            )
            fleet.rows[key].report(totals, 0, float(count))
    assert fleet.rows["d1"]["prompt_token_s"] > 3 * fleet.rows["p0"]["prompt_token_s"]


@pytest.mark.parametrize(
    ("processors", "part", "computes"),
    [((0, 0), 1.0, None), ((7, 8), 1.0, None), ((7, 7), 0.05, None), ((7, 7), 1.0, "p0")],
    ids=["not told", "own ones", "a small part of the same", "the same"],
)
def test_a_decode_engine_adds_nothing_while_a_neighbour_has_its_processors(
    processors: tuple[float, float], part: float, computes: str | None
) -> None:
    """It would begin at once, but takes longer for a prompt than the one that is busy."""
    fleet = Fleet(1, 1, "auto")
    for row, number in zip(fleet.rows.values(), processors, strict=True):
        row["processors"], row["processors_part"] = number, part
        fleet.table.is_up(row, "f")
    fleet.rows["d0"]["prompt_token_s"] *= 2
    fleet.rows["p0"]["free_at"] = 0.5
    assert fleet.go(request(60))[0] == computes


def test_neighbours_share_their_time_so_a_short_prompt_does_not_wait_for_a_long_queue() -> None:
    fleet = Fleet(1, 1, "auto")
    for row in fleet.rows.values():
        row["processors"] = row["processors_part"] = 1.0
        fleet.table.is_up(row, "f")
    fleet.rows["p0"]["free_at"] = 0.5
    assert fleet.go(request(2))[0] is None


def test_a_decode_engine_without_room_is_left_out_while_others_have_some() -> None:
    fleet = Fleet(1, 2)
    fleet.rows["d0"].report(idle(free=5, num_running=3), 0, 0.0)
    fleet.rows["d1"].report(idle(num_running=6), 0, 0.0)
    assert fleet.go(request(100))[1] == "d1"


sizes = st.integers(1, 6)


@given(sizes, sizes, st.lists(st.integers(0, 5000), min_size=12, max_size=12), st.randoms())
def test_the_choice_is_the_cheapest_pair_or_nearly_so(
    prefill: int, decode: int, waiting: list[int], random: Random
) -> None:
    fleet = Fleet(prefill, decode)
    for row, tokens in zip(fleet.rows.values(), waiting, strict=False):
        row.report(idle(queued_prompt_tokens=tokens, num_running=tokens % 7), 0, 0.0)
        fleet.remembers(row.key, chain(0, random.randrange(30)))
    view = request(30)
    decision = fleet.table.choose(view, 0.0)
    assert decision is not None
    assert decision.prefill is not None
    costs: dict[str, float] = {}
    for row in fleet.rows.values():
        row["usable"] = False
    for key, row in fleet.rows.items():  # each pair alone
        row["usable"] = True
        for other, partner in fleet.rows.items():
            if key[0] == "p" and other[0] == "d":
                partner["usable"] = True
                alone = fleet.table.choose(view, 0.0)
                assert alone is not None
                costs[f"{key} {other}"] = sum(alone.terms.values())
                partner["usable"] = False
        row["usable"] = False
    best = min(costs.values())
    assert best <= costs[f"{decision.prefill} {decision.decode}"] <= 1.1 * best


amounts = st.integers(0, 3000)


@given(
    st.lists(st.tuples(amounts, amounts, st.integers(0, 60)), min_size=2, max_size=8),
    st.integers(1, 60),
    st.floats(0, 500),
    st.floats(0, 9),
)
def test_the_terms_are_those_of_each_engine_alone(
    told: list[tuple[int, int, int]], blocks: int, output: float, busy_s: float
) -> None:
    """What is computed for all engines at once is what the rules say of one after the other."""
    fleet = Fleet(len(told) // 2, len(told) - len(told) // 2, "auto")
    for row, (queued, free, rows) in zip(fleet.rows.values(), told, strict=True):
        row.report(idle(4000, free, queued_prompt_tokens=queued, num_running=rows), 0, 0.0)
        row["trip_s"], row["trip_token_s"] = 1e-3 * (1 + queued % 7), 1e-6 * (1 + free)
        row["read_s"], row["read_token_s"] = 1e-3 * (1 + free % 5), 1e-6 * (1 + queued)
        row["lends"] = float(rows % 2)
        row.charge(0, planned=rows % 3)
        stored = queued % (1 + free % 40)
        fleet.remembers(row.key, chain(0, free % 40), chain(free % 40 - stored, stored))
    fleet.table.tables["prefill"].computed(busy_s, 0.0)
    view = request(blocks, output=output)
    decision = fleet.table.choose(view, 0.0)
    assert decision is not None
    for priced in decision.weighed:
        for at, row in enumerate(priced.rows):
            expected = terms_of(row, view, priced, at)
            terms = {name: value for name, value in priced.terms(at).items() if value}
            assert terms == pytest.approx({name: x for name, x in expected.items() if x})
            assert priced.cost(at) == pytest.approx(sum(expected.values()))


def terms_of(row: EngineRow, view: RequestView, priced: Priced, at: int) -> dict[str, float]:
    """docs/routing.md, of one engine."""
    cached, elsewhere = float(priced.engines.cached[at]), float(priced.engines.elsewhere[at])
    load = priced.engines.table.prompt_load(0.0)
    lacking, others = view.prompt_tokens - cached, load / (1 - load)
    rows, coming, output = row["rows"], row["coming"], view.output_tokens
    streams = output * (rows + coming) * row["row_s"]
    steps = output * row["step_s"] + streams
    short = (coming + 1) * (lacking + output) - row["free_tokens"]
    part = max(short / row["used_tokens"], 1 / max(rows, 1)) if short > 0 else 0
    answer = {"steps_s": steps, "streams_s": streams, "room_s": part * steps}
    if priced.duty == "decode":
        return {"transfer_s": row["trip_s"] + lacking * row["trip_token_s"]} | answer
    token_s = row["prompt_token_s"] * (1 + others)
    stored = 0.0 if priced.engines.stored is None else float(priced.engines.stored[at])
    fetch, read = row["trip_s"] + (elsewhere - cached) * row["trip_token_s"], 0.0
    gain = max(0.0, stored * (token_s - row["read_token_s"]) - row["read_s"])
    if (elsewhere - cached) * token_s - fetch > gain:
        lacking -= elsewhere - cached
    else:
        fetch = 0.0
        if gain:
            read = row["read_s"] + stored * row["read_token_s"]
            lacking -= stored
    compute = max(lacking, 1) * row["prompt_token_s"]
    prompt = {
        "wait_s": row["free_at"], "fetch_s": fetch, "read_s": read,
        "compute_s": row["step_s"] + compute, "delay_s": compute * others,
    }  # fmt: skip
    if priced.duty == "prefill":
        return prompt
    stall = 0.0 if cached == view.prompt_tokens - 1 else (rows + coming) * prompt["compute_s"]
    return prompt | {"stall_s": stall} | answer


def test_fingerprints_that_no_engine_has_any_more_are_forgotten() -> None:
    fleet = Fleet(2, 2)
    for number in range(50):
        for row in fleet.rows.values():
            fleet.table.is_up(row, f"revision {number}")
        assert engines(fleet.table.choose(request(10), 0.0))[0] is not None
    assert len(fleet.table._fingerprints) <= 2
