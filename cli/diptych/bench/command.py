"""The command `diptych bench`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.service_argument import Number, api_options
from diptych.watching import print_json

if TYPE_CHECKING:
    from diptych.api_service import Service
    from diptych.bench.run import Outcome, Plan, Run
    from diptych.bench.workload import Lengths, Request

DEFAULT_REQUESTS: Final = 64
DEFAULT_CONCURRENCY: Final = 8
MOST_OPEN: Final = 4096
"""The most open requests at a given rate, unless the user says otherwise."""


class _LengthsArgument(click.ParamType[Any]):
    name = "N|LEAST:MOST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from diptych.bench.workload import Lengths

        if isinstance(value, Lengths):
            return value
        try:
            return Lengths.parse(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


@click.command()
@click.argument("url", required=False)
@api_options
@click.option(
    "-n",
    "--requests",
    type=click.IntRange(1, 1_000_000),
    help=f"How many; left out, {DEFAULT_REQUESTS}, or as many as --seconds have room for.",
)
@click.option(
    "--seconds",
    type=Number(min=0, min_open=True, max=86_400),
    help="Send no further request after so many seconds.",
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, MOST_OPEN),
    help=f"Requests at a time, at most; left out, {DEFAULT_CONCURRENCY}, "
    f"or {MOST_OPEN} with --rate.",
)
@click.option(
    "--rate",
    type=Number(min=0, min_open=True, max=100_000),
    help="Requests per second on average, at random moments (a Poisson process). "
    "Left out, a request begins when another one ends.",
)
@click.option(
    "--prompt-tokens", type=_LengthsArgument(), default="128", show_default=True,
    help="Of each prompt, about.",
)  # fmt: skip
@click.option(
    "--output-tokens", type=_LengthsArgument(), default="64", show_default=True,
    help="Of each answer, at most.",
)  # fmt: skip
@click.option(
    "--ignore-eos",
    is_flag=True,
    help="Answers have exactly their length. Diptych and vLLM can do this.",
)
@click.option(
    "--shared-tokens",
    type=click.IntRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="Tokens at the beginning that are the same in all prompts.",
)
@click.option(
    "--dataset",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines, each with prompt or messages and, if you like, max_tokens. "
    "They are sent in a random order, again and again.",
)
@click.option(
    "--ttft-ms",
    type=Number(min=0, min_open=True),
    help="Goodput counts answers whose first token came in this time.",
)
@click.option(
    "--inter-token-ms",
    type=Number(min=0, min_open=True),
    help="Goodput counts answers whose other tokens took this time each, on average.",
)
@click.option(
    "--warm-up", type=click.IntRange(0, 10_000), default=2, show_default=True,
    help="Requests before those that count.",
)  # fmt: skip
@click.option("--timeout", type=Number(min=1, max=86_400), default=600.0,
              show_default=True, help="Seconds that each request may take.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Decides all that is random.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw it there, too.")
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every request there, as JSON lines.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: the figures and no pictures.")
def bench(url: str | None, model: str | None, api_key: str | None, **options: Any) -> None:
    """Put load on an API, and show what its users see.

    URL is any API of OpenAI's kind, such as http://HOST:8000/v1; without it, the newest service of
    this machine. Requests are streamed chats of random words, or those of --dataset. Shown are the
    times to the first token and between tokens, tokens per second, and the goodput: how many
    answers per second are quick enough. Ctrl-C ends the run early and shows what there is.

    Exit codes: 0 all requests were answered, 1 some were not, 2 the input was wrong.

    \b
    Example:
      diptych bench
      diptych bench --rate 4 --seconds 60 --ttft-ms 500 --inter-token-ms 50
      diptych bench http://127.0.0.1:8000 -n 200 -c 16 --prompt-tokens 64:512 --svg run.svg
      diptych bench --json | jq .ttft_ms.p99
    """
    from diptych.api_service import find_service
    from diptych.bench.figures import Goal, summary
    from diptych.bench.run import Plan
    from diptych.errors import BadInputError
    from diptych_frontend.installation import this_installation

    if options["svg"] and find_spec("matplotlib") is None:
        raise BadInputError(f"--svg needs matplotlib: {this_installation().add_extras('plots')}")
    for path in filter(None, (options["svg"], options["save"])):
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BadInputError(f"{path} cannot be written")
    goal = Goal(options["ttft_ms"], options["inter_token_ms"])
    requests = _requests(options)
    service = find_service(url, model, api_key)
    fields = {"ignore_eos": True} if options["ignore_eos"] else {}
    rate, concurrency = options["rate"], options["concurrency"]
    plan = Plan(
        concurrency=concurrency or (MOST_OPEN if rate else DEFAULT_CONCURRENCY),
        timeout_s=options["timeout"],
        seconds=options["seconds"],
        fields=fields,
    )
    outcome = asyncio.run(_measure(service, plan, requests, options))
    found = summary(outcome.sent, outcome.seconds, goal, outcome.cut_off)
    if options["as_json"]:
        print_json(asdict(found))
    else:
        from diptych.bench.view import shown

        Console().print(shown(found, outcome.sent, goal))
    if options["save"]:
        _save(options["save"], outcome)
    if options["svg"] and outcome.sent:
        from diptych.bench.view import draw

        title = (
            f"{service.model}: {found.requests} requests, {found.output_tokens_per_s:.0f} tokens/s"
        )
        draw(options["svg"], title, outcome.sent, outcome.seconds, goal)
    if found.failed or not found.requests:
        raise click.exceptions.Exit(1)


def _requests(options: dict[str, Any]) -> Iterator[Request]:
    """All that may be sent, the warm-up first."""
    from diptych.bench.workload import made_up, of_file

    output: Lengths = options["output_tokens"]
    if options["dataset"]:
        return itertools.cycle(of_file(options["dataset"], output, options["seed"]))
    return made_up(options["prompt_tokens"], output, options["shared_tokens"], options["seed"])


async def _measure(
    service: Service, plan: Plan, requests: Iterator[Request], options: dict[str, Any]
) -> Outcome:
    from diptych.bench.run import Run
    from diptych.bench.workload import arrivals

    asked, seconds = options["requests"], options["seconds"]
    count = asked or (None if seconds else DEFAULT_REQUESTS)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        if warm_up := options["warm_up"]:
            task = bar.add_task("warming up", total=warm_up)
            first = itertools.islice(zip(arrivals(None, 0), requests, strict=False), warm_up)
            warming = Run(service, plan, lambda _: bar.advance(task))
            outcome = await until_stopped(warming, first)
            if warming.is_stopped:
                return outcome
            bar.remove_task(task)
        task = bar.add_task("measuring", total=count)
        timed = zip(arrivals(options["rate"], options["seed"]), requests, strict=False)
        run = Run(service, plan, lambda _: bar.advance(task))
        return await until_stopped(run, itertools.islice(timed, count))


async def until_stopped(run: Run, requests: Iterator[tuple[float, Request]]) -> Outcome:
    """The first Ctrl-C ends the run, the second one the command."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        run.stop()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        return await run.send(requests)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _save(path: Path, outcome: Outcome) -> None:
    from diptych.errors import RunError

    try:
        with contextlib.closing(path.open("wb")) as file:
            for sent in outcome.sent:
                file.write(msgspec.json.encode(asdict(sent)) + b"\n")
    except OSError as exc:
        raise RunError(str(exc)) from exc
