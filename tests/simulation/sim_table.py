"""What a run has seen, as a table, and what it has missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sim_direct import FORGERIES
from sim_faults import FAULTS, MOMENTS, at_moment
from sim_stranger import STRANGERS
from sim_tally import SECTIONS

WHENS = ["any time", *MOMENTS.values()]
KINDS = {
    **SECTIONS,
    "Forged parameters": [f"forged: {kind}" for kind in FORGERIES],
    "Strangers at a hinge": [f"stranger: {kind}" for kind in STRANGERS],
}
KNOWN = [kind for kinds in KINDS.values() for kind in kinds]
CELLS = [at_moment(name, when) for name in FAULTS for when in WHENS]


def missing(seen: Counter[str]) -> list[str]:
    """What never happened."""
    return [kind for kind in [*KNOWN, *CELLS] if not seen[kind]]


def table(seen: Counter[str]) -> Iterator[str]:
    """Lines: each fault by moment, then all other kinds by section, then what has no section."""
    yield "Faults, by the moment at which they happened"
    yield from _faults(seen)
    for section, kinds in KINDS.items():
        yield ""
        yield section
        yield from (f"{seen[kind]:10}  {kind}" for kind in kinds)
    others = sorted(seen.keys() - {*KNOWN, *CELLS})
    yield from ("", "Besides", *(f"{seen[kind]:10}  {kind}" for kind in others))


def _faults(seen: Counter[str]) -> Iterator[str]:
    """A column for each fault; their names stand above, staggered over three lines."""
    names = list(FAULTS)
    for line in range(3):
        shown = "".join(f"{name:>21}" for name in names[line::3])
        yield " " * (40 - 21 + 7 * line) + shown
    for when in WHENS:
        cells = "".join(f"{seen[at_moment(name, when)]:7}" for name in names)
        yield f"{when:>34}{cells}"
    total = "".join(f"{sum(seen[at_moment(name, w)] for w in WHENS):7}" for name in names)
    yield f"{'in all':>34}{total}"
