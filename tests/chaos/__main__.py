"""Many runs of chaos: `make chaos RUNS=200 SEED=1`.

Run k has the seed SEED + k, which determines its fault and all its details, so that
`make chaos RUNS=1 SEED=…` plays it again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos_kit.campaign import Report, campaign, failures, summary
from chaos_kit.faulty_network import why_no_networks
from chaos_kit.service import LEAST_LOADED, PREFIX_AUTO, PREFIX_AWARE, Service, Steering

from diptych_protocol import KVTransferStats

MAX_BAD = 5
"""After so many runs with problems there is nothing to learn from more of them."""
NETWORK_SHARE = 0.3
STEERINGS = (LEAST_LOADED, LEAST_LOADED, PREFIX_AWARE, PREFIX_AWARE, PREFIX_AUTO)
"""How routers choose engines: each stands there as often as its share of the runs says."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    logging.disable(logging.ERROR)  # the router's; the engines' go to files
    began = time.monotonic()
    reports = asyncio.run(play(args.runs, seed))
    print(f"\n{summary(reports)}\n")
    for error, count in failures(reports).most_common(12):
        print(f"{count:6} x {error}")
    bad = [report for report in reports if report.problems]
    for report in bad:
        print(f"\n{report}\n\nagain: make chaos RUNS=1 SEED={report.seed}")
    print(f"\n{len(reports)} runs in {time.monotonic() - began:.0f} s, {len(bad)} with problems")
    return 1 if bad else 0


async def play(runs: int, seed: int) -> list[Report]:
    """All runs, those on a network last, and those of each policy one after the other. Ends early
    if there is nothing more to learn."""
    reason = why_no_networks()
    if reason:
        print(f"no network faults: {reason}")
    services: dict[tuple[bool, Steering], list[int]] = {}
    for number in range(seed, seed + runs):
        on_network = random.Random(f"place {number}").random() < NETWORK_SHARE and not reason
        steering = random.Random(f"steering {number}").choice(STEERINGS)
        services.setdefault((on_network, steering), []).append(number)
    reports: list[Report] = []
    for (networked, steering), seeds in sorted(services.items()):
        reports += await play_at(seeds, len(reports), runs, steering, networked=networked)
        if sum(bool(report.problems) for report in reports) >= MAX_BAD:
            break
    return reports


async def play_at(
    seeds: list[int], done: int, runs: int, steering: Steering, *, networked: bool
) -> list[Report]:
    """These runs, all with one service, while it gets well after each of them."""
    folder = Path(tempfile.mkdtemp(prefix="diptych-chaos-"))
    where = "on hosts of their own" if networked else "on loopback"
    print(f"{len(seeds)} runs {where}, {steering}; the engines' logs: {folder}", flush=True)
    async with campaign(folder, networked=networked, steering=steering) as playing:
        for number in seeds:
            report = await playing.run(number)
            tell(report, steering, done + len(playing.reports), runs)
            bad = [report for report in playing.reports if report.problems]
            if len(bad) >= MAX_BAD or (report.problems and not playing.service.is_ready):
                break
        print(await fetches(playing.service))
        if steering.follows:
            print(gossip(playing.reports))
    return playing.reports


def gossip(reports: list[Report]) -> str:
    """What befell the messages about prefixes."""
    total = sum((report.news for report in reports), Counter[str]())
    return "news of prefixes: " + ", ".join(f"{n} {what}" for what, n in sorted(total.items()))


async def fetches(service: Service) -> str:
    """What the engines that live now say of the prefixes that they were to fetch."""
    hinges = [(await engine.stats()).kv_transfer or KVTransferStats() for engine in service.engines]
    asked, fetched, tokens = (
        sum(getattr(hinge, name) for hinge in hinges)
        for name in ("prefix_fetches", "prefix_fetches_completed", "prefix_tokens_fetched")
    )
    return (
        f"prefixes: {asked} asked for, {fetched} fetched, {tokens} tokens (since engines started)"
    )


def tell(report: Report, steering: Steering, number: int, runs: int) -> None:
    answered = sum(fate.outcome == "answered" for fate in report.fates)
    print(
        f"{number:4}/{runs} seed {report.seed} {steering!s:19} {report.fault:18} "
        f"{report.seconds:5.1f} s  {answered}/{len(report.fates)} answered",
        flush=True,
    )
    for problem in report.problems:
        print(f"     PROBLEM: {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
