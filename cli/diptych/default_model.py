"""Which model `diptych up` serves to a user who names none, and why."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TextIO

import httpx

from diptych.known_models import DEFAULT, KNOWN, PREFERRED, KnownModel, size_text
from diptych.models import is_here
from diptych_frontend.model_files.fetch.download import with_deadline
from diptych_frontend.model_files.fetch.source import UnreachableError
from diptych_protocol.model_uri import parse_model_uri

ENOUGH_MEMORY: Final = 8 << 30
"""Its weights, a KV cache of 1 GiB and the program, for each engine, and some for others."""
ANSWER_WITHIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the choice depends on, as far as it had to be looked at."""

    available_memory: int
    is_attended: bool
    """Whether somebody is at the terminal, who can read what is fetched, and stop it."""
    in_ci: bool = False
    preferred_is_here: bool = False
    obstacle: str = ""
    """Why the preferred model cannot be fetched; empty if it can."""


@dataclass(frozen=True, slots=True)
class DefaultModel:
    model: KnownModel
    why: str

    def __str__(self) -> str:
        """Say what was chosen, why, and how to have the other."""
        other = DEFAULT if self.model.name == PREFERRED else PREFERRED
        return f"serving {self.model.name}: {self.why}. `diptych up {other}` serves {other}."


def choose(found: Circumstances) -> DefaultModel:
    """Prefer the larger model where it costs nobody a surprise."""
    larger, small = KNOWN[PREFERRED], KNOWN[DEFAULT]
    size = size_text(larger.size_bytes)
    if found.in_ci:
        return DefaultModel(small, f"CI is set; {PREFERRED} answers better")
    if found.available_memory < ENOUGH_MEMORY:
        return DefaultModel(small, f"{PREFERRED} wants {ENOUGH_MEMORY >> 30} GiB of free memory")
    if not found.is_attended:  # what a script serves does not depend on the cache
        return DefaultModel(small, f"a terminal alone gets {PREFERRED} unasked")
    if found.preferred_is_here:
        return DefaultModel(larger, f"it answers better than {DEFAULT}, and is here")
    if found.obstacle:
        return DefaultModel(small, f"{PREFERRED} ({size}) cannot be fetched now: {found.obstacle}")
    return DefaultModel(larger, f"it answers better than {DEFAULT}; {size} are fetched once")


def default_choice(cache: Path, told: TextIO) -> DefaultModel:
    """Choose on this machine. `told`: where the choice is written. The network is asked last, only
    if it matters, and not for long."""
    from diptych.doctor.gather import memory

    found = Circumstances(
        available_memory=memory().available,
        is_attended=sys.stdin.isatty() and told.isatty(),
        in_ci=bool(os.environ.get("CI")),
        preferred_is_here=is_here(KNOWN[PREFERRED], cache),
    )
    choice = choose(found)
    if choice.model.name == DEFAULT or found.preferred_is_here:
        return choice
    return choose(replace(found, obstacle=_obstacle(choice.model)))


def _obstacle(model: KnownModel) -> str:
    """Why the Hub would not send the file to us; empty if it would."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return "HF_HUB_OFFLINE is set"
    uri = parse_model_uri(model.uri)
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    url = f"{hub}/{uri.host}/resolve/{model.revision}/{uri.path}"
    try:
        answer = with_deadline(lambda: httpx.head(url, timeout=ANSWER_WITHIN_S), ANSWER_WITHIN_S)
    except (UnreachableError, httpx.HTTPError, httpx.InvalidURL) as exc:
        return str(exc) or type(exc).__name__
    except (ImportError, ValueError, OSError) as exc:  # as httpx reads ALL_PROXY, SSL_CERT_FILE, …
        return f"the environment's proxy or certificates: {exc}".rstrip(".")
    return f"the Hub answers {answer.status_code}" if answer.is_error else ""
