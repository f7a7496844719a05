"""Checkpoints: contents, files, commits, and export."""
