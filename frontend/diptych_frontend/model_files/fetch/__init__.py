"""Fetches models.

`python -m diptych_frontend.model_files.fetch --uri hf://ORG/REPO --cache FOLDER`.
"""

from __future__ import annotations

from diptych_frontend.model_files.fetch.credentials import Credentials, read_credentials
from diptych_frontend.model_files.fetch.fetch import Progress, fetch_model, is_cached
from diptych_frontend.model_files.fetch.source import BadSourceError, FetchError, UnreachableError

__all__ = [
    "BadSourceError",
    "Credentials",
    "FetchError",
    "Progress",
    "UnreachableError",
    "fetch_model",
    "is_cached",
    "read_credentials",
]
