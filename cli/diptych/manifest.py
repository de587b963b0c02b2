"""Turns the user's file into the objects that `diptych` runs or prints."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

import click
import yaml

from diptych.errors import BadInputError
from diptych.known_models import KnownModel, Source
from diptych_frontend.installation import this_installation
from diptych_frontend.model_files.fetch.source import URI
from diptych_frontend.model_files.model_source import resolve_model
from diptych_operator.api.base import SpecError
from diptych_operator.api.parse import ServiceFile, parse_file
from diptych_operator.api.service import InferenceService
from diptych_operator.new_secrets import new_secrets
from diptych_operator.render import render
from diptych_protocol import InvalidRequestError
from diptych_protocol.model_uri import parse_model_uri

MAX_BYTES: Final = 16 << 20
"""Limit of a file of services. A device has no end."""


def load(source: Source) -> ServiceFile:
    """Load a YAML file, or a known model's service. Raises `BadInputError`, naming the field."""
    try:
        return parse_file(_text(source))
    except SpecError as exc:
        raise BadInputError(f"{source}: {exc}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise BadInputError(f"{source}: cannot be read: {exc}") from exc


def _text(source: Source) -> str:
    if isinstance(source, KnownModel):
        return yaml.safe_dump(source.manifest())
    if not source.is_file():
        click.echo(f"reading {source} until whoever writes to it ends", err=True)
    with source.open("rb") as file:
        found = file.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise BadInputError(f"{source}: has more than {MAX_BYTES >> 20} MiB")
    return found.decode()


def rendered(source: Source, service: InferenceService) -> list[dict[str, Any]]:
    """Return the service's Kubernetes objects, with keys made for this call."""
    try:
        return render(service, new_secrets())
    except SpecError as exc:
        raise BadInputError(f"{source}: {exc}") from exc


def check_model(source: Source, service: InferenceService) -> None:
    """Raise `BadInputError` if this machine does not have the model, or cannot serve it."""
    if isinstance(source, KnownModel) and source.package and not in_package(source):
        remedy = this_installation().add(source.package, alone=True)
        raise BadInputError(
            f"{source}: this model is in a Python package that is not installed here: {remedy}"
        )
    try:
        resolve_model(service.spec.model.uri, weights=service.spec.engine.runtime == "diptych")
    except InvalidRequestError as exc:
        problem = str(exc).removeprefix("model: ")
        raise BadInputError(in_words_of(source, URI, problem)) from exc


def in_words_of(source: Source, field: str, problem: str) -> str:
    """Tell a problem by what the user has typed: a name has no fields."""
    return f"{source}: {'' if isinstance(source, KnownModel) else f'{field}: '}{problem}"


def in_package(model: KnownModel) -> bool:
    """Whether the Python package of a known model is installed."""
    return find_spec(parse_model_uri(model.uri).host) is not None


class _BlockDumper(yaml.SafeDumper):
    """Objects as people write them: texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _represent_text)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Return YAML documents for `kubectl apply -f -`."""
    return str(yaml.dump_all(objects, Dumper=_BlockDumper, sort_keys=False, width=100))
