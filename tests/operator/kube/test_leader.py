"""When a Lease may be taken, by the clock of the one who watches it."""

from __future__ import annotations

from typing import Any

import pytest

from diptych_operator.kube.leader import (
    ABANDONED_S,
    LEASE_S,
    RELEASE_ANNOTATION,
    RENEW_DEADLINE_S,
    RETRY_S,
    Candidate,
    Sighting,
    leases_of,
)

OTHER = "operator-1"
ME = Candidate("operator-0", "team/diptych", leases_of([]))


def lease(
    holder: str | None = OTHER, version: str = "1", duration: int | None = 20
) -> dict[str, Any]:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": duration, "renewTime": "1999-01-01"}
    given = {name: value for name, value in spec.items() if value is not None}
    return {"metadata": {"resourceVersion": version}, "spec": given}


def test_a_lease_that_another_has_just_renewed_is_taken() -> None:
    assert not Sighting().is_free(lease(), ME, now=1000.0)


@pytest.mark.parametrize("holder", ["", None])
def test_a_lease_that_was_given_up_is_free_at_once(holder: str | None) -> None:
    assert Sighting().is_free(lease(holder), ME, now=0.0)


def test_a_lease_without_a_spec_is_free() -> None:
    assert Sighting().is_free({"metadata": {"resourceVersion": "1"}}, ME, now=0.0)


def test_ones_own_lease_is_free_at_once() -> None:
    assert Sighting().is_free(lease(ME.identity), ME, now=0.0)


def test_a_holder_that_is_gone_keeps_it_for_its_duration_from_the_first_sight() -> None:
    seen = Sighting()
    # The time that the holder wrote is long past: clocks of two machines are not compared.
    assert not seen.is_free(lease(), ME, now=500.0)
    assert not seen.is_free(lease(), ME, now=520.0)
    assert seen.is_free(lease(), ME, now=520.1)


def test_each_renewal_begins_the_wait_anew() -> None:
    seen = Sighting()
    for tick in range(20):
        assert not seen.is_free(lease(version=str(tick)), ME, now=tick * 15.0)
    assert not seen.is_free(lease(version="19"), ME, now=19 * 15.0 + 20.0)
    assert seen.is_free(lease(version="19"), ME, now=19 * 15.0 + 20.1)


def test_a_lease_that_comes_again_is_a_new_one() -> None:
    seen = Sighting()
    seen.is_free(lease(version="7"), ME, now=0.0)
    assert not seen.is_free(lease(version="9"), ME, now=100.0)


@pytest.mark.parametrize("holder", ["", OTHER, ME.identity])
def test_the_lease_of_another_installation_is_left_to_its_replicas(holder: str) -> None:
    theirs, ours = lease(holder), lease(holder)
    theirs["metadata"]["annotations"] = {RELEASE_ANNOTATION: "other/diptych"}
    ours["metadata"]["annotations"] = {RELEASE_ANNOTATION: ME.release}
    seen = Sighting()
    assert not seen.is_free(theirs, ME, now=0.0)
    assert not seen.is_free(theirs, ME, now=ABANDONED_S - 0.1)
    assert seen.is_free(theirs, ME, now=ABANDONED_S), "that installation has gone"
    assert Sighting().is_free(ours, ME, now=0.0) == (holder != OTHER)


def test_the_holder_says_how_long() -> None:
    patient, silent = Sighting(), Sighting()
    for seen, duration in ((patient, 60), (silent, None)):
        seen.is_free(lease(duration=duration), ME, now=0.0)
    assert not patient.is_free(lease(duration=60), ME, now=60.0)
    assert patient.is_free(lease(duration=60), ME, now=60.1)
    assert not silent.is_free(lease(duration=None), ME, now=LEASE_S)
    assert silent.is_free(lease(duration=None), ME, now=LEASE_S + 0.1)


def test_a_leader_that_cannot_renew_ends_before_another_may_begin() -> None:
    assert RENEW_DEADLINE_S + 2 * RETRY_S < LEASE_S
