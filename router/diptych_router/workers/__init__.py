"""Several processes of one router, which share its port: see docs/decisions/0057."""
