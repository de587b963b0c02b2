"""vLLM as one server, and as 1P1D over NIXL and over our connector, on the same two cores.

    python -m benchmarks.vllm_pd --vllm .vllm/bin/python

All servers stay up and take turns: while one system is measured, the others' processes are stopped
(SIGSTOP), because NIXL's progress thread takes a processor beside whoever is measured. There is no
router: the client sends both legs of a request itself, the same way to both connectors. Results go
to benchmarks/results/vllm_pd.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from benchmarks import report
from benchmarks.figures import Record
from benchmarks.load import TIMEOUT_S, Load, drive, stream_completion
from benchmarks.machine import HERE, RESULTS, machine
from benchmarks.peers.servers import vllm_dtype, vllm_environment, vllm_model
from benchmarks.scenario import Column, Options, Reporter, Scenario, rotated, seed_of
from benchmarks.servers import Running, System, free_port, running
from rich.console import Console

from diptych.bench.stream import Sample

MODEL = "smollm2"
WHOLE, NIXL, OURS = "vLLM, one server", "1P1D, NIXL", "1P1D, our connector"
REST_S, AFTER_LAST_ANSWER_S = 10.0, 2.0
WARM_UP = Load(2, 64, 8, requests=4)
LEASE_S = 120
BLOCKS = 96
"""Each has 128 tokens; together they take half a GiB in float32. Five servers fit in 16 GiB."""
PACKAGES = ("protocol", "frontend", "kv_transfer", "vllm_connector")


@dataclass(frozen=True, slots=True)
class Service:
    """A system of one server, or of a prefill and a decode server."""

    name: str
    servers: tuple[Running, ...]

    @property
    def answers(self) -> Running:
        return self.servers[-1]

    def signal(self, number: signal.Signals) -> None:
        """To each process of each server."""
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, number)

    def cpu_seconds(self) -> float:
        return sum(server.cpu_seconds() for server in self.servers)

    def transferred_tokens(self) -> float:
        """Tokens of prompts that came from another engine, so far."""
        text = httpx.get(f"{self.answers.url}/metrics", timeout=TIMEOUT_S).text
        name = "vllm:external_prefix_cache_hits_total{"
        return sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith(name))

    async def drive(self, load: Load, seed: int) -> dict[str, float]:
        """Raises `RuntimeError` if KV should have moved and did not."""
        if len(self.servers) == 1:
            return await drive(self.answers.url, MODEL, load, seed)
        before = self.transferred_tokens()
        ask = partial(two_legs, self.servers[0].url)
        figures = await drive(self.answers.url, MODEL, load, seed, ask)
        moved = self.transferred_tokens() - before
        if moved < load.num_requests * (load.prompt_tokens - 1):
            raise RuntimeError(f"{self.name}: only {moved:.0f} tokens came from the prefill server")
        return figures


async def two_legs(
    prefill_url: str, client: httpx.AsyncClient, model: str, prompt: list[int], output_tokens: int
) -> Sample:
    """The prompt at P, then the answer at D. The first token's time has both."""
    started = time.perf_counter()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    answer = await client.post(f"{prefill_url}/v1/completions", json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code}: {answer.text}")
    reference = answer.json()["kv_transfer_params"]
    leg_s = time.perf_counter() - started
    sample = await stream_completion(
        client, model, prompt, output_tokens, kv_transfer_params=reference
    )
    return dataclasses.replace(sample, ttft_s=leg_s + sample.ttft_s)


# --- the servers --------------------------------------------------------------------------------


def server(python: str, name: str, cores: Sequence[int], transfer: dict[str, object]) -> System:
    """One `vllm serve` on these cores."""

    options = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []

    def command(port: int, _: Path) -> list[str]:
        return [
            str(Path(python).with_name("vllm")), "serve", str(vllm_model()),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL,
            "--dtype", vllm_dtype(), "--max-model-len", "2048", "--max-num-seqs", "16",
            "--num-gpu-blocks-override", str(BLOCKS), "--enforce-eager", *options,
        ]  # fmt: skip

    environment = vllm_environment(python) | {
        "PYTHONPATH": ":".join(str(HERE.parent / folder) for folder in PACKAGES),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return System(name, command, MODEL, environment)


def nixl(role: str) -> dict[str, object]:
    """As shipped, but for the lease: 30 s may be short for a queue on a slow machine."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }


def ours(role: str) -> dict[str, object]:
    return {
        "kv_connector": "DiptychConnector",
        "kv_connector_module_path": "diptych_vllm.connector",
        "kv_role": role,
        "kv_connector_extra_config": {"lease_seconds": LEASE_S},
    }


def systems(python: str) -> dict[str, tuple[System, ...]]:
    """All have the same two cores. A pair has one for each server."""
    first, second = sorted(os.sched_getaffinity(0))[:2]

    def pair(name: str, transfer: Callable[[str], dict[str, object]]) -> tuple[System, ...]:
        return (
            server(python, f"{name}: P", [first], transfer("kv_producer")),
            server(python, f"{name}: D", [second], transfer("kv_consumer")),
        )

    return {
        WHOLE: (server(python, WHOLE, [first, second], {}),),
        NIXL: pair(NIXL, nixl),
        OURS: pair(OURS, ours),
    }


@contextlib.contextmanager
def started(python: str) -> Iterator[list[Service]]:
    """All of them, warm and stopped."""
    services: list[Service] = []
    with ExitStack() as stack:
        # Entered first, so that it runs last: a stopped process ends only when it goes on.
        try:
            for name, parts in systems(python).items():
                up = tuple(stack.enter_context(running(system)) for system in parts)
                services.append(Service(name, up))
                asyncio.run(services[-1].drive(WARM_UP, seed=1))
                services[-1].signal(signal.SIGSTOP)
            yield services
        finally:
            for service in services:
                service.signal(signal.SIGCONT)


# --- measuring ----------------------------------------------------------------------------------


def measured(service: Service, case: str, load: Load, repetition: int) -> Record:
    """One turn of a system, with nothing else running; it is stopped again afterwards."""
    service.signal(signal.SIGCONT)
    try:
        asyncio.run(service.drive(WARM_UP, seed=repetition + 2))
        before = service.cpu_seconds()
        figures = asyncio.run(service.drive(load, seed_of(case, repetition)))
        figures["cpu_s"] = (service.cpu_seconds() - before) / load.num_requests
        time.sleep(AFTER_LAST_ANSWER_S)
        before = service.cpu_seconds()
        time.sleep(REST_S)
        figures["rest_cpu_s"] = service.cpu_seconds() - before
    finally:
        service.signal(signal.SIGSTOP)
    return Record(case, service.name, repetition, figures)


def run(args: argparse.Namespace, reporter: Reporter, console: Console) -> list[Record]:
    """As many repetitions as fit in the time, and at least one."""
    began, longest_s = time.monotonic(), 0.0
    load = Load(args.users, args.prompt_tokens, args.output_tokens, requests=args.requests)
    case = f"{load.prompt_tokens}/{load.concurrency}"
    records: list[Record] = []
    with started(args.vllm) as services:
        console.print(f"{time.monotonic() - began:.0f} s until all servers were ready")
        for repetition in range(args.repetitions):
            turn = time.monotonic()
            if repetition and turn + longest_s > began + args.minutes * 60:
                reporter.note(f"{repetition} repetitions fitted in {args.minutes:g} minutes")
                break
            for service in rotated(services, repetition):
                records.append(measured(service, case, load, repetition))
                reporter.done(records[-1], [column.figure for column in SCENARIO.columns])
            longest_s = max(longest_s, time.monotonic() - turn)
    order = [WHOLE, NIXL, OURS]
    return sorted(records, key=lambda record: order.index(record.system))


def nothing(_: Options, __: Reporter) -> list[Record]:
    """`python -m benchmarks` does not run this scenario: it has a program of its own."""
    return []


SCENARIO = Scenario(
    "vllm_pd",
    "vLLM: 1P1D beside one server",
    "`prompt tokens / users`. All have the same two cores: one server has both, a pair has one for "
    "each server. There is no router: the client sends both legs. Processor time is that of all "
    "processes of all servers of a system; at rest it is that of 10 s which begin 2 s after the "
    "last answer.",
    (
        Column("ttft_ms", "TTFT p50 ms", 0),
        Column("tpot_ms", "time a token p50 ms"),
        Column("itl_p99_ms", "ITL p99 ms", 0),
        Column("tokens_per_s", "output tokens/s"),
        Column("cpu_s", "processor s a request", 2),
        Column("rest_cpu_s", "processor s in 10 s at rest", 2),
    ),
    nothing,
    versus=("ttft_ms", "tpot_ms", "itl_p99_ms", "tokens_per_s", "cpu_s"),
    first_is_baseline=True,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_pd", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--vllm", required=True, help="Python of an environment with vLLM and NIXL")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=12, help="of all users together")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--minutes", type=float, default=11, help="no repetition begins that would end later"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), Console()
    reporter = Reporter(console)
    load, began = os.getloadavg()[0], time.perf_counter()
    records = run(args, reporter, console)
    words = [word for word in sys.argv[1:] if word not in ("--vllm", args.vllm)]
    result = report.Result(
        SCENARIO.name, machine(), shlex.join(["python", "-m", "benchmarks.vllm_pd", *words]), load,
        time.perf_counter() - began, records, reporter.notes,
    )  # fmt: skip
    report.write(result, args.out)
    page = "\n".join(report.section(SCENARIO, result))
    (args.out / "vllm_pd.md").write_text(f"{page.replace('## ', '# ', 1).rstrip()}\n")
    console.print(page, highlight=False, markup=False)


if __name__ == "__main__":
    main()
