"""The policies, one file each: what every engine costs a request.

A file here that defines `POLICY` is a policy, and nothing else lists them. A router takes the one
that its setting `policy` names; `python -m benchmarks.simulate run --policy NAME` simulates any.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from diptych_protocol import RouterSettings
from diptych_protocol.admin import RefusedSetting
from diptych_router.choosing.policy import Policy

POLICIES: Final[dict[str, Policy]] = {
    found.name: import_module(f"{__name__}.{found.name}").POLICY for found in iter_modules(__path__)
}
"""By the name of the file."""


def policy_of(settings: RouterSettings) -> tuple[Policy, list[RefusedSetting]]:
    """The policy that a router is to use, and what it must report instead if there is none of that
    name. Then it gets no requests, and the policy is the usual one."""
    found = POLICIES.get(settings.policy)
    if found is not None:
        return found, []
    why = f"this router has no policy {settings.policy}, only {', '.join(sorted(POLICIES))}"
    refused = RefusedSetting(setting="policy", why=why)
    return POLICIES[RouterSettings().policy], [refused]
