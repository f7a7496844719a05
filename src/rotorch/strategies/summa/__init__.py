"""The `summa` strategy: `plan.py` describes it, `hold/grid.py` holds a model for it."""
