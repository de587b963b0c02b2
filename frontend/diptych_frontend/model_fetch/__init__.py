"""Fetches models: `python -m diptych_frontend.model_fetch --uri hf://ORG/REPO --cache FOLDER`."""

from __future__ import annotations

from diptych_frontend.model_fetch.credentials import Credentials, read_credentials
from diptych_frontend.model_fetch.errors import BadSourceError, FetchError
from diptych_frontend.model_fetch.fetch import fetch_model
from diptych_frontend.model_fetch.progress import Progress

__all__ = [
    "BadSourceError",
    "Credentials",
    "FetchError",
    "Progress",
    "fetch_model",
    "read_credentials",
]
