"""Adds our connector to a vLLM on this machine, as an init container does in a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from diptych.errors import BadInputError
from diptych.known_models import Source
from diptych_operator.api.service import InferenceService

IMPORTED: Final = (
    "diptych_protocol",
    "diptych_frontend",
    "diptych_kernels",
    "diptych_kv_transfer",
    "diptych_vllm",
    "libucx",
)
"""Packages that the connector imports and vLLM's environment does not have. Our other packages must
not be importable there, because vLLM has other versions of numpy, ZMQ and torch."""


def connector_packages(source: Source, service: InferenceService) -> Mapping[str, Path]:
    """Return the packages for a folder in vLLM's `PYTHONPATH`: name -> path.

    Empty for a service that needs none. Raises `BadInputError`, saying what to install.
    """
    if not service.has_connector_of_ours:
        return {}
    folders: dict[str, Path] = {}
    for name in IMPORTED:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise BadInputError(
                f"{source}: spec.transfer.connector: diptych needs the package {name}, which is "
                "not installed here: pip install 'diptych[vllm]', or choose the connector nixl"
            )
        folders[name] = Path(spec.submodule_search_locations[0])
    # Libraries that a wheel brings lie beside its package, where its own look for them.
    beside = folders["libucx"].parent.glob("libucx*.libs")
    return folders | {folder.name: folder for folder in beside}
