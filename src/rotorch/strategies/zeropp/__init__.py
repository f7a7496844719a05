"""The `zeropp` strategy: `plan.py` describes it, `schedule.py` orders its ranks, `apply.py` holds a model for it."""
