"""The address at which `diptych up` accepts requests from the page to kill an engine, on a laptop
only.

Only `diptych up` writes this file, and nothing in a cluster sets the variable that names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from diptych_frontend.openai.mounted import read
from diptych_protocol import UNREADABLE, InvalidRequestError

CONTROL_VARIABLE = "DIPTYCH_PAGE_CONTROL"
"""The environment variable that names the file."""
MAX_BYTES = 4096


class Control(msgspec.Struct, frozen=True):
    """The address of `diptych up`, and its bearer token."""

    url: Annotated[str, msgspec.Meta(pattern=r"^http://127\.0\.0\.1:[0-9]{1,5}$")]
    token: Annotated[str, msgspec.Meta(min_length=16, max_length=256)]


def read_control() -> Control | None:
    """Read the file; None if the environment names none. Raises `InvalidRequestError`."""
    path = os.environ.get(CONTROL_VARIABLE)
    if not path:
        return None
    try:
        return msgspec.json.decode(read(Path(path), MAX_BYTES), type=Control)
    except (OSError, *UNREADABLE) as exc:
        raise InvalidRequestError(f"{CONTROL_VARIABLE}: {path}: {exc}") from exc
