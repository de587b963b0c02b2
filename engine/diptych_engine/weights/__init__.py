"""New weights for a running engine, from a trainer (reinforcement learning).

`update` is the state of a replacement, `receiver` the worker's part, and `trainer` both ends of the
process group that carries large tensors. The calls of an owner are in `control.weight_calls`.
"""
