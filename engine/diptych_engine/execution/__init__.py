"""What computes a step: the runner, its batch, and the sampler."""
