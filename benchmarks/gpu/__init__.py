"""What a short loan of a GPU is used for: stages that each end by themselves; docs/gpu.md."""
