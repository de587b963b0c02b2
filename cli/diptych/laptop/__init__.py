"""Runs the rendered Kubernetes objects as processes of one machine, for laptops and tests. It is
not a cluster."""
