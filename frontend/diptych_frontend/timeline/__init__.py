"""A request's path through the pools, drawn as bars over time, for terminals and for pages."""
