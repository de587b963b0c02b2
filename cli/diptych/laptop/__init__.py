"""Runs the rendered Kubernetes objects as processes of one machine: an embedded default for laptops
and tests, not a cluster."""
