"""Prints the steps of a rollout: python -m diptych_operator.plan --from 4,8 --to 4,8 --surge 1"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

from diptych_operator.api.service import Rollout
from diptych_operator.counts import NOTHING, Counts
from diptych_operator.plan import Step
from diptych_operator.plan.sequence import running, sequence


def table(steps: Iterable[Step]) -> Iterator[str]:
    """One line for each step: prefill+decode pods wanted of both revisions, and their sum."""
    yield f"{'step':>4}  {'old':>9}  {'new':>9}  {'sum':>9}  {'serving':8}  phase"
    for number, step in enumerate(steps):
        old, new = (step.replicas.get(revision, NOTHING) for revision in ("old", "new"))
        cells = "  ".join(f"{f'{c.prefill}P {c.decode}D':>9}" for c in (old, new, old + new))
        yield f"{number:>4}  {cells}  {','.join(step.serving) or 'all':8}  {step.phase}"


def _counts(text: str) -> Counts:
    """`4,8`: 4 prefill and 8 decode pods."""
    prefill, decode = (int(part) for part in text.split(","))
    if prefill < 1 or decode < 1:
        raise ValueError("each pool has at least one pod")
    return Counts(prefill, decode)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diptych_operator.plan", description="Print the steps of a rollout."
    )
    add = parser.add_argument
    add("--from", dest="before", type=_counts, required=True, metavar="P,D", help="pods now")
    add("--to", dest="after", type=_counts, metavar="P,D", help="pods then; the same by default")
    add("--surge", type=int, default=1, metavar="N", help="maxSurge (1)")
    add("--unavailable", type=int, default=0, metavar="N", help="maxUnavailable (0)")
    add("--type", choices=["PairedRolling", "BlueGreen", "Recreate"], default="PairedRolling")
    arguments = parser.parse_args(argv)
    if arguments.surge < 0 or arguments.unavailable < 0:
        parser.error("--surge and --unavailable are not negative")
    if arguments.surge + arguments.unavailable == 0:
        parser.error("--surge and --unavailable cannot both be 0: no pod could ever be replaced")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    rollout = Rollout(
        type=arguments.type, max_surge=arguments.surge, max_unavailable=arguments.unavailable
    )
    after = arguments.after or arguments.before
    for line in table(sequence("new", after, rollout, [running("old", arguments.before)])):
        print(line)


if __name__ == "__main__":
    main()
