"""`python -m benchmarks.simulate calibrate|run|check|study|promises|zones|routers|roles`.

See docs/capacity.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from benchmarks.machine import RESULTS
from benchmarks.simulate import calibration, report
from benchmarks.simulate.calibration import Calibration
from benchmarks.simulate.traffic import LengthSpread, Sharing, Traffic, bursty
from benchmarks.traces.arguments import add_trace
from benchmarks.traces.formats import TraceError, read_trace
from benchmarks.traces.recorded import BLOCK_TOKENS, Trace, of_trace

from diptych.simulator.cluster import Simulation
from diptych.simulator.metrics import Objectives, RunSummary, summarise
from diptych.simulator.workload import Request
from diptych_router.choosing.policies import POLICIES

MEASURED = RESULTS / "simulate-costs.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)

    measure = commands.add_parser("calibrate", help="measure this machine with the real engine")
    measure.add_argument("--out", type=Path, default=MEASURED)
    measure.add_argument("--rounds", type=int, default=3)
    measure.set_defaults(run=_calibrate)

    compare = commands.add_parser("check", help="simulate what a real 1P1D service is asked")
    compare.add_argument("--costs", type=Path, default=MEASURED, help="where the calibration goes")
    compare.add_argument("--repetitions", type=int, default=3)
    compare.set_defaults(run=_main_of("check", "repetitions", "costs"))

    for name, about in (
        ("study", "a thousand pods on paper"),
        ("promises", "what refusing late requests at once is worth"),
        ("zones", "two zones, and what routers know of them"),
    ):
        commands.add_parser(name, help=about).set_defaults(run=_main_of(name))

    routers = commands.add_parser("routers", help="policies side by side, beside Dynamo's router")
    routers.add_argument("--peer", type=Path, help="a folder with reports of dynamo.replay")
    routers.add_argument("--only", nargs="+", default=[], help="names of traces")
    routers.set_defaults(run=_main_of("routers", "peer", "only"))

    roles = commands.add_parser("roles", help="fixed roles, and roles that follow the load")
    roles.set_defaults(run=_roles)

    run = commands.add_parser("run", help="simulate a service under load")
    run.add_argument("--prefill", type=int, default=1, help="pods; 0: decode pods do everything")
    run.add_argument("--decode", type=int, default=1, help="pods")
    run.add_argument(
        "--costs",
        type=Path,
        help="a file of `calibrate`; without: an 8B model on H200s, on paper",
    )
    run.add_argument("--rate", type=float, nargs="+", default=[1.0], help="requests a second")
    run.add_argument("--burst", type=float, default=1.0, help="variation of gaps; 1 is Poisson")
    run.add_argument("--users", type=int, nargs="+", help="instead of rates: who waits for answers")
    run.add_argument("--requests", type=int, default=1000)
    run.add_argument(
        "--prompt", type=LengthSpread.parse, default="512", help="tokens: MEAN[:SIGMA]"
    )
    run.add_argument("--output", type=LengthSpread.parse, default="64", help="tokens: MEAN[:SIGMA]")
    run.add_argument("--shared", type=float, default=0.0, help="part with a common prefix")
    run.add_argument("--prefixes", type=int, default=16)
    run.add_argument("--prefix-tokens", type=int, default=0)
    run.add_argument("--routers", type=int, default=1)
    run.add_argument("--policy", choices=sorted(POLICIES), default="least_loaded")
    run.add_argument("--disaggregate", choices=("auto", "always", "never"), default="auto")
    run.add_argument("--ttft-ms", type=float, default=1000.0, help="what every request is to get")
    run.add_argument("--tpot-ms", type=float, default=50.0, help="likewise, a token on average")
    run.add_argument("--refuse", action="store_true", help="what would miss --ttft-ms")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--json", action="store_true")
    run.add_argument("--plot", type=Path, help="percentiles and goodput against load, as a picture")
    add_trace(run, [1.0], BLOCK_TOKENS)
    run.set_defaults(run=_run)
    return parser


def _calibrate(args: argparse.Namespace) -> None:
    from benchmarks.simulate.calibrate import calibrate  # the engine, and torch with it

    measured = calibrate(args.rounds)
    measured.write(args.out)
    print(report.errors_line(measured))


def _main_of(name: str, *given: str) -> Callable[[argparse.Namespace], None]:
    """Run the `main` of a module with these arguments. It is imported then: nobody else waits for
    its pictures."""

    def run(args: argparse.Namespace) -> None:
        module = importlib.import_module(f"benchmarks.simulate.{name}")
        module.main(*(getattr(args, each) for each in given))

    return run


def _roles(_: argparse.Namespace) -> None:
    from benchmarks.simulate import elastic

    elastic.main()


def _trace(args: argparse.Namespace) -> Trace | None:
    if args.trace is None:
        return None
    try:
        return read_trace(args.trace).first(args.first).scaled(args.block_tokens)
    except TraceError as exc:
        raise SystemExit(str(exc)) from exc


def _loads(args: argparse.Namespace, trace: Trace | None) -> dict[float, list[Request]]:
    """Requests by the load that they are."""
    if trace is not None:
        sped = [trace.faster(speed) for speed in args.speeds]
        return {each.requests_per_s: of_trace(each) for each in sped}
    sharing = Sharing(args.shared, args.prefixes, args.prefix_tokens)
    traffic = Traffic(args.prompt, args.output, sharing)
    if args.users:
        return {
            users: traffic.requests(np.zeros(args.requests), args.seed, users)
            for users in args.users
        }
    return {
        rate: traffic.requests(bursty(rate, args.requests, args.seed, args.burst), args.seed)
        for rate in args.rate
    }


def _run(args: argparse.Namespace) -> None:
    costs = Calibration.read(args.costs) if args.costs else calibration.on_paper()
    plan = replace(
        costs.plan(args.prefill, args.decode, args.routers, POLICIES[args.policy]),
        disaggregate=args.disaggregate,
        promised_s=args.ttft_ms / 1e3 if args.refuse else None,
    )
    objectives = Objectives(args.ttft_ms / 1e3, args.tpot_ms / 1e3)
    trace = _trace(args)
    results: dict[float, RunSummary] = {}
    for load, requests in _loads(args, trace).items():
        log = Simulation(plan).run(requests)
        if not log.jobs:
            raise SystemExit(f"all {len(requests)} requests failed: no engine has room for them")
        results[load] = summarise(log, objectives)
    if args.json:
        rows = [{"load": load, **asdict(summary)} for load, summary in results.items()]
        facts = {"ideal_hit_rate": trace.ideal_hit_rate()} if trace else {}
        print(json.dumps({"costs": costs.machine, **facts, "results": rows}, indent=2))
    else:
        print(f"{costs.machine}: {args.prefill} prefill and {args.decode} decode pods")
        print(f"{args.trace}: {trace.facts()}\n" if trace else "")
        print(report.table("users" if args.users else "requests/s", results))
    if args.plot is not None:
        report.plot_loads(results, args.plot, "users" if args.users else "requests/s")


def main() -> None:
    args = _parser().parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
