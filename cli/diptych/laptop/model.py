"""Provides the model on this machine, as an init container does for pods in a cluster."""

from __future__ import annotations

from pathlib import Path

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
from diptych_frontend.model_files.fetch import BadSourceError, FetchError, Progress, fetch_model
from diptych_operator.api.model import ModelCache
from diptych_operator.api.service import InferenceService
from diptych_protocol import InvalidRequestError
from diptych_protocol.model_uri import parse_model_uri


def with_local_model(service: InferenceService, cache: Path, console: Console) -> InferenceService:
    """Return the service with its model as a file of this machine, fetched into `cache` if
    necessary.

    Tokens come from the user's environment. Raises `BadInputError` for a model that is not
    available as written, `RunError` for one that could not be fetched now.
    """
    model = service.spec.model
    if not parse_model_uri(model.uri).is_fetched:
        return service
    columns = TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn()
    speed = TransferSpeedColumn(), TimeRemainingColumn()
    with Bar(*columns, *speed, console=console, transient=True) as bar:
        task = bar.add_task(model.uri, total=None)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes)

        try:
            path = fetch_model(
                model.uri, cache, revision=model.revision, sha256=model.sha256, report=report
            )
        except (BadSourceError, InvalidRequestError) as exc:
            raise BadInputError(f"spec.model: {exc}") from exc
        except FetchError as exc:
            raise RunError(f"spec.model.uri: {exc}") from exc
    local = msgspec.structs.replace(
        model,
        uri=path.as_uri(),
        served_name=service.served_name,
        revision="",
        sha256="",
        credentials=None,
        cache=ModelCache(),
    )
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(service.spec, model=local))
