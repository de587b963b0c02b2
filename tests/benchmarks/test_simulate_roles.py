"""Roles that follow a load which turns, in virtual time, with the router's own decisions."""

from __future__ import annotations

import pytest
from benchmarks.simulate import elastic


@pytest.mark.slow
def test_promises_are_kept_again_within_seconds_after_the_load_has_turned() -> None:
    log = elastic.simulate(2, elastic=True)
    assert min(elastic.kept(log)[1:]) >= 0.95
    assert not log.unanswered
    assert len(log.turns) < 2 * elastic.PODS
    assert min(elastic.kept(elastic.simulate(2, elastic=False))) < 0.8


@pytest.mark.slow
def test_roles_follow_the_load_beside_other_routers_too() -> None:
    """Here they beat the same pods with fixed roles; well-chosen fixed roles may beat them."""
    fixed = elastic.kept(elastic.simulate(2, elastic=False, routers=3))
    log = elastic.simulate(2, elastic=True, routers=3)
    assert min(elastic.kept(log)) > 1.5 * min(fixed)
    assert not log.unanswered
