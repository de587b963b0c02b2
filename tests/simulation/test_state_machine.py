"""Hypothesis decides what happens next, and shrinks what breaks a property."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from sim_faults import FAULTS, MOMENTS
from sim_world import Moment, World


class Service(RuleBasedStateMachine):
    """Clients, faults and time, in any order. Every rule checks all that must always hold."""

    world: World

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        self.world = World(seed, note)

    @rule()
    def submit(self) -> None:
        self.world.submit()

    @rule(milliseconds=st.integers(0, 200))
    def let_time_pass(self, milliseconds: int) -> None:
        self.world.run(milliseconds / 1000)

    @rule(name=st.sampled_from(sorted(FAULTS)))
    def something_happens(self, name: str) -> None:
        FAULTS[name](self.world, "")

    @rule(name=st.sampled_from(sorted(FAULTS)), moment=st.sampled_from(list(MOMENTS)))
    def something_will_happen(self, name: str, moment: Moment) -> None:
        self.world.armed.append((moment, lambda where: FAULTS[name](self.world, where)))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.come_to_rest()


TestService = Service.TestCase
TestService.settings = settings(max_examples=40, stateful_step_count=20)
