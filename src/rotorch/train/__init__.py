"""Training: data, state, loop, checkpoints and reports."""
