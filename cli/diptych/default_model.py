"""Which model `diptych up` serves to a user who names none, and why."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx

from diptych.known_models import DEFAULT, KNOWN, PREFERRED, KnownModel, size_text
from diptych.models import is_here
from diptych_frontend.model_files.fetch.download import with_deadline
from diptych_frontend.model_files.fetch.errors import UnreachableError
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
    network: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    model: KnownModel
    why: str

    def __str__(self) -> str:
        """Say what was chosen, why, and how to have the other."""
        other = DEFAULT if self.model.name == PREFERRED else PREFERRED
        return f"serving {self.model.name}: {self.why}. `diptych up {other}` serves {other}."


def choose(found: Circumstances) -> Choice:
    """Prefer the larger model where it costs nobody a surprise."""
    larger, small = KNOWN[PREFERRED], KNOWN[DEFAULT]
    size = size_text(larger.size_bytes)
    if found.in_ci:
        return Choice(small, f"CI is set; {PREFERRED} answers better")
    if found.available_memory < ENOUGH_MEMORY:
        return Choice(small, f"{PREFERRED} wants {ENOUGH_MEMORY >> 30} GiB of free memory")
    if found.preferred_is_here:
        return Choice(larger, f"it answers better than {DEFAULT}, and is here")
    if not found.is_attended:
        return Choice(small, f"nobody is here to see {PREFERRED} fetched ({size})")
    if not found.network:
        return Choice(small, f"{PREFERRED} ({size}) cannot be fetched now")
    return Choice(larger, f"it answers better than {DEFAULT}; {size} are fetched once")


def default_choice(cache: Path) -> Choice:
    """Choose on this machine. The network is asked last, only if it matters, and not for long."""
    from diptych.doctor.gather import memory

    found = Circumstances(
        available_memory=memory().available,
        is_attended=sys.stdin.isatty(),
        in_ci=bool(os.environ.get("CI")),
        preferred_is_here=is_here(KNOWN[PREFERRED], cache),
        network=True,
    )
    choice = choose(found)
    if choice.model.name == DEFAULT or found.preferred_is_here:
        return choice
    return choose(replace(found, network=_is_offered(choice.model)))


def _is_offered(model: KnownModel) -> bool:
    """Whether the Hub has the file for us."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return False
    uri = parse_model_uri(model.uri)
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    url = f"{hub}/{uri.host}/resolve/{model.revision}/{uri.path}"
    try:
        answer = with_deadline(lambda: httpx.head(url, timeout=ANSWER_WITHIN_S), ANSWER_WITHIN_S)
    except (UnreachableError, httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code < 400
