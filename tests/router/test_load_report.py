"""What a router tells of the prompts of past requests: which begin alike, and nothing else."""

from __future__ import annotations

from array import array

import numpy as np
from cases import each

from diptych_protocol import CurveKeys, EngineCoreRequest, SamplingParams
from diptych_router.engines.known_prefixes import BlockNamer, BlockNaming
from diptych_router.requests.records import record_of
from diptych_router.requests.request_record import KEPT_COUNTS, RequestRecord
from diptych_router.requests.routed_request import RoutedRequest
from diptych_router.telling.load_report import MOST_NAMES, PrefixNames

SIZE = 16
KEYS, OTHERS = CurveKeys("p" * 40, "s" * 40), CurveKeys("p" * 40, "t" * 40)


def record(tokens: list[int], salt: str | None = None) -> RequestRecord:
    """That of a request for which engines were chosen."""
    request = EngineCoreRequest(
        "r", tokens, None, SamplingParams(max_tokens=5), None, 2, 0.0, None, salt, None
    )
    found = record_of(request, 0.0)
    keys = RoutedRequest(request, 1 << 24, found, BlockNamer()).view.keys
    assert keys is not None
    keys(BlockNaming(SIZE))
    return found


def names(tokens: list[int], keys: CurveKeys = KEYS, salt: str | None = None) -> dict[int, int]:
    return dict(PrefixNames(keys).of(record(tokens, salt)) or ())


def test_prompts_have_the_same_names_as_far_as_they_begin_alike() -> None:
    common = list(range(100 * SIZE))
    one, other = names([*common, *[1] * 3000]), names([*common, *[2] * 900])
    shared = {end for end in one.keys() & other.keys() if one[end] == other[end]}
    assert shared == {SIZE * count for count in KEPT_COUNTS.tolist() if count <= 100}
    assert 8 / 9 * len(common) < max(shared) <= len(common)


@each(
    ("prompt", "count"),
    [(1, 0), (SIZE, 0), (SIZE + 1, 1), (16 * SIZE + 1, 16), (1000 * SIZE, 63), (1 << 20, 95)],
)
def test_a_record_is_small_however_long_its_prompt(prompt: int, count: int) -> None:
    known = record(list(range(prompt)))
    assert known.keys is not None
    assert len(known.keys) == count
    assert known.keys.base is None  # it does not hold those of all blocks


def test_a_name_is_that_of_one_service_and_tenant() -> None:
    tokens = list(range(10 * SIZE))
    mine = set(names(tokens).values())
    assert mine == set(names(tokens).values())
    assert not mine & set(names(tokens, OTHERS).values())
    assert not mine & set(names(tokens, salt="another tenant").values())


def test_a_name_tells_nothing_of_the_key_by_which_engines_know_a_block() -> None:
    known = record(list(range(10 * SIZE)))
    assert known.keys is not None
    told = [name for _, name in PrefixNames(KEYS).of(known) or ()]
    assert len(told) == len(known.keys)
    held = known.keys.tobytes()
    assert not any(name.to_bytes(6, order) in held for name in told for order in ("big", "little"))


def test_a_report_names_the_prefixes_of_the_newest_requests_only() -> None:
    known, report = record(list(range(10 * SIZE))), PrefixNames(KEYS)
    told = [report.of(known) for _ in range(MOST_NAMES // 9 + 1)]
    assert all(told[:-1])
    assert told[-1] is None


def test_what_an_answer_says_is_not_named() -> None:
    known = record(list(range(10 * SIZE)))
    keys = np.frombuffer(array("Q", range(1, 16)), np.uint64)
    known.keys = keys  # begun again, with an answer of six blocks
    assert [end for end, _ in PrefixNames(KEYS).of(known) or ()] == [
        SIZE * count for count in range(1, 11)
    ]
