"""The Kubernetes API: its client, watches, the lease of the leader, children and events."""
