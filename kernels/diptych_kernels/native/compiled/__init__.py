"""The sources that Numba compiles: a kernel's module has an `entry`; the others are parts of
kernels."""
