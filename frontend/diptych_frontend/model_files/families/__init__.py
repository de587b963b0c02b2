"""The families of supported models, one file each.

A file here that defines `FAMILY` is a family; no other list names it. To add one, write that file,
a row of `CONFIGS` in `tests/support/model_kit/families.py`, and, if its layers compute what
no other's do, a model class in `engine/diptych_engine/models/`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec


def _families() -> dict[str, FamilySpec]:
    modules = (import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
    specs: list[FamilySpec] = [module.FAMILY for module in modules]
    return {spec.architecture: spec for spec in sorted(specs, key=lambda spec: spec.architecture)}


FAMILIES: Final = _families()
"""The families by architecture: `model_type` of config.json."""
GGUF_ARCHITECTURES: Final = {
    spec.gguf_architecture or name: name
    for name, spec in FAMILIES.items()
    if spec.gguf_architecture is not None
}
"""`general.architecture` of a GGUF file -> the family's architecture."""
