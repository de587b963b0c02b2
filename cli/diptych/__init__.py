"""The `diptych` command: runs a service of two pools on a laptop, as on a cluster."""
