"""Computes steps: the runner, its batch, and the sampler."""
