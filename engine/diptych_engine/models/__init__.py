"""The models: an interface, one file per kind of layers, a registry, and the loader of weights."""

from diptych_engine.models.interface import CausalLM, StepInputs, WeightSlot
from diptych_engine.models.loader import is_quantised, load_weights
from diptych_engine.models.registry import build_model

__all__ = ["CausalLM", "StepInputs", "WeightSlot", "build_model", "is_quantised", "load_weights"]
