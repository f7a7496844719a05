"""Training: data, state, loop, checkpoints and what is reported while they run."""
