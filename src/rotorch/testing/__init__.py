"""Public test tools: fork ranks on one machine, compare a parallel model with one process."""
