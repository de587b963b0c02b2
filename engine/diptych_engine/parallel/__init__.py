"""Several processes as one engine (tensor parallel), and several engines in step (data parallel).

Rank 0 of a tensor-parallel group lives in the EngineCore's process (`lead`), the others in children
of it (`worker`); `steps` is what the lead tells them, `group` how their tensors become sums.
"""
