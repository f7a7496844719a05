"""The user's own module in a loop of the user's own: what `parallelize` returns, its calls, its state."""
