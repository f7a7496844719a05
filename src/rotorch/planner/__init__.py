"""Predictions of memory, traffic and time of layouts, before anything is started. Pure Python."""
