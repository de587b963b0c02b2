"""Root-mean-square normalisation."""

from diptych_kernels.rms_norm.reference import rms_norm

__all__ = ["rms_norm"]
