"""The wire types of files and batches, in which they are also stored."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from diptych_frontend.openai.api_types import MAX_METADATA, MetadataText

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]  # fmt: skip
"""The paths that the lines of a batch may name."""
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
WINDOW_S: Final = 24 * 3600
"""The length of the only completion window."""
KEPT_S: Final = 30 * 24 * 3600
"""How long files are kept unless their client asks for less; ended batches too."""
LEAST_KEPT_S: Final = 3600

MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a client."""

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed", "error"] = "processed"
    """`error`: its description on the disk is damaged."""
    status_details: str | None = None
    object: Literal["file"] = "file"


class FileList(msgspec.Struct, frozen=True):
    """A page of files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct, frozen=True):
    """The answer to the deletion of a file."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class FileForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an upload. They come as multipart/form-data."""

    file: str
    """The content, with a JSON request on each line."""
    purpose: Literal["batch"]
    expires_after_anchor: Annotated[
        Literal["created_at"] | None, msgspec.Meta(description="Goes with the seconds.")
    ] = msgspec.field(default=None, name="expires_after[anchor]")
    expires_after_seconds: Annotated[int, msgspec.Meta(ge=LEAST_KEPT_S, le=KEPT_S)] | None = (
        msgspec.field(default=None, name="expires_after[seconds]")
    )


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long after its creation a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=LEAST_KEPT_S, le=KEPT_S)]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, msgspec.Meta(max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: (
        Annotated[dict[MetadataKey, MetadataText], msgspec.Meta(max_length=MAX_METADATA)] | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, frozen=True):
    """An error in an input file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    """The first errors of an input file."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """The number of a batch's lines, and how many of them have ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(msgspec.Struct, frozen=True):
    """Tokens of prompts that were in a prefix cache."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Tokens of answers that were reasoning."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """The tokens of all answers of a batch so far."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in the form for its client."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"


class BatchList(msgspec.Struct, frozen=True):
    """A page of batches."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class LineResponse(msgspec.Struct, frozen=True):
    """The answer of a route to a line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """Why no route answered a line."""

    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    """A line of an output file or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None
