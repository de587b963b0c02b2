"""One prefill and one decode engine beside the same processors used otherwise."""

from __future__ import annotations

from benchmarks.figures import Record
from benchmarks.load import Load
from benchmarks.scenario import Column, Options, Reporter, Scenario, compare
from benchmarks.servers import diptych, diptych_pair

PAIR, TWO_CORES = "diptych 1P1D", "diptych DP=2"
LOADS = {
    "128/1": Load(1, 128, requests=4),
    "512/1": Load(1, 512, requests=4),
    "1024/1": Load(1, 1024, requests=3),
    "128/4": Load(4, 128, requests=8),
    "512/4": Load(4, 512, requests=8),
    "128/16": Load(16, 128),
}
QUICK = ("512/1", "512/4")


def run(options: Options, reporter: Reporter) -> list[Record]:
    loads = {case: LOADS[case] for case in QUICK} if options.quick else LOADS
    two = diptych(TWO_CORES, data_parallel_size=2, num_threads=1)
    return compare([diptych(), diptych_pair(PAIR), two], loads, options, reporter)


SCENARIO = Scenario(
    "pair",
    "Pair: 1P1D beside one engine that does both",
    "`prompt tokens / users`, 64 output tokens. All have the same two processors: `diptych` "
    "is one engine with all of them; `DP=2` is as many engine processes as 1P1D, each doing "
    "both with half of them; 1P1D is what `diptych up` starts, with its router.",
    (
        Column("ttft_ms", "TTFT p50 ms", 0),
        Column("tpot_ms", "time a token p50 ms"),
        Column("itl_p99_ms", "ITL p99 ms", 0),
        Column("tokens_per_s", "output tokens/s"),
    ),
    run,
    versus=("ttft_ms", "tpot_ms", "tokens_per_s"),
    first_is_baseline=True,
)
