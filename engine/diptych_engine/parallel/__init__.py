"""Several processes as one engine (tensor parallel), and several engines in step (data parallel).

Rank 0 of a tensor-parallel group runs in the EngineCore's process (`lead`), the others in children
of it (`worker`). `steps` has the messages between them, and `group` sums their tensors.
"""
