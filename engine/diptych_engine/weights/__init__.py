"""New weights for a running engine, from a trainer (reinforcement learning).

`update` is the state of a replacement, `calls` what an owner may ask of the core, `receiver` what
each worker does, and `trainer` both ends of the process group that carries large tensors.
"""
