"""`pp`: see `plan.py` for what it is, `apply.py` for how."""
