"""The torch profiler of one worker. While it is off, it costs nothing measurable."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from diptych_protocol import InvalidRequestError

log = logging.getLogger(__name__)

_NOTHING = contextlib.nullcontext()


class Profiler:
    """Runs at most one profile at a time."""

    def __init__(self, directory: str, name: str) -> None:
        """Traces are written to `directory`, named for `name`, process and time. An empty directory
        disables profiling."""
        self._directory = directory
        self._name = name
        self._prefix = name
        self._profile: profile | None = None

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods for `collective_rpc`, but not for clients."""
        return {f"_{call.__name__}": call for call in (self.start_profile, self.stop_profile)}

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Mark what runs inside with a name, if a profile is running."""
        return _NOTHING if self._profile is None else record_function(name)

    def start_profile(self, profile_prefix: str = "") -> None:
        """Begin a profile; the name of its file begins with the prefix, or with the engine's.

        Raises `InvalidRequestError` if a profile is running, or profiling is disabled.
        """
        if self._profile is not None:
            raise InvalidRequestError("a profile is running already; stop it first")
        if not self._directory:
            raise InvalidRequestError(
                "this engine has no profile_dir to write a profile to", param="profile_dir"
            )
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        started = profile(activities=activities)
        started.start()
        self._profile, self._prefix = started, profile_prefix or self._name

    def stop_profile(self) -> str | None:
        """End the profile and write its trace, for chrome://tracing or Perfetto.

        Returns the file, or None if no profile ran. Raises `OSError` or `RuntimeError` if it cannot
        be written; the profile has ended even then.
        """
        if self._profile is None:
            return None
        ended, self._profile = self._profile, None
        ended.stop()
        name = f"{self._prefix}-{os.getpid()}-{time.time_ns()}.pt.trace.json"
        path = Path(self._directory) / name
        ended.export_chrome_trace(str(path))
        log.info("the profile is in %s", path)
        return str(path)
