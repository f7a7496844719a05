"""`ddp_bf16`: see `plan.py` for what it is, `apply.py` for how."""
