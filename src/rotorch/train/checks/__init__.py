"""Checks of a run, by subject, that `preflight.check_run` calls before anything starts."""
