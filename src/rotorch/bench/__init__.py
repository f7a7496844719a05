"""Layouts side by side in one run: time, memory and bytes sent, against ranks that do not communicate at all."""
