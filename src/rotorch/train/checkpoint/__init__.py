"""Checkpoints: what is saved, where it lies, how it becomes whole, and export."""
