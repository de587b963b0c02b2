"""The residual sum of a layer and the normalisation that follows it."""

from diptych_kernels.add_rms_norm.reference import add_rms_norm

__all__ = ["add_rms_norm"]
