"""What adds a package to this installation, for messages that advise it.

No index has a package of ours, so a command never names `diptych`, but the packages that an extra
needs and that are missing. It also names the Python that runs, because the one on the PATH may be
another. So it is the same in a clone and of a wheel; an image is built anew instead.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

IMAGE_FOLDERS: Final = ("/opt/diptych/code", "/opt/diptych/lib")
"""Where the packages of ours lie in images."""
_REQUIREMENT: Final = re.compile(r"(?P<what>[^;]+?)\s*(?:;.*\bextra == '(?P<extra>[\w-]+)'.*)?")
_NAME: Final = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Installation:
    """The Python that runs, and what is known of its packages."""

    python: str
    in_image: bool = False
    has_pip: bool = True
    """An environment that uv made has none."""
    extras: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The requirements of each extra."""
    present: frozenset[str] = frozenset()
    """The names of the packages in `extras` that are installed."""

    def add(self, *packages: str, alone: bool = False) -> str:
        """Return what installs packages, with or without (`alone`) what they require."""
        if self.in_image:
            return f"build the image anew with --build-arg MODEL_PACKAGES={_quoted(packages)}"
        pip = ["uv", "pip", "install", "--python", self.python]
        if self.has_pip:
            pip = [self.python, "-m", "pip", "install"]
        return shlex.join([*pip, *(["--no-deps"] if alone else []), *packages])

    def add_extras(self, *names: str) -> str:
        """Return what installs all that is missing of these extras; if nothing is, all again."""
        needed = dict.fromkeys(each for name in names for each in self.extras.get(name, ()))
        missing = [each for each in needed if name_of(each) not in self.present]
        if self.in_image:
            return f"build an image with diptych[{','.join(names)}]"
        return self.add(*(missing or needed))


def _quoted(packages: Sequence[str]) -> str:
    return shlex.quote(" ".join(packages))


def name_of(requirement: str) -> str:
    """Return the name of the package that a requirement begins with."""
    found = _NAME.match(requirement)
    return found.group() if found else ""


def read_extras(requires: Sequence[str]) -> dict[str, list[str]]:
    """Return the requirements of each extra, from those of our distribution's metadata, where each
    extra has also those of the extras that it names. All need what belongs to no extra."""
    extras: dict[str, list[str]] = {}
    always: list[str] = []
    for line in requires:
        if found := _REQUIREMENT.fullmatch(line):
            extra = found["extra"]
            (extras.setdefault(extra, []) if extra else always).append(found["what"])
    return {extra: [*always, *own] for extra, own in extras.items()}


def this_installation() -> Installation:
    """Look at this process's."""
    try:
        extras = read_extras(metadata.requires("diptych") or ())
    except metadata.PackageNotFoundError:
        extras = {}
    names = {name_of(each) for requirements in extras.values() for each in requirements}
    return Installation(
        python=sys.executable,
        in_image=str(Path(__file__).parents[1]) in IMAGE_FOLDERS,
        has_pip=find_spec("pip") is not None,
        extras=extras,
        present=frozenset(name for name in names if _is_installed(name)),
    )


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
