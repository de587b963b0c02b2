"""The scheduler has every image encoded before a token needs it, in bounded room, and never twice
without need. Its blocks depend on the images within them.

The "model" is a function of tokens and features, as in `test_scheduler.py`: a feature that was
forgotten too early, or another image's, changes the output or is missing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from engine_kit.block_checks import check_blocks
from hypothesis import given
from hypothesis import strategies as st

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.encoder_cache import EncoderCache
from diptych_engine.scheduling.images import PlacedImage, identity_of
from diptych_engine.scheduling.request import Request, StepPlan, StepResult
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import FinishReason, SamplingParams
from diptych_protocol.block_hashes import ImageInPrompt, extend_block_hashes, seen_in

BLOCK = 4
MARK = 255
"""The image token."""


def next_token(seen: Sequence[object]) -> int:
    return hashlib.blake2b(repr(list(seen)).encode(), digest_size=1).digest()[0] % 250


@dataclass
class SeeingRunner:
    """As `ToyRunner` of `test_scheduler.py`, with the features that plans have it encode."""

    capacity: int
    slots: dict[int, object] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)
    encoded: list[str] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.images is not None:
            for key in plan.images.forget:
                del self.features[key]
            for image in plan.images.encode:
                assert image.key not in self.features
                self.features[image.key] = image.num_features
                self.encoded.append(image.key)
        assert sum(self.features.values()) <= self.capacity
        sampled = []
        for share in plan.scheduled:
            request, end = share.request, share.start + share.num_tokens
            for position in range(share.start, end):
                self.slots[self.slot(request, position)] = self.content(request, position)
            if share.samples:
                sampled.append(next_token([self.slots[self.slot(request, p)] for p in range(end)]))
        return StepResult(sampled, None, None)

    def content(self, request: Request, position: int) -> object:
        for image in request.images:
            if position in image.places:
                assert image.key in self.features, "its features are not there"
                return image.key, image.places.index(position)
        return request.token_ids[position]

    @staticmethod
    def slot(request: Request, position: int) -> int:
        return request.block_ids[position // BLOCK] * BLOCK + position % BLOCK


def prompt_of(parts: Sequence[tuple[str, int]]) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Texts and images in turn: a part with a name is an image of so many features."""
    token_ids: list[int] = []
    images = []
    for name, size in parts:
        if name:
            places = array("q", range(len(token_ids), len(token_ids) + size))
            seen = ImageInPrompt(name, places[0], places[-1] + 1)
            images.append(PlacedImage(name, places, None, seen))
            token_ids += [MARK] * size + [250]
        else:
            token_ids += [len(token_ids) % 7] * size
    return [*token_ids, 1], tuple(images)


def make_request(name: str, parts: Sequence[tuple[str, int]], max_tokens: int = 3) -> Request:
    prompt, images = prompt_of(parts)
    return Request(
        request_id=name,
        client=b"",
        params=SamplingParams(max_tokens=max_tokens, temperature=0),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        eos_token_id=None,
        max_total_tokens=len(prompt) + max_tokens,
        seed=0,
        images=images,
    )


def expected_of(request: Request) -> list[int]:
    seen: list[object] = list(request.token_ids[: request.num_prompt_tokens])
    for image in request.images:
        for index, place in enumerate(image.places):
            seen[place] = (image.key, index)
    made: list[int] = []
    while len(seen) < request.max_total_tokens:
        made.append(next_token(seen))
        seen.append(made[-1])
    return made


def make_scheduler(capacity: int, *, num_blocks: int = 64, budget: int = 8) -> Scheduler:
    encoder = EncoderCache(capacity, budget)
    return Scheduler(BlockPool(num_blocks), BLOCK, 4, budget, 100, encoder=encoder)


def run(scheduler: Scheduler, runner: SeeingRunner) -> None:
    for _ in range(2000):
        if not scheduler.has_work:
            return
        plan = scheduler.schedule()
        for made in scheduler.update(plan, runner.execute(plan)):
            if made.request.finish_reason is not None:
                scheduler.finish(made.request, made.request.finish_reason)
    raise AssertionError("it does not come to an end")


images = st.tuples(st.sampled_from("abc"), st.just(0))
SIZES = {"a": 3, "b": 5, "c": 9}
texts = st.tuples(st.just(""), st.integers(1, 9))
parts = st.lists(st.one_of(images, texts), min_size=1, max_size=5).map(
    lambda found: [(name, SIZES[name] if name else size) for name, size in found]
)


@given(
    prompts=st.lists(parts, min_size=1, max_size=6),
    capacity=st.integers(9, 20),
    num_blocks=st.integers(16, 64),
    budget=st.integers(4, 16),
    aborted=st.integers(0, 8),
    forgets=st.integers(0, 8),
)
def test_every_request_ends_with_what_its_images_say(
    prompts: list[list[tuple[str, int]]],
    capacity: int,
    num_blocks: int,
    budget: int,
    aborted: int,
    forgets: int,
) -> None:
    """Whatever the room, the order, the chunks, preemptions, aborts and resets."""
    scheduler = make_scheduler(capacity, num_blocks=num_blocks, budget=budget)
    runner = SeeingRunner(capacity)
    requests = [make_request(str(i), each) for i, each in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    for turn in range(2000):
        if turn == aborted and requests[0].request_id in scheduler.requests:
            scheduler.finish(requests[0], FinishReason.ABORT)
        if turn == forgets:
            runner.features.clear()
            scheduler.encoder.forget_all()
        if not scheduler.has_work:
            break
        plan = scheduler.schedule()
        for made in scheduler.update(plan, runner.execute(plan)):
            if made.request.finish_reason is not None:
                scheduler.finish(made.request, made.request.finish_reason)
    assert not scheduler.has_work, "it does not come to an end"
    for request in requests:
        if request.finish_reason is not FinishReason.ABORT:
            assert request.token_ids[request.num_prompt_tokens :] == expected_of(request)
    assert scheduler.encoder.num_tokens == sum(runner.features.values())
    scheduler.schedule()
    assert not any(scheduler.encoder._holders.values()), "nobody is left to hold an image"
    assert scheduler.pool.num_free == num_blocks
    check_blocks(scheduler.pool)


def test_an_image_is_encoded_once_for_all_requests_and_chunks() -> None:
    scheduler, runner = make_scheduler(20), SeeingRunner(20)
    for index in range(3):
        scheduler.add(make_request(str(index), [("", 2 + index), ("a", 10), ("", 5)]))
    run(scheduler, runner)
    assert runner.encoded == ["a"]
    stats = scheduler.snapshot()
    assert (stats.images_encoded, stats.encoder_cache_hits) == (1, 2)
    assert stats.encoder_cache_tokens == 10


def test_the_image_used_longest_ago_gives_way() -> None:
    scheduler, runner = make_scheduler(10), SeeingRunner(10)
    for index, name in enumerate("abacab"):
        scheduler.add(make_request(str(index), [("", 1 + index), (name, 5), ("", 2)]))
        run(scheduler, runner)
    assert runner.encoded == ["a", "b", "c", "b"]


def test_a_prompt_whose_prefix_is_remembered_needs_no_encoder() -> None:
    scheduler, runner = make_scheduler(10), SeeingRunner(10)
    parts = [("", 3), ("a", 9), ("", 8)]
    for name in ("first", "second"):
        scheduler.encoder.forget_all()
        runner.features.clear()
        scheduler.add(make_request(name, parts))
        run(scheduler, runner)
    assert runner.encoded == ["a"]


def test_a_step_begins_no_image_beyond_its_share() -> None:
    scheduler, runner = make_scheduler(100, budget=12), SeeingRunner(100)
    scheduler.add(make_request("r", [("a", 5), ("b", 5), ("c", 5), ("", 1)]))
    plan = scheduler.schedule()
    assert plan.images is not None
    assert [image.key for image in plan.images.encode] == ["a", "b"]
    scheduler.update(plan, runner.execute(plan))
    run(scheduler, runner)
    assert runner.encoded == ["a", "b", "c"]


def test_steps_without_images_say_so() -> None:
    scheduler, runner = make_scheduler(10), SeeingRunner(10)
    scheduler.add(make_request("r", [("", 3)]))
    plan = scheduler.schedule()
    assert plan.images is None
    scheduler.update(plan, runner.execute(plan))


def hashes_of(parts: Sequence[tuple[str, int]], salt: str | None = None) -> list[bytes]:
    token_ids, images = prompt_of(parts)
    hashes: list[bytes] = []
    extend_block_hashes(
        hashes, token_ids, BLOCK, salt, partial(seen_in, [image.seen for image in images])
    )
    return hashes


@pytest.mark.parametrize("size", [4, 5, 7])
def test_contract_B10_blocks_know_which_images_they_hold(size: int) -> None:
    """What precedes an image is shared; every block with a part of it, and all behind, is not."""
    one = hashes_of([("", 8), ("a", size), ("", 9)])
    other = hashes_of([("", 8), ("b", size), ("", 9)])
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    assert one == hashes_of([("", 8), ("a", size), ("", 9)])
    assert not set(one) & set(hashes_of([("", 8), ("a", size), ("", 9)], "salt"))


def test_contract_B10_two_images_in_another_order_are_another_prompt() -> None:
    one = hashes_of([("a", 4), ("b", 4), ("", 6)])
    assert not set(one) & set(hashes_of([("b", 4), ("a", 4), ("", 6)]))
    twice = hashes_of([("a", 4), ("a", 4), ("", 6)])
    assert one[0] == twice[0]
    assert not set(one[1:]) & set(twice[1:])


def test_contract_B10_a_hand_off_names_the_images() -> None:
    _, one = prompt_of([("", 3), ("a", 4)])
    _, other = prompt_of([("", 3), ("b", 4)])
    _, moved = prompt_of([("", 4), ("a", 4)])
    names = {identity_of("salt:x", each) for each in (one, other, moved, ())}
    assert len(names) == 4
    assert identity_of("salt:x", one) != identity_of(None, one)
    assert identity_of(None, ()) is None
