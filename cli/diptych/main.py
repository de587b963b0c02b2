"""The `diptych` command. Commands import what they need when they run: `--help` is instant."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from diptych.advise.command import advise
from diptych.bench.command import bench
from diptych.chat.command import chat
from diptych.defaults import DEFAULT_PORT, MODEL_CACHE, own_file
from diptych.doctor.command import doctor
from diptych.request_trace import explain_requests, trace
from diptych.service_argument import service_argument, service_or_none
from diptych.top import top
from diptych.usage import usage
from diptych.watching import console_for_tables, print_json

if TYPE_CHECKING:
    from diptych.known_models import Source

PORT_OPTION = click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port for the OpenAI API; all others are chosen freely.",
)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
PAGES = f"\b\nPages named docs/... are in\n{own_file('docs')}"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT, epilog=PAGES)
@click.version_option(package_name="diptych")
def main() -> None:
    """Serve an LLM in two pools, prefill and decode, joined by a KV cache that travels.

    \b
    Example:
      diptych demo                        one question, and what the hand-off took
      diptych up                          serve the default model until Ctrl-C
      diptych up qwen3:0.6b               serve another one; `diptych models` lists them
      diptych up examples/smollm2.yaml    serve what a file says
      diptych chat                        talk to it from another terminal
      diptych top                         what its engines do now
      diptych bench                       how quick it is under load
      diptych why                         the newest requests, and where they went
      diptych trace REQUEST-ID            when one was where, drawn over time
      diptych doctor                      what will work on this machine

    \b
    Exit codes: 0 well, 1 something failed while running, 2 the input was wrong.
    """


@main.command()
@service_or_none
@PORT_OPTION
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where the API listens; anywhere but on loopback it has keys.",
)
@click.option(
    "--api-keys",
    type=FOLDER,
    help="Each file in it is an API key, under its client's name. Left out, a key is made for the "
    "run where there must be one.",
)
@click.option("--tls", type=FOLDER, help="Serve HTTPS with the tls.crt and tls.key in it.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A further name that it is reached under, such as host.docker.internal; again for more.",
)
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="A site whose pages may use the API, such as http://localhost:3000; again for more.",
)
@click.option("--plain", is_flag=True, help="Lines instead of a live table, as in a pipe.")
def up(
    source: Source | None,
    port: int,
    host: str,
    api_keys: Path | None,
    tls: Path | None,
    hosts: tuple[str, ...],
    origins: tuple[str, ...],
    plain: bool,
) -> None:
    """Run a service on this machine until Ctrl-C.

    MODEL is a name that `diptych models` lists, FILE an InferenceService in YAML. Without either,
    qwen3:0.6b is served to a terminal whose machine has it or can fetch it, and has 8 GiB of free
    memory; else smollm2:135m. A model that is not here is fetched first, into
    ~/.cache/diptych/models.

    On a terminal one live table shows the pods and their figures: restarts, queue and rows
    (requests that wait and that are computed), blocks of KV in use, tokens computed a second, and
    of the router how many requests were answered and what was handed over. It is drawn anew only
    when it changes. A pod that fails shows the end of its log.

    Renders the same objects as a cluster would get and runs each pod's command as a process:
    restarted with back-off if it ends, all of them ended with this command. The cores are shared
    out equally among the engines, unless a CPU limit in the file says otherwise. On loopback the
    API is open, whatever Secrets the file names.

    \b
    Example:
      diptych up
      diptych up qwen3:0.6b --port 9000
      diptych up --plain | tee up.log
      diptych up examples/smollm2.yaml
      diptych up examples/smollm2.yaml --host 0.0.0.0 --api-keys keys/
    """
    from diptych.laptop.nursery import Nursery

    with closing(Nursery()) as nursery:
        from diptych.foreground import serve
        from diptych.laptop.api_access import ApiAccess

        if source is None:
            from diptych.default_model import default_choice

            choice = default_choice(MODEL_CACHE.expanduser(), sys.stdout)
            click.echo(choice)
            source = choice.model
        access = ApiAccess(port, host, api_keys, tls, hosts, origins)
        serve(source, access, MODEL_CACHE.expanduser(), nursery, plain=plain)


@main.command()
@service_argument
@PORT_OPTION
def demo(source: Source, port: int) -> None:
    """Run a service, ask it one question, show what it took, and end it.

    MODEL or FILE says which, as for `diptych up`.

    \b
    Example:
      diptych demo
      diptych demo examples/smollm2.yaml
    """
    from diptych.laptop.nursery import Nursery

    with closing(Nursery()) as nursery:
        from diptych.foreground import ask_once
        from diptych.laptop.api_access import ApiAccess

        ask_once(source, ApiAccess(port), MODEL_CACHE.expanduser(), nursery)


@main.command()
@service_argument
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml")
def render(source: Source, output: str) -> None:
    """Print the Kubernetes objects of a service. They hold keys made for this call.

    MODEL or FILE says which, as for `diptych up`. Objects of other kinds in FILE, such as
    autoscalers, follow as they are.

    \b
    Example:
      diptych render qwen3:0.6b
      diptych render examples/smollm2.yaml
      diptych render examples/smollm2.yaml -o json | jq '.items[].kind'
    """
    from diptych.manifest import load, rendered, to_yaml

    service, others = load(source)
    objects = [*rendered(source, service), *others]
    if output == "yaml":
        click.echo(to_yaml(objects), nl=False)
        return
    listing = {"apiVersion": "v1", "kind": "List", "items": objects}
    print_json(listing)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of models.")
def models(as_json: bool) -> None:
    """List the models that have a short name, with their size, license and place.

    MEMORY is what its engines may come to take, with full KV caches; what fits into the memory that
    is free comes first. HERE says whether a model's files are on this machine already. Each name
    stands for one commit, so it means the same weights everywhere. Any other model is served from a
    FILE that names it.

    \b
    Example:
      diptych models
      diptych models --json | jq -r '.[] | select(.here) | .name'
    """
    from diptych import models as view
    from diptych.default_model import default_choice
    from diptych.doctor.gather import memory

    cache = MODEL_CACHE.expanduser()
    rows = view.listed(cache, memory().available)
    choice = default_choice(cache, sys.stderr)
    if as_json:
        shown = view.as_json(rows, choice.model)
        print_json(shown)
    else:
        console_for_tables().print(view.table(rows, choice.model))
        click.echo(f"`diptych up` without a name: {choice}", err=True)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of services.")
def status(as_json: bool) -> None:
    """Show the services that run on this machine, their pods, ports and logs.

    \b
    Example:
      diptych status
      diptych status --json | jq -r '.[0].url'
    """
    from diptych import status as view
    from diptych.laptop import rundir

    states = [view.with_facts(state) for state in rundir.running()]
    if as_json:
        print_json(states)
    else:
        view.show(states, console_for_tables())


@main.command()
@click.argument("request_id", required=False)
@click.option(
    "--limit",
    type=click.IntRange(1, 4096),
    default=20,
    show_default=True,
    help="Without REQUEST_ID: how many requests of each router to list.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one entry for each router.")
def why(request_id: str | None, limit: int, as_json: bool) -> None:
    """Explain why the engines of a request were chosen, and what came true of the prediction.

    REQUEST_ID is the header X-Request-Id of the answer, or the id in its body. Without it, the
    newest requests are listed. Each table has one row for each engine that could have taken the
    request, the cheapest first, and the chosen one is marked with >. Its columns add up to TOTAL;
    docs/routing.md explains them. A router remembers its newest 4096 requests, and what it weighed
    for as many of them as 32 MiB have room for.

    \b
    Example:
      diptych why
      diptych why 0f3c5a7e9b1d2f40
      diptych why chatcmpl-0f3c5a7e9b1d2f40 --json | jq '.[0].requests[0].attempts[0].choices'
    """
    from diptych.why import ask_here

    explain_requests(ask_here, request_id, limit=limit, as_json=as_json)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that teaches SHELL to complete this command.

    \b
    Example:
      diptych completion bash > ~/.local/share/bash-completion/completions/diptych
      diptych completion fish > ~/.config/fish/completions/diptych.fish
      eval "$(diptych completion zsh)"
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(found(main, {}, "diptych", "_DIPTYCH_COMPLETE").source())
    if shell == "bash":
        # To bash a colon ends a word unless it is told otherwise; names of models have one.
        click.echo('COMP_WORDBREAKS="${COMP_WORDBREAKS//:}"')


main.add_command(advise)
main.add_command(bench)
main.add_command(chat)
main.add_command(doctor)
main.add_command(top)
main.add_command(trace)
main.add_command(usage)


if __name__ == "__main__":
    main()
