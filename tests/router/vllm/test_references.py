"""What prefill engines keep is used once, and in time."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_router.engines.vllm.references import References, UnusableReferenceError

LEASE_S = 30.0
PARAMS = {"remote_block_ids": [[1, 2]], "remote_engine_id": "p's own name"}


def kept(references: References, now: float = 0.0) -> dict[str, object]:
    return references.keep("p:1", "compat", PARAMS, now)


def test_a_reference_reaches_the_engine_that_reads_as_the_prefill_engine_has_said_it() -> None:
    references = References(LEASE_S)
    assert references.take(kept(references), "d:1", 1.0) == PARAMS


def test_what_the_rest_of_the_router_sees_names_no_block() -> None:
    lease = kept(References(LEASE_S))
    assert lease["remote_engine_id"] == "p:1"
    assert "remote_block_ids" not in lease


def test_a_reference_serves_once() -> None:
    references = References(LEASE_S)
    lease = kept(references)
    references.take(lease, "d:1", 1.0)
    with pytest.raises(UnusableReferenceError, match="used before"):
        references.take(lease, "d:2", 1.0)


@pytest.mark.parametrize(
    ("age", "usable"), [(0.0, True), (19.9, True), (20.1, False), (99.0, False)]
)
def test_nobody_begins_to_read_when_a_lease_is_nearly_over(age: float, usable: bool) -> None:
    references = References(LEASE_S)
    lease = kept(references)
    if usable:
        references.take(lease, "d:1", age)
        return
    with pytest.raises(UnusableReferenceError, match="old"):
        references.take(lease, "d:1", age)


@pytest.mark.parametrize("lease", [{}, {"reference": 3}, {"reference": "0" * 32}, {"x": PARAMS}])
def test_what_no_prefill_engine_has_said_is_no_reference(lease: dict[str, object]) -> None:
    references = References(LEASE_S)
    kept(references)
    with pytest.raises(UnusableReferenceError):
        references.take(lease, "d:1", 0.0)
    assert references.release(lease, 0.0, even_if_taken=True) is None


@pytest.mark.parametrize(("taken", "even_if_taken"), [(False, False), (True, False), (True, True)])
def test_blocks_are_given_back_once(taken: bool, even_if_taken: bool) -> None:
    references = References(LEASE_S)
    lease = kept(references)
    if taken:
        references.take(lease, "d:1", 0.0)
    expected = PARAMS if even_if_taken or not taken else None
    assert references.release(lease, 1.0, even_if_taken=even_if_taken) == expected
    assert references.release(lease, 1.0, even_if_taken=even_if_taken) is None
    with pytest.raises(UnusableReferenceError):
        references.take(lease, "d:2", 0.0)


def test_readers_of_an_engine_are_known_while_it_matters() -> None:
    references = References(LEASE_S)
    for decode in ("d:1", "d:2"):
        references.take(kept(references), decode, 0.0)
    kept(references)
    references.take(references.keep("p:2", "", PARAMS, 0.0), "d:3", 0.0)
    assert references.readers("p:1", 2 * LEASE_S) == {"d:1", "d:2"}
    assert references.reads("d:3", 2 * LEASE_S)
    assert not references.reads("p:1", 2 * LEASE_S)
    assert references.readers("p:1", 2 * LEASE_S + 1) == set()
    assert not references.reads("d:3", 2 * LEASE_S + 1)


def test_blocks_that_a_decode_engine_refused_to_read_are_given_back() -> None:
    references = References(LEASE_S)
    lease = kept(references)
    references.take(lease, "d:1", 0.0)
    references.nothing_reads(lease)
    with pytest.raises(UnusableReferenceError, match="used before"):
        references.take(lease, "d:2", 0.0)
    assert references.release(lease, 0.0, even_if_taken=False) == PARAMS


def test_blocks_whose_lease_is_over_are_not_given_back() -> None:
    """They may be somebody else's, and the prefill engine would take it for a read."""
    references = References(LEASE_S)
    lease = kept(references)
    assert references.release(lease, LEASE_S, even_if_taken=True) is None


@given(st.lists(st.tuples(st.sampled_from("ktr"), st.floats(0, 10)), max_size=60))
def test_nothing_is_kept_for_ever(steps: list[tuple[str, float]]) -> None:
    references, now, leases = References(LEASE_S), 0.0, []
    for what, later in steps:
        now += later
        match what:
            case "k":
                leases.append(kept(references, now))
            case "t" if leases:
                with contextlib.suppress(UnusableReferenceError):
                    references.take(leases[-1], "d:1", now)
            case "r" if leases:
                references.release(leases.pop(), now, even_if_taken=True)
    now += 2 * LEASE_S + 1
    kept(references, now)
    assert len(references) == 1
