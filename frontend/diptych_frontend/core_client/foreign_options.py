"""Options of vLLM's engines that have no meaning here."""

from __future__ import annotations

from diptych_protocol import UnsupportedFeatureError

_WHY = {
    "executor_class": "the core runs its workers itself; choose a device in the configuration",
    "usage_context": "no usage is reported to anybody",
    "mm_registry": "there are no multimodal models",
    "use_cached_outputs": "outputs are never cached",
    "profile_prefix": "profiles are named for their engine; choose its engine_id",
    "start_engine_loop": "the core starts with its client",
}


def refuse_foreign(**options: object) -> None:
    """Raise `UnsupportedFeatureError` unless each of the named options is None: not asked for."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedFeatureError(f"{name} must be left alone: {_WHY[name]}")
