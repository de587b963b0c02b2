"""The models: an interface, one file per kind of layers, a registry, and the loader of weights."""

from diptych_engine.models.interface import CausalLM, StepInputs, WeightSlot
from diptych_engine.models.loader import check_weights, is_quantised, load_weights, weights_sample
from diptych_engine.models.registry import build_model

__all__ = [
    "CausalLM",
    "StepInputs",
    "WeightSlot",
    "build_model",
    "check_weights",
    "is_quantised",
    "load_weights",
    "weights_sample",
]
