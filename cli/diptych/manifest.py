"""From the user's file to the objects that `diptych` runs or prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from diptych.errors import BadInputError
from diptych_frontend.model_files.model_source import resolve_model
from diptych_operator.api.errors import SpecError
from diptych_operator.api.parse import parse
from diptych_operator.api.service import InferenceService
from diptych_operator.new_secrets import new_secrets
from diptych_operator.render import render
from diptych_protocol import InvalidRequestError


def load(path: Path) -> InferenceService:
    """The service in a YAML file. Raises `BadInputError` naming file and field."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except SpecError as exc:
        raise BadInputError(f"{path}: {exc}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise BadInputError(f"{path}: cannot be read: {exc}") from exc


def rendered(path: Path, service: InferenceService) -> list[dict[str, Any]]:
    """The service's Kubernetes objects, with keys made for this call."""
    try:
        return render(service, new_secrets())
    except SpecError as exc:
        raise BadInputError(f"{path}: {exc}") from exc


def check_model(path: Path, service: InferenceService) -> None:
    """Raise `BadInputError` if this machine does not have the model, or cannot serve it."""
    try:
        resolve_model(service.spec.model.uri, weights=service.spec.engine.runtime == "diptych")
    except InvalidRequestError as exc:
        problem = str(exc).removeprefix("model: ")
        raise BadInputError(f"{path}: spec.model.uri: {problem}") from exc


class _BlockDumper(yaml.SafeDumper):
    """Objects as people write them: texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _represent_text)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Documents for `kubectl apply -f -`."""
    return str(yaml.dump_all(objects, Dumper=_BlockDumper, sort_keys=False, width=100))
