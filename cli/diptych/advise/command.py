"""The command `diptych advise`, and what it shares with `kubectl diptych advise`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from diptych.service_argument import Number

if TYPE_CHECKING:
    from rich.table import Table

    from diptych.advise.advice import Advice, Prediction
    from diptych.request_trace import AskRouters

Command = TypeVar("Command", bound=Callable[..., Any])
MILLISECONDS = Number(1, 600_000)


def promise_options(command: Command) -> Command:
    for option, of_what in (
        ("--ttft-ms", "the first token"),
        ("--inter-token-ms", "each later one"),
    ):
        said = f"Promised for {of_what}; left out, what spec.slo says."
        command = click.option(option, type=MILLISECONDS, help=said)(command)
    return command


@click.command()
@click.argument("name", required=False)
@promise_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def advise(
    name: str | None, ttft_ms: float | None, inter_token_ms: float | None, as_json: bool
) -> None:
    """Say how many prefill and decode pods service NAME should have for what it was asked of late.

    The newest requests (at most 1000) are simulated, with steps as long as engines reported, in
    pools of other sizes, with and without hand-offs, with other bounds of a step (STEP, in tokens),
    and with other policies of routers. The row that is marked with > is the smallest service of
    which 95 % of the requests get what is promised, or the one that keeps most. How far the
    prediction for the present service is from what happened is told as well.
    docs/capacity.md says what is simulated. Without NAME the newest service here is meant.

    \b
    Example:
      diptych advise
      diptych advise smollm2 --ttft-ms 300 --inter-token-ms 20
      diptych advise --json | jq .best
    """
    from diptych.why import ask_service

    show_advice(partial(ask_service, name), ttft_ms, inter_token_ms, as_json=as_json)


def show_advice(
    ask: AskRouters, ttft_ms: float | None, inter_token_ms: float | None, *, as_json: bool
) -> None:
    """Simulate what routers report, and print it. Raises `BadInputError` if it cannot."""
    from diptych.advise.advice import ObservedService
    from diptych.advise.advice import advise as find
    from diptych.errors import BadInputError
    from diptych.router_admin import LOAD_PATH
    from diptych.watching import console_for_tables, print_json
    from diptych_protocol.admin import LoadReport

    told, problems = ask(LOAD_PATH, LoadReport)
    for problem in problems:
        click.echo(problem, err=True)
    try:
        service = ObservedService.of([one.known for one in told], ttft_ms, inter_token_ms)
    except ValueError as exc:
        raise BadInputError(str(exc)) from exc

    def progress(outcome: Prediction) -> None:
        click.echo(f"simulated {outcome.shape}: {outcome.kept:.0%} kept", err=True)

    found = find(service, progress)
    if as_json:
        print_json(found)
        return
    click.echo(
        f"{found.requests} requests in {found.seconds:.0f} s; promised: "
        + ", ".join(
            f"{what} in {milliseconds:g} ms"
            for what, milliseconds in (
                ("the first token", found.ttft_ms), ("each later one", found.inter_token_ms),
            )
            if milliseconds is not None
        )
    )  # fmt: skip
    console_for_tables().print(_table(found))
    click.echo(_words(found))


def _table(advice: Advice) -> Table:
    from diptych.watching import bare_table
    from diptych_operator.api.base import camel_case

    numbers = ("PREFILL", "DECODE", "KEPT", "TTFT P50", "P90", "GAP P50", "P90")
    columns = ("", "PREFILL", "DECODE", "DISAGGREGATE", "STEP", "POLICY", *numbers[2:])
    table = bare_table(*columns, right=("STEP", *numbers))
    for each in advice.tried:
        mark = " ".join([">"] * (each == advice.best) + ["now"] * (each == advice.now))
        times = [
            f"{of[name]:.0f} ms" if name in of else "-"
            for of in (each.ttft_ms, each.inter_token_ms)
            for name in ("p50", "p90")
        ]
        kept = f"{each.kept:.0%}"
        step = str(each.max_num_batched_tokens or "-")
        pods = (str(each.prefill), str(each.decode))
        table.add_row(mark, *pods, each.disaggregate, step, camel_case(each.policy), kept, *times)
    return table


def _words(advice: Advice) -> str:
    """What to do, and how far it can be believed."""
    from diptych.advise.advice import ENOUGH
    from diptych_operator.api.base import camel_case

    best, now = advice.best, advice.now
    todo = []
    same_pods = (best.prefill, best.decode, best.disaggregate) == (
        now.prefill, now.decode, now.disaggregate,
    )  # fmt: skip
    if not same_pods and best.prefill:
        todo.append(
            f"Set spec.prefill.replicas: {best.prefill}, spec.decode.replicas: {best.decode}, "
            f"spec.router.disaggregate: {best.disaggregate}."
        )
    elif not same_pods:
        todo.append(
            f"Do not split it: {best.decode} engines in one pool (spec.engine.runtime vllm, "
            "without spec.prefill), or spec.router.disaggregate: never."
        )
    if best.max_num_batched_tokens != now.max_num_batched_tokens:
        todo.append(f"Set spec.engine.maxNumBatchedTokens: {best.max_num_batched_tokens}.")
    if best.policy != now.policy:
        todo.append(f"Set spec.router.policy: {camel_case(best.policy)}.")
    if not todo:
        todo.append("Leave it as it is.")
    if best.kept < ENOUGH:
        todo.append(f"No service of up to twice the pods keeps {ENOUGH:.0%}.")
    if not advice.compares_policies:
        todo.append(
            "Other policies were not tried: routers, as older ones, do not say which prompts begin "
            "alike."
        )
    believed = (
        f"The present service was predicted to keep its promises to {advice.now.kept:.0%} of the "
        f"requests, and did so to {advice.measured_kept:.0%}"
    )
    if not advice.is_trusted:
        return f"{believed}. That is too far off to follow this advice: {' '.join(todo)}"
    return f"{believed}. {' '.join(todo)}"
