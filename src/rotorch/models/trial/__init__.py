"""Facts about a model that are found by trying a tiny model of the same kind."""
