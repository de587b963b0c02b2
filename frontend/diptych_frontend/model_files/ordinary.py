"""Which of the files that somebody names may be opened."""

from __future__ import annotations

import errno
from pathlib import Path


def require_ordinary(path: Path) -> None:
    """Raise `OSError` for what is there and is no ordinary file: to open a pipe is to wait for its
    writer, and devices have no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
