"""Files of traces: Mooncake's, and Azure's of 2023.

Mooncake's has a JSON object a line (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces);
Azure's is a table (https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md).
Fields and columns besides those that are named here are ignored. A file is not trusted: whatever is
no request raises `TraceError` with its line and its field.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from benchmarks.traces.recorded import BLOCK_TOKENS, Trace, TraceRequest
from msgspec import Meta

MOST_TOKENS = 1 << 24
"""A longer prompt or answer is no request of any model."""
Prompt = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Output = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
"""An answer of none is taken for one of one, as engines do not answer less."""
COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceError(ValueError):
    """A file is no trace; the message names the line, and the field if it is one."""


class MooncakeLine(msgspec.Struct):
    """A request of Mooncake's traces."""

    timestamp: Annotated[float, Meta(ge=0, le=1e15)]
    """Milliseconds."""
    input_length: Prompt
    output_length: Output
    hash_ids: list[int]
    """A block of 512 tokens each, the last one not complete."""


class AzureRow(msgspec.Struct):
    """A request of Azure's traces."""

    timestamp: str = msgspec.field(name="TIMESTAMP")
    prompt: Prompt = msgspec.field(name="ContextTokens")
    output: Output = msgspec.field(name="GeneratedTokens")


def read_trace(path: Path) -> Trace:
    """A file of either format, which its beginning tells.

    Raises `TraceError` if it is neither or has no request, and `OSError` if it cannot be read.
    """
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    read = _mooncake if data.lstrip().startswith(b"{") else _azure
    try:
        return Trace.of(read(data))
    except TraceError as exc:
        raise TraceError(f"{path}, {exc}") from exc
    except ValueError as exc:
        raise TraceError(f"{path}: {exc}") from exc


def write_trace(path: Path, trace: Trace) -> None:
    """In Mooncake's format. Raises `ValueError` for blocks of another length than its own."""
    if trace.block_tokens != BLOCK_TOKENS:
        raise ValueError(f"the format has blocks of {BLOCK_TOKENS} tokens")
    with path.open("wb") as file:
        for r in trace.requests:
            line = MooncakeLine(round(r.arrival * 1e3), r.prompt, r.output, list(r.blocks))
            file.write(msgspec.json.encode(line) + b"\n")


def _mooncake(data: bytes) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(MooncakeLine)
    for number, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise TraceError(f"line {number}: {_reason(exc)}") from exc
        # A prompt of whole blocks may have begun one more.
        if len(line.hash_ids) > line.input_length // BLOCK_TOKENS + 1:
            raise TraceError(
                f"line {number}: hash_ids: {len(line.hash_ids)} blocks of {BLOCK_TOKENS} tokens "
                f"are more than input_length {line.input_length} has"
            )
        blocks = line.hash_ids[: -(-line.input_length // BLOCK_TOKENS)]
        output = max(1, line.output_length)
        yield TraceRequest(line.timestamp / 1e3, line.input_length, output, tuple(blocks))


def _azure(data: bytes) -> Iterator[TraceRequest]:
    lines = data.decode(errors="replace").splitlines()
    rows = csv.DictReader(lines)
    try:
        if not set(COLUMNS.split(",")) <= set(rows.fieldnames or ()):
            raise TraceError(f"line 1: neither a JSON object nor a table with columns {COLUMNS}")
        for row in rows:
            yield _azure_request(row)
    except (csv.Error, msgspec.ValidationError) as exc:
        raise TraceError(f"line {rows.reader.line_num}: {_reason(exc)}") from exc


def _azure_request(row: dict[Any, Any]) -> TraceRequest:
    """Raises `msgspec.ValidationError`."""
    named = {name: value for name, value in row.items() if isinstance(name, str)}
    found = msgspec.convert(named, AzureRow, strict=False)
    try:
        time = datetime.fromisoformat(found.timestamp)
    except ValueError as exc:
        raise msgspec.ValidationError(f"{exc} - at `$.TIMESTAMP`") from exc
    arrival = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return TraceRequest(arrival, found.prompt, max(1, found.output))


def _reason(exc: Exception) -> str:
    """The field first, where it is known."""
    found = re.fullmatch(r"(.*) - at `\$\.?(.*?)`", str(exc), re.DOTALL)
    return f"{found[2]}: {found[1]}" if found and found[2] else str(exc)
