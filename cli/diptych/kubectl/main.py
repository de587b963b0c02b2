"""The program `kubectl-diptych`, which kubectl runs for `kubectl diptych`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, RenderableType

from diptych.advise.command import promise_options, show_advice
from diptych.kubectl.cluster import Access, Cluster, ClusterError, ask_routers
from diptych.main import CONTEXT
from diptych.main import render as render_file
from diptych.request_trace import explain_requests, show_timelines, svg_option
from diptych.service_argument import service_argument
from diptych.top import interval_option, show_loads, watch_option
from diptych.watching import console_for_tables, harmless, print_json, show

if TYPE_CHECKING:
    from diptych.engine_load import Sample
    from diptych.known_models import Source
    from diptych.kubectl.why import ServiceExplanation


def _access(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which cluster, gathered into one `access` argument."""

    @wraps(command)
    def with_access(
        kubeconfig: str | None, context: str | None, namespace: str | None, **given: Any
    ) -> None:
        command(access=Access(kubeconfig, context, namespace), **given)

    made: Callable[..., None] = with_access
    for option in (
        click.option("--kubeconfig", metavar="FILE", help="Instead of $KUBECONFIG."),
        click.option("--context", metavar="NAME", help="Instead of the kubeconfig's current one."),
        click.option("-n", "--namespace", help="Instead of the context's."),
    ):
        made = option(made)
    return made


_json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group(name="kubectl diptych", context_settings=CONTEXT)
@click.version_option(package_name="diptych")
def main() -> None:
    """Look at InferenceServices in a cluster, and learn what keeps them.

    \b
    Example:
      kubectl diptych status            every service of the namespace
      kubectl diptych why smollm2       what is wrong with one, and what to do
      kubectl diptych why smollm2 ID    why a request went where it did
      kubectl diptych trace smollm2 ID  when it was where
      kubectl diptych top smollm2 -w    its engines' load
      kubectl diptych plan              what the operator would change
      kubectl diptych advise smollm2    how many pods it should have

    \b
    Exit codes: 0 well, 1 not well (why) or pending (plan), 2 the question was wrong or could not
    be asked.
    """


@main.command()
@click.argument("name", required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Of the whole cluster.")
@_access
@watch_option
@_json_option
def status(name: str | None, everywhere: bool, access: Access, watch: bool, as_json: bool) -> None:
    """List the services, or show all of service NAME: pools, revision, hand-off, conditions.

    \b
    Example:
      kubectl diptych status -A
      kubectl diptych status smollm2 --watch
      kubectl diptych status --json | jq -r '.[] | select(.reported | not) | .name'
    """
    from diptych.kubectl import view

    if name is not None and everywhere:
        raise click.UsageError("give NAME or --all-namespaces, not both")
    cluster = Cluster.connect(access)

    def look() -> list[view.ServiceView]:
        raws = (
            [cluster.service(name)] if name is not None else cluster.services(everywhere=everywhere)
        )
        return [view.service_view(raw) for raw in raws]

    if as_json:
        found = view.as_json(look())
        print_json(found if name is None else found[0])
        return

    def picture() -> RenderableType:
        views = look()
        found = view.listing(views, everywhere=everywhere)
        return found if name is None else view.details(views[0])

    show(picture, watch)


@main.command()
@click.argument("name")
@click.argument("request_id", required=False)
@click.option("--requests", is_flag=True, help="List the newest requests.")
@_access
@_json_option
def why(name: str, request_id: str | None, requests: bool, access: Access, as_json: bool) -> None:
    """Explain why service NAME is not well: causes, remedies, the newest warnings.

    Ends with 0 if it is available and nothing wants attention, else with 1.

    With REQUEST_ID (the header X-Request-Id of an answer, or the id in its body), explain why the
    engines of this request were chosen, and what came true of the prediction. The chosen engine is
    marked with >; the columns add up to TOTAL, and docs/routing.md explains them. All routers are
    asked, through the API server: that needs the rights to `list` Secrets and to `get` and `create`
    the subresource pods/portforward. A router remembers its newest 4096 requests.

    \b
    Example:
      kubectl diptych why smollm2
      kubectl diptych why smollm2 -n models --json | jq -r '.causes[0].message'
      kubectl diptych why smollm2 --requests
      kubectl diptych why smollm2 0f3c5a7e9b1d2f40
    """
    from diptych.kubectl.view import service_view
    from diptych.kubectl.why import explain

    if request_id and requests:
        raise click.UsageError("give REQUEST_ID or --requests, not both")
    cluster = Cluster.connect(access)
    if request_id or requests:
        explain_requests(partial(ask_routers, cluster, name), request_id, as_json=as_json)
        return
    view = service_view(cluster.service(name))
    found = explain(
        view, _warnings(cluster), cluster.fetching(name) if view.status.prefetched else ()
    )
    if as_json:
        print_json(found)
    else:
        _print_explanation(found, console_for_tables())
    raise SystemExit(0 if found.healthy else 1)


@main.command()
@click.argument("name")
@click.argument("request_id")
@svg_option
@_access
@_json_option
def trace(name: str, request_id: str, svg: Path | None, access: Access, as_json: bool) -> None:
    """Show when a request to service NAME was where: queue, prompt, hand-off, tokens and moves.

    REQUEST_ID is the header X-Request-Id of the answer, or the id in its body. All routers are
    asked, with the same rights as for `why`.

    \b
    Example:
      kubectl diptych trace smollm2 0f3c5a7e9b1d2f40
      kubectl diptych trace smollm2 0f3c5a7e9b1d2f40 --svg trace.svg
    """
    cluster = Cluster.connect(access)
    show_timelines(partial(ask_routers, cluster, name), request_id, svg, as_json=as_json)


@main.command()
@click.argument("name")
@interval_option
@_access
@watch_option
@_json_option
def top(name: str, interval: float, access: Access, watch: bool, as_json: bool) -> None:
    """Show what each engine of service NAME does now.

    Reads the metrics of the service's routers through the API server, which needs the right to
    `get` the subresource pods/proxy.

    \b
    Example:
      kubectl diptych top smollm2 --watch
      kubectl diptych top smollm2 --json | jq '[.[].running] | add'
    """
    cluster = Cluster.connect(access)
    https = bool((cluster.service(name).get("spec") or {}).get("router", {}).get("tls"))
    show_loads(lambda: _samples(cluster, name, https), interval, watch=watch, as_json=as_json)


@main.command()
@click.argument("name")
@promise_options
@_access
@_json_option
def advise(
    name: str, ttft_ms: float | None, inter_token_ms: float | None, access: Access, as_json: bool
) -> None:
    """Say how many prefill and decode pods service NAME should have for what it was asked of late.

    As `diptych advise`. All routers are asked, with the same rights as for `why`.

    \b
    Example:
      kubectl diptych advise smollm2
      kubectl diptych advise smollm2 --ttft-ms 300 --json | jq .best
    """
    cluster = Cluster.connect(access)
    ask = partial(ask_routers, cluster, name)
    show_advice(ask, ttft_ms, inter_token_ms, as_json=as_json)


@main.command()
@click.argument("name", required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Of the whole cluster.")
@click.option("--operator-namespace", default="diptych-system", show_default=True)
@_access
@_json_option
def plan(
    name: str | None, everywhere: bool, operator_namespace: str, access: Access, as_json: bool
) -> None:
    """Show what an operator of this version would change in each service, or in service NAME.

    Renders each service with the arguments of the operator that runs, and compares that with the
    cluster's objects; nothing is written. With a newer plugin it shows what an upgrade would do.
    Ends with 0 if that is nothing, else with 1.

    \b
    Example:
      kubectl diptych plan -A
      kubectl diptych plan smollm2 --json | jq -r '.[].changes[].path'
    """
    from diptych.kubectl import view
    from diptych.kubectl.plan import plans

    if name is not None and everywhere:
        raise click.UsageError("give NAME or --all-namespaces, not both")
    cluster = Cluster.connect(access)
    raws = [cluster.service(name)] if name is not None else cluster.services(everywhere=everywhere)
    found = plans(cluster, raws, operator_namespace)
    if as_json:
        print_json(found)
    else:
        for service in found:
            click.echo(harmless(service.text))
        if not found:
            click.echo(view.nothing(everywhere=everywhere))
    raise SystemExit(1 if any(service.pending for service in found) else 0)


@main.command()
@service_argument
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml")
@click.pass_context
def render(ctx: click.Context, source: Source, output: str) -> None:
    """Print the Kubernetes objects of a service; asks no cluster. The keys are made anew.

    MODEL is a name that `diptych models` lists, FILE an InferenceService in YAML.

    \b
    Example:
      kubectl diptych render examples/smollm2.yaml
    """
    ctx.invoke(render_file, source=source, output=output)


def _warnings(cluster: Cluster) -> list[dict[str, Any]]:
    """Nothing for somebody who may not read events: the conditions tell most of it."""
    try:
        return cluster.warnings()
    except ClusterError as exc:
        if exc.status != 403:
            raise
        click.echo("(no events: you may not list them in this namespace)", err=True)
        return []


def _samples(cluster: Cluster, name: str, https: bool) -> dict[str, Sample]:
    """From all ready routers that answer. Raises `ClusterError` if none does."""
    from diptych.engine_load import items_of, merged, read_samples
    from diptych_operator.api.names import HTTP_PORT
    from diptych_operator.status.observed import pod_view

    pods = sorted(map(pod_view, cluster.pods(name)), key=lambda pod: pod.name)
    routers = [pod.name for pod in pods if pod.role == "router" and pod.ready]
    if not routers:
        raise ClusterError(
            f"no router of {name} is ready, so nobody knows the engines' load; "
            f"`kubectl diptych why {name}` tells more"
        )
    found, problems = [], list[ClusterError]()
    for router in routers:
        try:
            found.append(read_samples(items_of(cluster.metrics(router, HTTP_PORT, https=https))))
        except ClusterError as exc:
            problems.append(exc)
        except ValueError as exc:
            problems.append(ClusterError(f"the metrics of {router} cannot be read: {exc}"))
    if not found:
        raise problems[0]
    return merged(found)


def _print_explanation(found: ServiceExplanation, console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(found.headline, "green" if found.healthy else "bold red")
    for cause in found.causes:
        say(f"\n{cause.what}", "bold")
        say(f"  {cause.message}")
        if cause.remedy:
            say(f"  -> {cause.remedy}")
    if found.events:
        say("\nNewest warnings", "bold")
        for event in found.events:
            say(f"  {event}")


if __name__ == "__main__":
    main()
