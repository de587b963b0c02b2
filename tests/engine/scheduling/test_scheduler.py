"""The scheduler finishes every request, loses no block, and never changes what is generated.

The "model" here is a pure function of the tokens whose KV it is shown: it keeps, for every block
slot, the token written there, and derives the next token from all of them in order. A wrong block
table, a stale slot or a lost position therefore changes the output.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from cases import each
from engine_kit.block_checks import check_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.kv_groups import NULL_BLOCK, KVGroups, num_held
from diptych_engine.scheduling.request import Request, RequestStatus, StepPlan, StepResult
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_engine.scheduling.step_results import stop_condition
from diptych_kv_transfer.memory.layout import KVGroup
from diptych_protocol import FinishReason, KVTransferParams, SamplingParams
from diptych_protocol.block_hashes import extend_block_hashes
from diptych_protocol.engine_stats import MAX_TENANTS_TOLD

BLOCK = 4


def hashes_of(token_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, BLOCK, None)
    return hashes


def next_token(tokens: list[int]) -> int:
    return hashlib.blake2b(bytes(t % 256 for t in tokens), digest_size=1).digest()[0]


Windows = tuple[int | None, ...]
PLAIN: Windows = (None,)


def seen(tokens: list[int], window: int | None) -> list[int]:
    """What layers with this window see behind these tokens."""
    return tokens[-window:] if window else tokens


@dataclass
class ToyRunner:
    """Writes tokens into block slots, once for each group of layers, and reads those that the
    group sees back through the block table."""

    slots: dict[int, int] = field(default_factory=dict)
    computed: int = 0
    windows: Windows = PLAIN

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = []
        for share in plan.scheduled:
            request = share.request
            end = share.start + share.num_tokens
            for position in range(share.start, end):
                self.write(request, position)
                self.computed += 1
            read: list[int] = []
            for group, window in enumerate(self.windows):
                first = max(0, share.start + 1 - window) if window else 0
                found = [self.slots[self.slot(request, p, group)] for p in range(first, end)]
                read += seen(found, window)
            if share.samples:
                sampled.append(next_token(read))
        return StepResult(sampled, None, None)

    def write(self, request: Request, position: int) -> None:
        for group in range(len(self.windows)):
            self.slots[self.slot(request, position, group)] = request.token_ids[position]

    def slot(self, request: Request, position: int, group: int = 0) -> int:
        block = request.block_ids[position // BLOCK * len(self.windows) + group]
        assert block != NULL_BLOCK
        return block * BLOCK + position % BLOCK


def make_request(name: str, prompt: list[int], max_tokens: int, **kwargs: object) -> Request:
    return Request(
        request_id=name,
        client=b"",
        params=SamplingParams(max_tokens=max_tokens, temperature=0),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        eos_token_id=None,
        max_total_tokens=len(prompt) + max_tokens,
        seed=0,
        **kwargs,  # type: ignore[arg-type]
    )


def make_scheduler(
    num_blocks: int,
    *,
    seqs: int = 8,
    budget: int = 8,
    cache: bool = True,
    windows: Windows = PLAIN,
) -> Scheduler:
    groups = KVGroups(tuple(KVGroup(BLOCK, window) for window in windows), budget)
    pool = BlockPool(num_blocks) if windows == PLAIN else BlockPool(num_blocks, groups)
    return Scheduler(pool, BLOCK, seqs, budget, 100, cache)


def run(scheduler: Scheduler, runner: ToyRunner, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        if not scheduler.has_work:
            return
        plan = scheduler.schedule()
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        assert len(plan.scheduled) <= scheduler.max_num_seqs
        for made in scheduler.update(plan, runner.execute(plan)):
            if made.request.finish_reason is not None:
                scheduler.finish(made.request, made.request.finish_reason)
        check_blocks(scheduler.pool)
    pytest.fail(f"not finished after {max_steps} steps")


def expected(prompt: list[int], max_tokens: int, windows: Windows = PLAIN) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token([token for window in windows for token in seen(tokens, window)]))
    return tokens


def test_the_prompt_and_the_answer_are_kept_for_the_turn_that_is_expected() -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    for pin_s in (0, 300):
        first = make_request(f"first {pin_s}", [1, 2] * BLOCK, 2 * BLOCK + 1, pin_s=pin_s)
        scheduler.add(first)
        run(scheduler, runner)
        for other in range(3, 9):
            scheduler.add(make_request(f"{pin_s} {other}", [other] * 6 * BLOCK, 1))
            run(scheduler, runner)
        turn = make_request(f"next {pin_s}", [*first.token_ids, 0], 1)
        scheduler.add(turn)
        run(scheduler, runner)
        assert turn.num_cached_tokens == (4 * BLOCK if pin_s else 0)


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 12)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("windows", [PLAIN, (None, 5), (6,), (None, None, 3, 9)], ids=str)
@settings(max_examples=200)
@given(prompts, st.integers(8, 20), st.integers(1, 8), st.integers(1, 24), st.booleans())
def test_any_batch_generates_what_each_request_would_alone(
    windows: Windows,
    work: list[tuple[list[int], int]],
    num_blocks: int,
    seqs: int,
    budget: int,
    cache: bool,
) -> None:
    num_blocks *= len(windows)
    options: Any = {"seqs": seqs, "budget": max(budget, seqs), "cache": cache, "windows": windows}
    scheduler, runner = make_scheduler(num_blocks, **options), ToyRunner(windows=windows)
    requests = [make_request(str(i), p, n) for i, (p, n) in enumerate(work)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, runner)
    for request, (prompt, count) in zip(requests, work, strict=True):
        assert request.token_ids == expected(prompt, count, windows)
        assert request.finish_reason is FinishReason.LENGTH
    assert scheduler.pool.num_free == num_blocks
    assert not scheduler.requests


@pytest.mark.parametrize("windows", [(None, 5), (6,), (None, 3, 9)], ids=str)
def test_a_long_answer_holds_as_many_blocks_of_a_window_as_its_tokens_need(
    windows: Windows,
) -> None:
    scheduler, runner = make_scheduler(200, windows=windows), ToyRunner(windows=windows)
    request = make_request("long", list(range(100)), 80)
    scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        ends = [share.start + share.num_tokens for share in plan.scheduled]
        for group, window in enumerate(windows):
            held = num_held(request.block_ids[group :: len(windows)])
            rows = -(-ends[0] // BLOCK)
            # A block begins and one ends in the window, and a step's tokens come on top of it.
            assert held <= (rows if window is None else -(-(window + 8) // BLOCK) + 1)
            assert held == rows or (window and rows > window // BLOCK)
        assert 200 - scheduler.pool.num_free == num_held(request.block_ids)
        assert num_held(request.block_ids) <= scheduler.pool.groups.most(request.num_tokens)
        for made in scheduler.update(plan, runner.execute(plan)):
            if made.request.finish_reason is not None:
                scheduler.finish(made.request, made.request.finish_reason)
    assert request.token_ids == expected(list(range(100)), 80, windows)


def test_a_prefix_is_found_where_all_that_windows_see_is_cached() -> None:
    """The full group's blocks of a short prefix outlive those of its window, which were passed."""
    windows = (None, 5)
    scheduler, runner = make_scheduler(40, windows=windows), ToyRunner(windows=windows)
    prompt = list(range(40))
    scheduler.add(make_request("first", prompt, 1))
    run(scheduler, runner)
    hashes = hashes_of(prompt)
    for rows in range(len(hashes) + 1):
        assert len(scheduler.pool.match(hashes[:rows])) == 2 * rows, "nothing is forgotten yet"
    assert set(scheduler.pool.remembered_hashes()) == set(hashes), "others hear of whole prefixes"
    held = scheduler.pool.allocate(40 - 2 * len(hashes) + 6)  # as much as windows have passed
    assert scheduler.pool.num_free
    assert scheduler.pool.match(hashes[:4]) == []
    found = scheduler.pool.match(hashes)
    assert found[1::2][:-3] == [NULL_BLOCK] * (len(hashes) - 3), "only what is seen is taken"
    assert NULL_BLOCK not in found[::2]
    scheduler.pool.release(held)
    again = make_request("again", [*prompt, 7], 3)
    scheduler.add(again)
    run(scheduler, runner)
    assert again.token_ids == expected([*prompt, 7], 3, windows)
    assert again.num_cached_tokens == 40


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    scheduler, runner = make_scheduler(16, budget=8), ToyRunner()
    scheduler.add(make_request("a", list(range(20)), 1))
    sizes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        sizes.append([(s.start, s.num_tokens, s.samples) for s in plan.scheduled])
        for made in scheduler.update(plan, runner.execute(plan)):
            scheduler.finish(made.request, FinishReason.LENGTH)
    assert sizes == [[(0, 8, False)], [(8, 8, False)], [(16, 4, True)]]


@pytest.mark.parametrize(
    ("enough", "steps"),
    [(1, [["a"], ["a", "b"], ["a", "b", "c"]]), (7, [["a", "b"], ["a", "b", "c"]])],
)
def test_a_step_with_enough_tokens_of_prompts_begins_no_other(
    enough: int, steps: list[list[str]]
) -> None:
    scheduler, runner = make_scheduler(16, budget=30), ToyRunner()
    scheduler.enough_prompt_tokens = enough
    for name in "abc":
        scheduler.add(make_request(name, [1, 2, 3, ord(name)], 9))
    for names in steps:
        plan = scheduler.schedule()
        assert [share.request.request_id for share in plan.scheduled] == names
        scheduler.update(plan, runner.execute(plan))


def test_a_repeated_prompt_computes_only_its_last_block() -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    prompt = list(range(12))
    scheduler.add(make_request("first", prompt, 1))
    run(scheduler, runner)
    before = runner.computed
    again = make_request("again", prompt, 1)
    scheduler.add(again)
    run(scheduler, runner)
    assert runner.computed - before == BLOCK
    assert again.num_cached_tokens == 8
    assert scheduler.stats.prefix_cache_hits == 8


def test_different_salts_share_nothing() -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    for salt in ("a", "b"):
        request = make_request(salt, list(range(12)), 1, cache_salt=salt)
        scheduler.add(request)
        run(scheduler, runner)
        assert request.num_cached_tokens == 0


def test_the_youngest_running_request_is_preempted_and_finishes_all_the_same() -> None:
    scheduler, runner = make_scheduler(6), ToyRunner()
    old, young = make_request("old", [1] * 8, 12), make_request("young", [2] * 8, 12)
    scheduler.add(old)
    scheduler.add(young)
    run(scheduler, runner)
    assert scheduler.stats.num_preemptions > 0
    assert old.token_ids == expected([1] * 8, 12)
    assert young.token_ids == expected([2] * 8, 12)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborting_at_any_point_gives_all_blocks_back(steps: int) -> None:
    scheduler, runner = make_scheduler(16, budget=8), ToyRunner()
    request = make_request("a", list(range(20)), 5)
    scheduler.add(request)
    for _ in range(steps):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
    scheduler.finish(request, FinishReason.ABORT)
    assert scheduler.pool.num_free == 16
    assert not scheduler.has_work
    scheduler.finish(request, FinishReason.ABORT)  # again: nothing happens


def test_a_request_aborted_during_a_step_emits_nothing_more() -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    request = make_request("a", [1, 2, 3], 5)
    scheduler.add(request)
    plan = scheduler.schedule()
    result = runner.execute(plan)
    scheduler.finish(request, FinishReason.ABORT)
    assert scheduler.update(plan, result) == []
    check_blocks(scheduler.pool)


def remote(tokens: int) -> KVTransferParams:
    return KVTransferParams(
        do_remote_prefill=True,
        remote_num_tokens=tokens,
        remote_block_ids=[list(range(-(-tokens // BLOCK)))],
    )


class TestHandOff:
    """The decode side: blocks are reserved, filled by the hinge, and only then used."""

    prompt: ClassVar[list[int]] = list(range(10))

    def start(self) -> tuple[Scheduler, Request]:
        scheduler = make_scheduler(16)
        request = make_request("d", self.prompt, 5, kv_transfer=remote(10))
        request.token_ids.append(next_token(self.prompt))
        scheduler.add(request)
        assert scheduler.schedule().scheduled == []
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV
        return scheduler, request

    def test_received_kv_is_not_computed_again(self) -> None:
        scheduler, request = self.start()
        (order,) = scheduler.load_orders
        assert order.indices == [0, 1, 2]
        runner = ToyRunner()
        for position, token in enumerate(self.prompt):
            runner.slots[runner.slot(request, position)] = token
        assert scheduler.load_ended("d", ok=True) is None
        run(scheduler, runner)
        assert request.token_ids == expected(self.prompt, 5)
        assert scheduler.stats.prompt_tokens_computed == 0
        assert scheduler.stats.remote_kv_tokens == 10

    def test_a_cached_prefix_is_not_fetched_again(self) -> None:
        scheduler, runner = make_scheduler(16), ToyRunner()
        scheduler.add(make_request("warm", self.prompt, 1))
        run(scheduler, runner)
        request = make_request("d", self.prompt, 5, kv_transfer=remote(10))
        request.token_ids.append(next_token(self.prompt))
        scheduler.add(request)
        scheduler.schedule()
        (order,) = scheduler.load_orders
        assert order.indices == [2]

    @pytest.mark.parametrize("fetched", [False, True])
    def test_what_a_former_core_had_begun_is_computed_no_more_but_fetched_whole(
        self, fetched: bool
    ) -> None:
        scheduler, runner = make_scheduler(16), ToyRunner()
        scheduler.add(make_request("warm", self.prompt[: 2 * BLOCK], 1))
        run(scheduler, runner)
        pool = scheduler.pool
        begun, (_, parent) = next(iter(pool._free)), pool._block_of
        assert isinstance(parent, bytes)
        assert pool.adopt_part(begun, parent, [self.prompt[8], 99])
        runner.slots[begun * BLOCK] = self.prompt[8]
        transfer = remote(10) if fetched else None
        request = make_request("d", self.prompt, 5, kv_transfer=transfer)
        scheduler.add(request)
        plan = scheduler.schedule()
        assert (begun in request.block_ids) != fetched
        assert [(share.start, share.num_tokens) for share in plan.scheduled] == (
            [] if fetched else [(9, 1)]
        )
        check_blocks(pool)
        if not fetched:
            scheduler.update(plan, runner.execute(plan))
            run(scheduler, runner)
            assert request.token_ids == expected(self.prompt, 5)

    def fetch(
        self, known: int, prompt: list[int], remote_tokens: int, windows: Windows, budget: int
    ) -> Request:
        """Run a request whose first `known` tokens are cached, with as many blocks as it needs."""
        most = KVGroups(tuple(KVGroup(BLOCK, w) for w in windows), budget).most(len(prompt) + 4)
        scheduler = make_scheduler(most, budget=budget, windows=windows)
        runner = ToyRunner(windows=windows)
        scheduler.add(make_request("warm", prompt[:known], 1))
        run(scheduler, runner)
        request = make_request("d", prompt, 4, kv_transfer=remote(remote_tokens))
        scheduler.add(request)
        assert scheduler.schedule().scheduled == []
        assert num_held(request.block_ids) <= most
        for position in range(remote_tokens):
            for group in range(len(windows)):
                place = position // BLOCK * len(windows) + group
                if request.block_ids[place] != NULL_BLOCK:
                    runner.slots[runner.slot(request, position, group)] = prompt[position]
        assert scheduler.load_ended("d", ok=True) is None
        run(scheduler, runner)
        return request

    def test_a_fetch_holds_no_cached_blocks_that_its_windows_pass(self) -> None:
        windows, prompt = (None, 16), list(range(64))
        request = self.fetch(20, prompt, 64, windows, budget=4)
        assert request.token_ids == expected(prompt, 4, windows)

    def test_what_is_cached_behind_a_hand_off_is_not_computed_again(self) -> None:
        windows, prompt = (None, 4), list(range(40))
        request = self.fetch(40, prompt, 16, windows, budget=40)
        assert request.token_ids == expected(prompt, 4, windows)
        assert request.num_received_tokens == 0

    def test_a_failed_load_is_returned_to_be_answered_and_frees_its_blocks(self) -> None:
        scheduler, request = self.start()
        assert scheduler.load_ended("d", ok=False) is request
        scheduler.finish(request, FinishReason.ERROR)
        assert scheduler.pool.num_free == 16

    def test_blocks_of_a_cancelled_load_stay_held_until_the_hinge_lets_go(self) -> None:
        scheduler, request = self.start()
        scheduler.finish(request, FinishReason.ABORT)
        assert scheduler.pool.num_free == 13
        assert scheduler.load_ended("d", ok=True) is None
        assert scheduler.pool.num_free == 16

    def test_a_load_that_was_never_started_ends_silently(self) -> None:
        scheduler = make_scheduler(4)
        assert scheduler.load_ended("unknown", ok=True) is None

    def test_received_requests_cannot_starve_each_other_of_their_last_block(self) -> None:
        """Two hold six blocks of six between them, and each needs one more."""
        scheduler, runner = make_scheduler(6), ToyRunner()
        requests = []
        for name in "ab":
            prompt = [ord(name)] * 12
            request = make_request(name, prompt, 5)
            request.token_ids.append(next_token(prompt))
            request.block_ids = scheduler.pool.allocate(3)
            request.num_computed_tokens = 12
            for position, token in enumerate(prompt):
                runner.slots[runner.slot(request, position)] = token
            scheduler.add(request)
            requests.append((request, prompt))
        run(scheduler, runner)
        for request, prompt in requests:
            assert request.token_ids == expected(prompt, 5)


def test_leased_blocks_outlive_their_request_until_the_lease_ends() -> None:
    scheduler, runner = make_scheduler(8), ToyRunner()
    request = make_request("p", list(range(10)), 1)
    scheduler.add(request)
    plan = scheduler.schedule()
    while not (made := scheduler.update(plan, runner.execute(plan))):
        plan = scheduler.schedule()
    assert made[0].request.finish_reason is FinishReason.LENGTH
    scheduler.leased.begin("lease")
    assert len(scheduler.leased) == 0, "nothing is lent yet"
    assert len(scheduler.leased.lend("lease", request.block_ids[:2])) == 2
    scheduler.leased.lend("lease", request.block_ids[2:])
    scheduler.finish(request, FinishReason.LENGTH)
    assert (len(scheduler.leased), scheduler.leased.count("lease")) == (1, 3)
    assert scheduler.pool.num_free == 5
    scheduler.leased.end("lease")
    assert scheduler.pool.num_free == 8
    scheduler.leased.end("lease")  # a second report changes nothing
    check_blocks(scheduler.pool)


def test_two_leases_of_one_name_give_back_their_own_blocks() -> None:
    """A router that tries again keeps the request's name."""
    scheduler, runner = make_scheduler(8, cache=False), ToyRunner()
    leased = []
    for name in ("first", "second"):
        request = make_request("p", list(range(10)), 1)
        scheduler.add(request)
        plan = scheduler.schedule()
        while not scheduler.update(plan, runner.execute(plan)):
            plan = scheduler.schedule()
        scheduler.leased.begin(name)
        leased.append(scheduler.leased.lend(name, request.block_ids))
        scheduler.finish(request, FinishReason.LENGTH)
    assert scheduler.pool.num_free == 2
    scheduler.leased.end("first")
    assert scheduler.pool.num_free == 5
    assert set(scheduler.pool.allocate(5)).isdisjoint(leased[1])
    assert "first" not in scheduler.leased
    assert "second" in scheduler.leased


PROMPT = list(range(20))
REMOTE = KVTransferParams(do_remote_prefill=True, remote_num_tokens=20, remote_block_ids=[[0] * 5])


@each(
    ("before", "queued", "cache", "expected_tokens"),
    [
        ([], [{}], True, 20),
        ([], [{}, {}], True, 40),
        ([PROMPT], [{}], True, 4),  # the last block is always computed
        ([PROMPT], [{}, {}], True, 8),
        ([PROMPT], [{}], False, 20),
        ([PROMPT[:10]], [{}], True, 12),
        ([PROMPT], [{"cache_salt": "other"}], True, 20),
        ([], [{"kv_transfer": REMOTE}], True, 0),
    ],
)
def test_queued_prompt_tokens_are_those_that_steps_must_compute(
    before: list[list[int]], queued: list[dict[str, object]], cache: bool, expected_tokens: int
) -> None:
    scheduler = make_scheduler(32, cache=cache)
    for prompt in before:
        scheduler.add(make_request("before", prompt, 1))
        run(scheduler, ToyRunner())
    for index, how in enumerate(queued):
        scheduler.add(make_request(str(index), PROMPT, 1, **how))
    assert scheduler.snapshot().queued_prompt_tokens == expected_tokens
    assert scheduler.snapshot().queued_prompt_tokens == expected_tokens


def test_queued_prompt_tokens_are_told_by_tenant_if_there_are_any() -> None:
    scheduler = make_scheduler(32)
    scheduler.add(make_request("nobody", PROMPT, 1))
    assert scheduler.snapshot().queued_tokens_of == {}
    for number in range(2):
        scheduler.add(make_request(f"a{number}", PROMPT, 1, tenant="a"))
    assert scheduler.snapshot().queued_tokens_of == {"": 20, "a": 40}
    for number in range(2 * MAX_TENANTS_TOLD):
        scheduler.add(make_request(f"t{number}", PROMPT, 1, tenant=f"t{number}"))
    told = scheduler.snapshot().queued_tokens_of
    assert len(told) == MAX_TENANTS_TOLD
    assert told["a"] == 40


def test_blocks_are_told_by_what_they_are_for_and_by_request() -> None:
    scheduler, runner = make_scheduler(32), ToyRunner()
    scheduler.add(make_request("before", PROMPT, 1))
    run(scheduler, runner)
    told = scheduler.snapshot()
    assert (told.blocks_remembered, told.holders) == (len(PROMPT) // BLOCK, [])
    scheduler.add(make_request("runs", PROMPT, 8))
    scheduler.add(make_request("comes", [9, *PROMPT[1:]], 1, kv_transfer=REMOTE))
    plan = scheduler.schedule()
    scheduler.update(plan, runner.execute(plan))
    told = scheduler.snapshot()
    remote = len(PROMPT) // BLOCK
    assert {x.request_id: x.num_arriving for x in told.holders} == {"runs": 0, "comes": remote}
    assert told.blocks_arriving == remote
    assert sum(x.num_blocks for x in told.holders) == told.blocks_total - told.blocks_free
    scheduler.load_ended("comes", ok=True)
    assert scheduler.snapshot().blocks_arriving == 0


def test_what_is_pinned_is_told_and_the_next_turn_hears_what_it_found_of_that() -> None:
    scheduler, runner = make_scheduler(32), ToyRunner()
    told = []
    for prompt in (PROMPT, PROMPT, [*PROMPT, 5, 5]):
        scheduler.add(make_request("turn", prompt, 1, pin_s=300 if scheduler.stats.steps else 0))
        while not (made := scheduler.update(plan := scheduler.schedule(), runner.execute(plan))):
            pass
        scheduler.finish(made[0].request, FinishReason.LENGTH)
        told.append((made[0].output.num_pinned_tokens, scheduler.snapshot().blocks_pinned))
    pinned = len(PROMPT) // BLOCK
    assert told == [(0, 0), (0, pinned), (pinned * BLOCK, pinned)]


def test_queued_prompt_tokens_follow_what_is_remembered_and_forgotten() -> None:
    scheduler, runner = make_scheduler(10, budget=8), ToyRunner()
    scheduler.add(make_request("first", PROMPT, 1))
    scheduler.add(make_request("second", PROMPT, 1))
    seen = []
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
        seen.append(scheduler.snapshot().queued_prompt_tokens)
    assert seen == [12 + 12, 4 + 4], "what the first computes the second need not"
    run(scheduler, runner)
    scheduler.add(make_request("late", PROMPT, 1))
    assert scheduler.snapshot().queued_prompt_tokens == 4
    scheduler.pool.release(scheduler.pool.allocate(10))  # somebody else needed every block
    assert scheduler.snapshot().queued_prompt_tokens == 20


@pytest.mark.parametrize(
    ("params", "eos", "token", "ended"),
    [
        (SamplingParams(max_tokens=9), 7, 7, (FinishReason.STOP, None)),
        (SamplingParams(max_tokens=9, ignore_eos=True), 7, 7, None),
        (SamplingParams(max_tokens=9, stop_token_ids=[5]), 7, 5, (FinishReason.STOP, 5)),
        (SamplingParams(max_tokens=9, min_tokens=2), 7, 7, None),
        (SamplingParams(max_tokens=1), 7, 3, (FinishReason.LENGTH, None)),
        (SamplingParams(max_tokens=1), 7, 7, (FinishReason.STOP, None)),
    ],
)
def test_what_ends_a_request(
    params: SamplingParams, eos: int, token: int, ended: tuple[FinishReason, int | None] | None
) -> None:
    request = make_request("a", [1, 2], params.max_tokens or 0)
    request.params, request.eos_token_id = params, eos
    request.token_ids.append(token)
    assert stop_condition(request, token) == ended


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    request = make_request("a", [1], 1)
    with pytest.raises(RuntimeError, match="WAITING -> PREEMPTED"):
        request.become(RequestStatus.PREEMPTED)
    assert request.status is RequestStatus.WAITING


def test_a_snapshot_is_its_readers() -> None:
    scheduler, runner = make_scheduler(16), ToyRunner()
    before = scheduler.snapshot()
    before.paused, before.steps = True, 100
    scheduler.add(make_request("a", PROMPT, 2))
    run(scheduler, runner)
    after = scheduler.snapshot()
    assert (before.steps, before.tokens_generated) == (100, 0)
    assert (after.paused, after.steps, after.tokens_generated) == (False, 4, 2)
