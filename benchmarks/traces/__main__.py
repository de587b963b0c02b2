"""`python -m benchmarks.traces make|show`: write a trace, and say what is in one."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.traces.arguments import count, existing, positive
from benchmarks.traces.formats import read_trace, write_trace
from benchmarks.traces.generate import KINDS, generate


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=__doc__)
    commands = parser.add_subparsers(required=True)

    make = commands.add_parser("make", help="write a trace in Mooncake's format")
    make.add_argument("kind", choices=KINDS)
    make.add_argument("--hit-rate", type=float, required=True, help="the ideal one, from 0 to 0.9")
    make.add_argument("--requests", type=count, default=1000)
    make.add_argument("--rate", type=positive, default=3.4, help="requests a second, on average")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--out", type=Path, required=True)
    make.set_defaults(run=_make)

    show = commands.add_parser("show", help="count what is in traces of either format")
    show.add_argument("files", type=existing, nargs="+", metavar="FILE")
    show.set_defaults(run=_show)
    return parser


def _make(args: argparse.Namespace) -> None:
    trace = generate(args.kind, args.requests, args.hit_rate, args.rate, args.seed)
    write_trace(args.out, trace)
    print(f"{args.out}: {trace.facts()}")


def _show(args: argparse.Namespace) -> None:
    for path in args.files:
        print(f"{path}: {read_trace(path).facts()}")


def main() -> None:
    args = _parser().parse_args()
    try:
        args.run(args)
    except (OSError, ValueError) as exc:
        raise SystemExit(str(exc)) from exc


if __name__ == "__main__":
    main()
