"""The `ddp` strategy: `plan.py` describes it, `apply.py` holds a model for it."""
