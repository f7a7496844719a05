"""`summa`: see `plan.py` for what it is, `hold/grid.py` for how."""
