"""How `summa` holds a model: blocks of its weights, on this rank's place of the grid (`grid_holding.py`)."""

from rotorch.grid_holding import apply

__all__ = ["apply"]
