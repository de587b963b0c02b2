"""The table of accuracy is that of its records, and what is on by default keeps the budget."""

from __future__ import annotations

import json

from benchmarks.accuracy import BUDGET, ROUNDED, TYPES, page
from benchmarks.machine import RESULTS

from diptych_kernels.cpu_level import CpuLevel

RECORD = RESULTS / "accuracy.json"
LEVELS = {level.word for level in CpuLevel}


def test_the_page_is_that_of_the_records() -> None:
    record = json.loads(RECORD.read_text())
    assert RECORD.with_suffix(".md").read_text() == page(record)
    assert record["machines"].keys() == record["types"].keys()


def test_what_is_on_by_default_keeps_the_budget() -> None:
    """Every type does, at every level, as a prompt and token by token."""
    types = json.loads(RECORD.read_text())["types"]
    assert set(types) == {*TYPES, *ROUNDED}
    for name in TYPES:
        measured = LEVELS & set(types[name])
        assert {"none", "avx2", "vnni"} <= measured
        for level in measured:
            told = types[name][level]
            assert max(told["kl_prompt"], told["kl_generated"]) <= BUDGET, (name, level)
