"""How `summa` holds a model: blocks of its weights, on this rank's place of the grid (`hold/grid.py`)."""

from rotorch.hold.grid import apply

__all__ = ["apply"]
