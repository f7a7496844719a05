"""`zeropp`: see `schedule.py` for the order in which its ranks compute."""
