"""The part of a model on each rank, for every strategy: weights at rest, and during a pass."""
