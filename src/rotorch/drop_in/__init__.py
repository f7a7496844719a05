"""The user's own module in a loop of the user's own: the result of `parallelize`, its calls, its state."""
