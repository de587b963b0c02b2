"""What the cluster reports, and the status that is computed from it."""
