"""Ranks: how they start, join, report, fail and start again."""
