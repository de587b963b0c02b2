"""The `diptych` command: a service in two pools, on a laptop as on a cluster."""
