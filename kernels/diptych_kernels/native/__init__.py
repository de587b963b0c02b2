"""Kernels for CPUs: written in Python, compiled by Numba, run by torch's own threads."""
