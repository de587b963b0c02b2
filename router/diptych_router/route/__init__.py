"""One address for the models of several services: a thin proxy in front of their routers."""
