"""`python -m benchmarks [SCENARIO ...]`: measure; tables and plots go to benchmarks/results.

Other projects' engines run beside ours where `--peers`, or $DIPTYCH_BENCH_PEERS, names the
interpreters of their environments: `vllm=/path/to/bin/python,llamacpp=/path/to/bin/python`. Nothing
needs them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.machine import RESULTS, machine
from benchmarks.peers.servers import VARIABLE, UnknownPeerError, parse_peers
from benchmarks.scenario import Options, Reporter, Scenario
from benchmarks.scenarios import (
    fair,
    growth,
    mixed,
    offline,
    online,
    overhead,
    pair,
    parallel,
    replay,
    router,
    speculation,
    startup,
    streams,
    turns,
)
from benchmarks.traces.arguments import add_trace, count, positive
from benchmarks.traces.formats import TraceError
from benchmarks.traces.replay import Replay
from rich.console import Console

SCENARIOS: tuple[Scenario, ...] = tuple(
    module.SCENARIO
    for module in (
        overhead, startup, online, offline, pair, mixed, growth, parallel, router, streams, fair,
        replay, speculation, turns,
    )
)  # fmt: skip


def arguments() -> argparse.Namespace:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "scenarios", nargs="*", choices=[*names, []], metavar="SCENARIO",
        help=f"of {', '.join(names)}; none: all",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CASE",
        help="only such cases: 128/1 '512/*'; written to files only where --out says",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer cases, each measured once")
    parser.add_argument("--peers", default=os.environ.get(VARIABLE, ""), help="NAME=PYTHON,...")
    parser.add_argument("--out", type=Path, help=f"folder for the results, else {RESULTS}")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page anew")
    _add_replay(parser)
    args = parser.parse_args()
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if args.trace is not None and args.scenarios != [replay.SCENARIO.name]:
        parser.error("--trace is for the scenario replay alone")
    return args


def _add_replay(parser: argparse.ArgumentParser) -> None:
    """The fields of `Replay`."""
    usual = Replay()
    add_trace(parser, usual.speeds, usual.block_tokens)
    group = parser.add_argument_group("the replay of a trace")
    group.add_argument("--prefill", type=count, default=usual.prefill, help="engines")
    group.add_argument("--decode", type=count, default=usual.decode, help="engines")
    group.add_argument(
        "--routing", nargs="+", default=list(usual.routing),
        help="a service for each POLICY[/DISAGGREGATE], such as leastLoaded or prefixAware/auto",
    )  # fmt: skip
    group.add_argument("--ttft-ms", type=positive, default=usual.ttft_ms, help="what is promised")
    group.add_argument("--tpot-ms", type=positive, default=usual.tpot_ms, help="a token on average")


def _replay(args: argparse.Namespace) -> Replay:
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Replay)}
    return Replay(**{**given, "speeds": tuple(args.speeds), "routing": tuple(args.routing)})


def measure(scenario: Scenario, options: Options, console: Console) -> report.Result:
    console.rule(scenario.title)
    reporter = Reporter(console)
    load, started = os.getloadavg()[0], time.perf_counter()
    records = scenario.run(options, reporter)
    return report.Result(
        scenario.name, machine(), command(), load, time.perf_counter() - started, records,
        reporter.notes,
    )  # fmt: skip


def command() -> str:
    """As it was typed, without the peers' paths."""
    words = [word for word in sys.argv[1:] if "=" not in word and word != "--peers"]
    return shlex.join(["python", "-m", "benchmarks", *words])


def main() -> None:
    args = arguments()
    console = Console()
    logging.disable()
    # An exception ends what was started, whereas a signal would leave it behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        peers = parse_peers(args.peers)
    except UnknownPeerError as exc:
        raise SystemExit(f"--peers: {exc}") from exc
    options = Options(args.repetitions, tuple(args.only), args.quick, peers, _replay(args))
    chosen = [s for s in SCENARIOS if not args.scenarios or s.name in args.scenarios]
    try:
        # A part must not stand for the whole, nor another trace for the one that is made.
        if (options.only or options.replay != Replay()) and args.out is None:
            for scenario in chosen:
                print("\n".join(report.section(scenario, measure(scenario, options, console))))
            return
        folder = args.out or RESULTS
        for scenario in [] if args.page else chosen:
            report.write(measure(scenario, options, console), folder)
    except TraceError as exc:
        raise SystemExit(str(exc)) from exc
    print(write_page(folder))


def write_page(folder: Path) -> str:
    """Page and plots from all results that are there; the page's text."""
    results = report.read(folder, SCENARIOS)
    page = report.page(results, SCENARIOS)
    (folder / report.PAGE).write_text(page)
    for scenario in SCENARIOS:
        if scenario.panels and scenario.name in results:
            report.plot(scenario, results[scenario.name].records, folder)
    return page


if __name__ == "__main__":
    main()
