"""Kernels for CPUs: written in Python (`compiled/`), compiled by Numba, run by torch's own threads.

Sources and compiler know neither torch nor the folders of the operations, which call them.
"""
