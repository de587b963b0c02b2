"""The policies, one file each: what every engine costs a request.

A file here that defines `POLICY` is a policy: nothing else lists them. `spec.router.policy` names
the router's; `python -m benchmarks.simulate run --policy NAME` simulates a fleet with any.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from diptych_router.choosing.policy import Policy

POLICIES: Final[dict[str, Policy]] = {
    found.name: import_module(f"{__name__}.{found.name}").POLICY for found in iter_modules(__path__)
}
"""By the name of the file."""
