"""Cutting weights into slices, holding them, and giving them their first values."""
