"""The open requests of a client as V0 had them: one queue each, by the caller's id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diptych_frontend.text.collector import Collector
from diptych_frontend.text.output_processor import OutputProcessor


class OutputQueue:
    """The mailbox of one request, which holds what was not read yet as one output."""

    def __init__(self, collector: Collector[Any]) -> None:
        self._collector = collector

    def put_nowait(self, item: Any) -> None:
        """An exception ends the request. Its generator raises an `EngineGenerateError` that names
        the exception, or the exception itself if it is a `DiptychError`. An output comes in place
        of one that was not read yet."""
        if isinstance(item, BaseException):
            self._collector.fail(item)
        else:
            self._collector.put(item)

    async def get(self) -> Any:
        """The next output. Raises the error that ended the request."""
        return await self._collector.get()


class OutputQueues(Mapping[str, OutputQueue]):
    """A live view; a request is in it from its start to its end."""

    def __init__(self, outputs: OutputProcessor) -> None:
        self._outputs = outputs

    def __getitem__(self, request_id: str) -> OutputQueue:
        collector = self._outputs.collector_of(request_id)
        if collector is None:
            raise KeyError(request_id)
        return OutputQueue(collector)

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs.open_ids)

    def __len__(self) -> int:
        return len(self._outputs.open_ids)
