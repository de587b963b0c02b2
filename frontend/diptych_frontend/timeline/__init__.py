"""A request's way through the pools, as bars over time: for terminals and for pages."""
