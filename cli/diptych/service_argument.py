"""How commands are told of a service: `up`, `demo` and `render` by its file or the name of a known
model, those that talk to an API by its model and key; and of numbers."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from diptych.defaults import own_file
from diptych.known_models import DEFAULT, KNOWN, KnownModel, Source, nearest, size_text

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SUFFIXES = (".yaml", ".yml", ".json")


class ServiceArgument(click.ParamType[Source]):
    """A known model's name, or else a file. `./NAME` is always a file. What begins with
    `examples/` is one of ours, wherever the user is, unless there is such a file."""

    name = "model or file"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Source:
        """See `click.ParamType.convert`."""
        if isinstance(value, KnownModel | Path):
            return value
        if value in KNOWN:
            return KNOWN[value]
        if "://" in value or value.endswith(".gguf"):
            self.fail(_address(value), param, ctx)
        if value.startswith("examples/") and not Path(value).exists():
            return Path(_FILE.convert(own_file(value), param, ctx))
        if "/" not in value and not value.endswith(_SUFFIXES) and not Path(value).exists():
            self.fail(_unknown(value), param, ctx)
        return Path(_FILE.convert(value, param, ctx))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete names first, and then files."""
        names = [
            CompletionItem(model.name, help=f"{size_text(model.size_bytes)}, {model.license}")
            for model in KNOWN.values()
            if model.name.startswith(incomplete)
        ]
        return names or [CompletionItem(incomplete, type="file")]


def service_argument(command: Any) -> Any:
    """Decorate a command that takes a service. Without it, the service is the default model's."""
    return _ARGUMENT(default=DEFAULT)(command)


def service_or_none(command: Any) -> Any:
    """Decorate a command that chooses the service itself if none is given."""
    return _ARGUMENT(required=False)(command)


_ARGUMENT = partial(click.argument, "source", type=ServiceArgument(), metavar="[MODEL|FILE]")


def _unknown(name: str) -> str:
    near = nearest(name)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"{name!r} is neither a file nor a known model; {meant}`diptych models` lists all names, "
        "and any other model is served from a file that names it, such as those in "
        f"{own_file('examples')}"
    )


def _address(value: str) -> str:
    uri = value if "://" in value else Path(value).absolute().as_uri()
    return (
        f"{value!r} is a model, which a file names: copy {own_file('examples/smollm2.yaml')}, "
        f"write `uri: {uri}` in it, and give the copy"
    )


class Number(click.FloatRange):
    """A number of a range, and never NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`."""
        if math.isnan(found := super().convert(value, param, ctx)):
            self.fail(f"{value!r} is not a number", param, ctx)
        return found


def api_options(command: Any) -> Any:
    """Decorates a command that takes `model` and `api_key`; see `find_service`."""
    for option in (
        click.option(
            "--api-key",
            envvar="OPENAI_API_KEY",
            show_envvar=True,
            help="For an API elsewhere; a service on this machine has its own.",
        ),
        click.option("--model", help="Model name; left out, the first one the API lists."),
    ):
        command = option(command)
    return command
