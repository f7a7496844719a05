"""`zeropp`: see `plan.py` for what it is, `schedule.py` for the order of its ranks, `apply.py` for how."""
