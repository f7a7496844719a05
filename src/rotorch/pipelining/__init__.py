"""Pipelines as tables: which stage computes which micro-batch when, in pure Python. Read `actions.py` first."""
