"""Figures are of the code that is here, or nearly: who changes a room much measures it again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_COMMITS = 400
"""A figure may be so many commits of its rooms old."""

ENGINE = ("engine/diptych_engine", "kernels/diptych_kernels")
ROUTER = ("frontend/diptych_frontend", "router/diptych_router")
HANDOFF = ("kv_transfer/diptych_kv_transfer", "engine/diptych_engine/handoff")
SIMULATED = (
    "benchmarks/simulate", "cli/diptych/simulator", "router/diptych_router/choosing",
    "engine/diptych_engine/scheduling",
)  # fmt: skip
MODELS = ("engine/diptych_engine/models", "engine/diptych_engine/weights", ENGINE[1])
ROOMS = {
    "accuracy": MODELS,
    "capacity": SIMULATED,
    "growth": ENGINE,
    "handoff": HANDOFF,
    "mixed": ENGINE,
    "offline": ENGINE,
    "online": ENGINE,
    "overhead": ENGINE,
    "pair": (*ENGINE, *HANDOFF[:1]),
    "parallel": ENGINE,
    "prefixes": HANDOFF,
    "promises": SIMULATED,
    "replay": ("router/diptych_router/choosing",),
    "roles": SIMULATED,
    "router": ROUTER,
    "routing": SIMULATED,
    "simulate-check": SIMULATED,
    "simulate-costs": ENGINE,
    "sizes": MODELS,
    "startup": ENGINE,
    "streams": ROUTER,
    "turns": (*ENGINE, *HANDOFF[:1]),
    "vllm_pd": ("vllm_connector",),
    "zones": SIMULATED,
}
"""By the name of a file of records: the code that its figures are of."""


def git(*words: str) -> str | None:
    """What git prints; None: it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def test_each_file_of_records_says_which_code_its_figures_are_of() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == ROOMS.keys()
    assert all((ROOT / room).is_dir() for rooms in ROOMS.values() for room in rooms)


@pytest.mark.parametrize("name", ROOMS)
def test_figures_are_measured_again_when_their_code_has_changed_much(name: str) -> None:
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the history is not here")
    records = (RESULTS / f"{name}.json").read_text()
    for commit in set(re.findall(r"commit ([0-9a-f]{7,40})", records)):
        # Who measured may still have a commit that was rebased since: a clone has not.
        assert git("merge-base", "--is-ancestor", commit, "HEAD") is not None, (
            f"{name}.json was measured at {commit}, which is not in the history"
        )
        age = int(git("rev-list", "--count", f"{commit}..HEAD", "--", *ROOMS[name]) or 0)
        assert age <= MOST_COMMITS, (
            f"{name}.json was measured {age} commits of its code ago, at {commit}: measure it again"
        )
