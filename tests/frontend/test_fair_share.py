"""Accounts of tenants: who comes back is lifted, and nobody is remembered without an end."""

from __future__ import annotations

import pytest

from diptych_frontend.fair_share import MAX_IDLE, FairShare


def waiting(share: FairShare, tenant: str, served: float = 0.0) -> float:
    """Have a tenant wait; what he has then been served."""
    account = share.open(tenant)
    account.served = max(account.served, served)
    share.begin_to_wait(account)
    return account.served


@pytest.mark.parametrize(
    ("credit", "own", "others", "lifted"),
    [
        (0, 0, [500, 900], 500),
        (100, 0, [500, 900], 400),
        (100, 450, [500, 900], 450),
        (100, 2000, [500, 900], 2000),
        (100, 7, [], 7),
        (1000, 0, [500], 0),
    ],
)
def test_who_begins_to_wait_is_lifted_to_the_least_of_those_who_do(
    credit: float, own: float, others: list[float], lifted: float
) -> None:
    share = FairShare(credit)
    for number, served in enumerate(others):
        waiting(share, f"other {number}", served)
    assert waiting(share, "newcomer", own) == lifted


def test_while_nobody_waits_the_last_one_who_did_is_the_measure() -> None:
    share = FairShare(credit=0)
    account = share.open("a")
    share.begin_to_wait(account)
    share.cease_to_wait(account)
    account.served += 700
    assert waiting(share, "b") == 700


def test_the_credit_does_not_add_up_over_tenants() -> None:
    """Who came with it is behind those who waited, and lifts nobody down to himself."""
    share = FairShare(credit=100)
    waiting(share, "greedy", 1000)
    assert [waiting(share, name) for name in "abc"] == [900, 900, 900]


def test_coming_and_going_wins_no_credit() -> None:
    share = FairShare(credit=100)
    waiting(share, "greedy", 1000)
    account = share.open("light")
    for served in (900, 950, 1000, 1050):
        share.begin_to_wait(account)
        assert account.served == served
        account.served += 50
        share.cease_to_wait(account)


def test_requests_are_counted_by_tenant_until_they_end() -> None:
    share = FairShare(credit=0)
    first = share.open("a")
    assert (share.open("a") is first, share.num_open("a"), len(share)) == (True, 2, 1)
    assert not share.several
    assert not share.others_than("a")
    assert share.others_than("b")
    other = share.open("b")
    assert share.several
    share.close(other)
    share.close(first)
    assert (share.num_open("a"), share.several, len(share)) == (1, False, 1)


def test_service_is_remembered_while_a_tenant_is_away_but_not_of_all_tenants_there_ever_were() -> (
    None
):
    share = FairShare(credit=0)
    account = share.open("a")
    account.served = 70
    share.close(account)
    assert share.open("a").served == 70
    share.close(account)
    for number in range(MAX_IDLE):
        share.close(share.open(f"t{number}"))
    assert share.open("a").served == 0
