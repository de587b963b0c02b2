"""Provides the model on this machine, as an init container does for pods in a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from diptych.errors import BadInputError, RunError
from diptych.known_models import KNOWN, Source
from diptych.manifest import in_words_of
from diptych.models import is_here
from diptych_frontend.model_files.fetch.fetch import Progress, fetch_model
from diptych_frontend.model_files.fetch.source import (
    URI,
    BadSourceError,
    FetchError,
    UnreachableError,
)
from diptych_operator.api.engine import draft_uri
from diptych_operator.api.model import Model, ModelCache
from diptych_operator.api.names import DRAFT_MODEL_FIELD
from diptych_operator.api.service import InferenceService
from diptych_protocol import InvalidRequestError
from diptych_protocol.model_uri import parse_model_uri

ANSWER_WITHIN_S: Final = 10.0
"""Somebody waits for it."""


def with_local_model(
    source: Source, service: InferenceService, cache: Path, console: Console
) -> InferenceService:
    """Return the service with its models as files here, fetched into `cache` if necessary.

    Tokens come from the user's environment. Raises `BadInputError` for a model that is not
    available as written, `RunError` for one that could not be fetched now.
    """
    spec, model = service.spec, service.spec.model
    guesses = spec.engine.speculative_config
    if parse_model_uri(model.uri).is_fetched:
        path = _fetched(source, URI, model, cache, console)
        local = msgspec.structs.replace(
            model,
            uri=path.as_uri(),
            served_name=service.served_name,
            revision="",
            sha256="",
            credentials=None,
            cache=ModelCache(),
        )
        spec = msgspec.structs.replace(spec, model=local)
    draft = draft_uri(spec.engine)
    if guesses is not None and draft and parse_model_uri(draft).is_fetched:
        path = _fetched(source, DRAFT_MODEL_FIELD, Model(uri=draft), cache, console)
        here = msgspec.structs.replace(guesses, model=path.as_uri())
        engine = msgspec.structs.replace(spec.engine, speculative_config=here)
        spec = msgspec.structs.replace(spec, engine=engine)
    return msgspec.structs.replace(service, spec=spec)


def _fetched(source: Source, field: str, model: Model, cache: Path, console: Console) -> Path:
    """Fetch the model that this field of the service names, and return where it is."""
    columns = TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn()
    speed = TransferSpeedColumn(), TimeRemainingColumn()
    quiet = not console.is_terminal
    with Bar(*columns, *speed, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(model.uri, total=None)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes)

        try:
            return fetch_model(
                model.uri,
                cache,
                revision=model.revision,
                sha256=model.sha256,
                report=report,
                answer_within_s=ANSWER_WITHIN_S,
            )
        except BadSourceError as exc:
            problem = str(exc).removeprefix(f"{exc.field}: ")
            told = field if exc.field == URI else exc.field
            raise BadInputError(in_words_of(source, told, problem)) from exc
        except InvalidRequestError as exc:
            raise BadInputError(in_words_of(source, field, str(exc))) from exc
        except UnreachableError as exc:
            problem = f"it is not on this machine, and {exc}; {_without_network(model.uri, cache)}"
            raise RunError(in_words_of(source, field, problem)) from exc
        except FetchError as exc:
            raise RunError(in_words_of(source, field, str(exc))) from exc


def _without_network(uri: str, cache: Path) -> str:
    here = ", ".join(name for name, model in KNOWN.items() if is_here(model, cache))
    mirror = "set HF_ENDPOINT to a mirror of the Hub, " if uri.startswith("hf://") else ""
    return f"connect to the network, {mirror}or serve what is here: {here or 'a file'}"
