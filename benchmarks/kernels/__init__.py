"""The GPU kernels beside what the device can do, and beside torch's own."""
