"""What Numba compiles: each kernel has a module with its `entry`; the others are their parts."""
